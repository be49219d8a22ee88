"""A mixture of sources: which source, and which of its examples, each element of the order is.

Of the first n elements, source s has n * w_s of its examples, less than one more or fewer, where
w_s is its share. R. Tijdeman's rule gives such a sequence (Discrete Mathematics 32, 1980, pages 323
to 330). It is periodic, so that any element is found without those before it. Each source goes
through its own examples in its own order, epoch after epoch.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from optimus_jax.data.batch import HostBatch
from optimus_jax.data.sampler import (
    ExampleOrder,
    Examples,
    count_examples,
    cut_examples,
    order_of,
)

MAX_PERIOD = 1 << 16
"""Longest period of the sequence of sources. Weights with a longer one are rounded to it."""


def period_counts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Examples of each source in a period: whole numbers with the ratios of the weights.

    If these would add up to more than MAX_PERIOD, they are rounded to that sum, each at least 1.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    counts = [max(1, int(share * MAX_PERIOD)) for share in shares]
    # The largest source has room for what rounding the others has left or taken.
    largest = shares.index(max(shares))
    counts[largest] += MAX_PERIOD - sum(counts)
    return tuple(counts)


class SourceSequence:
    """The source of each element, and how many elements before it are of that source."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.period = sum(counts)
        self._sources = _assigned(self.counts)
        numbers = np.zeros(self.period, np.int64)
        for source in range(len(counts)):
            numbers[self._sources == source] = np.arange(counts[source])
        self._numbers = numbers

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The source of element `index`, and the number of its elements before."""
        period, place = divmod(index, self.period)
        source = int(self._sources[place])
        return source, period * self.counts[source] + int(self._numbers[place])

    def longest(self, available: Sequence[int]) -> int:
        """The number of first elements that need at most `available` elements of each source."""
        periods = min(have // need for have, need in zip(available, self.counts, strict=True))
        left = [have - periods * need for have, need in zip(available, self.counts, strict=True)]
        is_missing = self._numbers >= np.array(left)[self._sources]
        return periods * self.period + int(np.argmax(is_missing))


def _assigned(counts: tuple[int, ...]) -> np.ndarray:
    """The sources of one period, int64 [sum of counts].

    Each element goes to the source whose next element is due first, among those that are behind by
    at least 1 / (2 K - 2) of an element, of K sources. Then no source is ever ahead or behind by
    more than 1 - 1 / (2 K - 2).
    """
    if len(counts) == 1:
        return np.zeros(counts[0], np.int64)
    period, parts = sum(counts), 2 * len(counts) - 2
    found = np.empty(period, np.int64)
    behind = [0] * len(counts)  # in elements times `period`
    for place in range(period):
        behind = [due + count for due, count in zip(behind, counts, strict=True)]
        chosen = min(
            (source for source, due in enumerate(behind) if due * parts >= period),
            # how much later it is due: (1 - 1 / parts - behind) / share
            key=lambda source: Fraction(
                (parts - 1) * period - parts * behind[source], counts[source]
            ),
        )
        behind[chosen] -= period
        found[place] = chosen
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Sources to train on, mixed by their weights.

    Example i of source s has the number i * K + s, of K sources.
    """

    names: tuple[str, ...]
    parts: tuple[Examples, ...]
    """The sources, in the order of their names."""
    counts: tuple[int, ...]
    """Examples of each source in a period (`period_counts`)."""

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return " ".join(part.name for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @functools.cached_property
    def sequence(self) -> SourceSequence:
        """The sources of all elements."""
        return SourceSequence(self.counts)

    def count_examples(self, seq_len: int) -> int:
        """Examples of all sources."""
        return sum(count_examples(part, seq_len) for part in self.parts)

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """The order in training, a function of (seq_len, seed) alone."""
        return _MixedOrder(self, seq_len, seed)

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The examples numbered `examples` [R]; as `sampler.cut_examples`."""
        rows: list[HostBatch] = []
        for example in examples.tolist():
            number, source = divmod(example, len(self.parts))
            rows.append(
                cut_examples(
                    self.parts[source],
                    np.array([number], np.int64),
                    seq_len=seq_len,
                    respect_documents=respect_documents,
                )
            )
        if not rows:
            return cut_examples(
                self.parts[0],
                np.array([], np.int64),
                seq_len=seq_len,
                respect_documents=respect_documents,
            )
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


class _MixedOrder:
    """Each source's examples in the source's own order."""

    def __init__(self, mixture: Mixture, seq_len: int, seed: int) -> None:
        self._sequence, self._num_sources = mixture.sequence, len(mixture.parts)
        seeds = np.random.SeedSequence([seed, self._num_sources]).generate_state(self._num_sources)
        self._orders = [
            order_of(part, seq_len, int(own))
            for part, own in zip(mixture.parts, seeds, strict=True)
        ]

    def __getitem__(self, index: int) -> int:
        source, number = self._sequence[index]
        return int(self._orders[source][number]) * self._num_sources + source


class HeldOutMixture(Mixture):
    """What is held out of each source, mixed by the weights: an evaluation reads the first examples
    in order, without repeats, so it ends where a source has no more.
    """

    def count_examples(self, seq_len: int) -> int:
        """Examples until a source has no more."""
        return self.sequence.longest([count_examples(part, seq_len) for part in self.parts])

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The examples numbered `examples` [R], counted through all sources."""
        found = [self.sequence[example] for example in examples.tolist()]
        numbers = [number * len(self.parts) + source for source, number in found]
        return super().cut_examples(
            np.array(numbers, np.int64), seq_len=seq_len, respect_documents=respect_documents
        )
