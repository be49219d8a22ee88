"""Texts of which parts count, and the examples that are packed of them: conversations, and texts
with labels.

A text is never split across examples. Of a conversation every token but the last is followed by its
target: one of n tokens takes up n - 1 places of an example, and its last token is a target only.
Where the targets are labels, each token has its own, and n tokens take up n places. Texts that are
too long for an example are truncated or dropped; those with labels are truncated inside their
special tokens (`TextFrame`), in examples of every length. The two of a preference pair share an
example, one after the other. Each text has its own positions and segment; padding at the end of an
example is a segment of its own whose targets do not count. Which texts share an example depends on
the data and seq_len alone (packing.py), and examples are shuffled as those of a stream are.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from optimus_jax.config.data import TooLong
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.digests import WholeDigest
from optimus_jax.data.packing import Packing, pack
from optimus_jax.data.sampler import ExampleOrder, example_order
from optimus_jax.data.token_ids import TextFrame
from optimus_jax.data.tokens import chosen_documents
from optimus_jax.errors import DataError, explain

_SHUFFLED_BY = 0
"""Seed by which held-out texts with labels are shuffled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """What is learnt of tokens other than the next one, and how their texts are truncated."""

    targets: np.ndarray
    """Label of each token, -1 if it has none: int32 [N]."""
    types: np.ndarray
    """0, or 1 in a second text: uint8 [N]."""
    frame: TextFrame
    """The special tokens around each."""
    num_parts: int
    """Texts in a frame: 1, or 2."""
    first_sizes: np.ndarray
    """Number of tokens of the first text in each frame: int64 [C]."""
    at_last: bool = False
    """Whether each has one label, which counts at its last token, wherever that is."""
    needs_all: bool = False
    """Whether a text that has lost a label teaches nothing, as one that has lost half an answer."""

    def taken(self, tokens: np.ndarray, texts: np.ndarray) -> "Labels":
        """Those of some tokens and texts, as indices or masks."""
        return dataclasses.replace(
            self,
            targets=self.targets[tokens],
            types=self.types[tokens],
            first_sizes=self.first_sizes[texts],
        )

    def ranges(self, texts: np.ndarray, sizes: np.ndarray, seq_len: int) -> np.ndarray:
        """The tokens that remain of texts in an example of this length, in ranges from the first
        token of each: int64 [T, num_parts + 1, 2].

        Args:
          texts: their numbers, int64 [T].
          sizes: how many tokens each has, int64 [T].
        """
        before, ends = self.frame.beginning(self.num_parts), self.frame.ends(self.num_parts)
        parts = [self.first_sizes[texts]]
        if self.num_parts > 1:
            parts.append(sizes - self.frame.num_tokens(self.num_parts) - parts[0])
        kept = self.frame.fitting_sizes(parts, seq_len)
        begin, found, place = np.zeros_like(sizes), [], np.full_like(sizes, len(before))
        for part, size, end in zip(parts, kept, ends, strict=True):
            found.append((begin, place + size))
            begin = place + part
            place = begin + len(end)
        return np.stack([np.stack(each, -1) for each in (*found, (begin, place))], 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Texts with what counts of them, one after another."""

    name: str
    """Where they come from, for messages."""
    tokens: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    counts: np.ndarray
    """Whether each token counts in the loss when it, or its label, is the target: bool [N]."""
    starts: np.ndarray
    """Where each text begins, and the end: int64 [C + 1]."""
    labels: Labels | None = None
    """What is learnt of each token; None: every next token."""
    vocab_size: int
    """Token ids are below this."""
    too_long: TooLong
    """What is done with those that are longer than an example."""
    group_size: int = 1
    """Number of texts in a row that share an example: 2 for preference pairs."""
    noun: str = "conversation"
    """What a text is, for messages."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.starts) - 1

    @property
    def num_pieces(self) -> int:
        """Number of texts, or of groups that share an example."""
        return self.num_texts // self.group_size

    @property
    def _ahead(self) -> int:
        """How far a target is after its token."""
        return 1 if self.labels is None else 0

    @property
    def sizes(self) -> np.ndarray:
        """Places that each takes up in an example, if it is not truncated: int64 [C]."""
        return np.diff(self.starts) - self._ahead

    def sizes_in(self, seq_len: int) -> np.ndarray:
        """Places that each takes up in an example of this length: int64 [C]. Of a group that is
        longer, each is truncated to its share.
        """
        is_long = np.repeat(self._by_piece(self.sizes) > seq_len, self.group_size)
        return np.where(is_long, np.minimum(self.sizes, seq_len // self.group_size), self.sizes)

    def _by_piece(self, of_each: np.ndarray) -> np.ndarray:
        """Sums over the texts of each piece."""
        return of_each.reshape(-1, self.group_size).sum(1)

    @property
    def unit(self) -> str:
        """What a piece is, for messages."""
        return unit_of(self.group_size, self.noun)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that differ if the borders, labels or what counts differ."""
        whole = WholeDigest()
        whole.update(self.starts.astype("<i8"))
        whole.update(np.packbits(self.counts))
        if self.labels is not None:
            whole.update(self.labels.targets.astype("<i4"))
            whole.update(self.labels.types.astype("<i4"))
        return whole.hexdigest()

    @functools.cached_property
    def _packings(self) -> dict[int, tuple[np.ndarray, Packing]]:
        return {}

    def packing(self, seq_len: int) -> tuple[np.ndarray, Packing]:
        """The numbers of the pieces that are used, int64 [P], and how these are packed."""
        if seq_len not in self._packings:
            used = self._used(seq_len)
            sizes = self._by_piece(self.sizes_in(seq_len))[used]
            self._packings[seq_len] = used, pack(sizes, seq_len)
        return self._packings[seq_len]

    def _used(self, seq_len: int) -> np.ndarray:
        if self.too_long == "drop":
            return np.flatnonzero(self._by_piece(self.sizes) <= seq_len)
        # A part without a token that counts teaches nothing.
        counted = self._counted_in(seq_len)
        is_used = counted > 0
        if self.labels is not None:
            if self.labels.needs_all:
                is_used &= counted == np.diff(self._sums[self.starts])
            is_used &= self.labels.frame.num_tokens(self.labels.num_parts) <= seq_len
        return np.flatnonzero(is_used.reshape(-1, self.group_size).all(1))

    @property
    def _sums(self) -> np.ndarray:
        """Number of tokens that count before each, and in all: int64 [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def _ranges_in(self, texts: np.ndarray, sizes: np.ndarray, seq_len: int) -> np.ndarray:
        """The tokens of some texts that an example of this length holds, in ranges from the first
        token of each: int64 [T, R, 2].

        Args:
          texts: their numbers, int64 [T].
          sizes: `sizes_in` of these, int64 [T].
        """
        if self.labels is not None:
            whole = self.starts[texts + 1] - self.starts[texts]
            return self.labels.ranges(texts, whole, seq_len)
        return np.stack([np.zeros_like(sizes), sizes], -1)[:, None]

    def _counted_in(self, seq_len: int) -> np.ndarray:
        """Number of targets of each text that count in an example of this length: int64 [C]."""
        if self.labels is not None and self.labels.at_last:
            return np.diff(self._sums[self.starts])
        sums = self._sums
        ranges = self._ranges_in(np.arange(self.num_texts), self.sizes_in(seq_len), seq_len)
        begins = (self.starts[:-1] + self._ahead)[:, None]
        return (sums[begins + ranges[..., 1]] - sums[begins + ranges[..., 0]]).sum(1)

    def count_examples(self, seq_len: int) -> int:
        """Number of examples of `seq_len` tokens."""
        return self.packing(seq_len)[1].num_examples

    def description(self, seq_len: int) -> str:
        """The examples, and how full they are, in a line."""
        used, packing = self.packing(seq_len)
        sizes = self._by_piece(self.sizes_in(seq_len))
        share = int(sizes[used].sum()) / max(1, packing.num_examples * seq_len)
        return (
            f"{packing.num_examples:,} examples of {seq_len:,} tokens to train on, {share:.1%}"
            f" full, in which {self.count_targets(seq_len):,} tokens count"
        )

    def count_targets(self, seq_len: int) -> int:
        """Number of targets that count in all examples."""
        used, _ = self.packing(seq_len)
        counted = self._counted_in(seq_len)
        return int(self._by_piece(counted)[used].sum())

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """An endless sequence of example numbers, a function of (seq_len, seed) alone."""
        return example_order(self.count_examples(seq_len), seed)

    def too_long_notes(self, seq_len: int) -> list[str]:
        """What a user should know about texts that do not fit into an example."""
        sizes = self._by_piece(self.sizes)
        num_long = int((sizes > seq_len).sum())
        if not num_long:
            return []
        num_used = int((sizes[self.packing(seq_len)[0]] > seq_len).sum())
        done = [f"{num_used:,} truncated"] if num_used else []
        if num_long > num_used:
            why = "" if self.too_long == "drop" else ", since nothing that counts would remain"
            done.append(f"{num_long - num_used:,} dropped{why}")
        return [
            too_long_note(num_long, self.unit, self.name, seq_len, self.too_long, "; ".join(done))
        ]

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The examples numbered `examples` [R].

        Returns:
          The per-token arrays of a batch, [R, seq_len] (data/batch.py); `types` too if there are
          labels.
        """
        assert respect_documents, "checked when the data was loaded"
        shape = (len(examples), seq_len)
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        types, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        of_tokens = self.tokens if self.labels is None else self.labels.targets
        used, packing = self.packing(seq_len)
        sizes = self.sizes_in(seq_len)
        for row, example in enumerate(examples):
            place = segment = 0
            pieces = used[packing[int(example)]]
            parts = pieces[:, None] * self.group_size + np.arange(self.group_size)
            texts = parts.reshape(-1)
            all_ranges = self._ranges_in(texts, sizes[texts], seq_len)
            for text, ranges in zip(texts, all_ranges, strict=True):
                size, start = int(sizes[text]), int(self.starts[text])
                here = (row, slice(place, place + size))
                taken = start + np.concatenate([np.arange(*each) for each in ranges])
                learnt = taken + self._ahead
                if self.labels is not None:
                    types[here] = self.labels.types[taken]
                    if self.labels.at_last:
                        learnt[-1] = self.starts[text + 1] - 1
                tokens[here] = self.tokens[taken]
                targets[here], loss_mask[here] = of_tokens[learnt], self.counts[learnt]
                positions[here], segments[here] = np.arange(size), segment
                place, segment = place + size, segment + 1
            positions[row, place:], segments[row, place:] = np.arange(seq_len - place), segment
        batch = {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "segments": segments,
            "loss_mask": loss_mask,
        }
        return batch if self.labels is None else batch | {"types": types}

    def take(self, which: np.ndarray, name: str | None = None) -> "Pieces":
        """The pieces where `which`, bool [pieces], is True, in order."""
        which = np.repeat(which, self.group_size)
        is_taken = np.repeat(which, np.diff(self.starts))
        return dataclasses.replace(
            self,
            name=name or self.name,
            tokens=self.tokens[is_taken],
            counts=self.counts[is_taken],
            labels=self.labels and self.labels.taken(is_taken, which),
            starts=np.concatenate([[0], np.cumsum(np.diff(self.starts)[which])]),
        )

    def rearranged(self, numbers: np.ndarray) -> "Pieces":
        """The pieces with these numbers, int [pieces], one after the other."""
        texts = (numbers[:, None] * self.group_size + np.arange(self.group_size)).reshape(-1)
        lengths = np.diff(self.starts)[texts]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(starts[-1]) + np.repeat(self.starts[texts] - starts[:-1], lengths)
        return dataclasses.replace(
            self,
            tokens=self.tokens[places],
            counts=self.counts[places],
            labels=self.labels and self.labels.taken(places, texts),
            starts=starts,
        )

    def mixed(self) -> "Pieces":
        """The pieces in an order in which the first ones have all labels: files may be sorted by
        label, and an evaluation reads the first. Pieces without labels keep their order.
        """
        if self.labels is None:
            return self
        return self.rearranged(np.random.default_rng(_SHUFFLED_BY).permutation(self.num_pieces))


def split_pieces(whole: Pieces, eval_fraction: float) -> tuple[Pieces, Pieces | None]:
    """Split pieces into those to train on and those held out, by their hash.

    Copies of one go to the same side unless all are alike. Those held out are `mixed`.

    Raises:
      DataError: there are fewer than two.
    """
    if eval_fraction == 0:
        return whole, None
    if whole.num_pieces < 2:
        raise DataError(
            explain(
                f"{whole.name} has too few {whole.unit}s to hold some out",
                given=f"{whole.num_pieces}; data.eval_fraction={eval_fraction}",
                do="give more, or --set data.eval_fraction=0",
            )
        )
    ends = whole.starts[whole.group_size :: whole.group_size]
    is_held_out = chosen_documents(whole.tokens, ends, eval_fraction)
    held_out = whole.take(is_held_out, f"{whole.name} (held out)")
    return whole.take(~is_held_out), held_out.mixed()


def unit_of(group_size: int, noun: str = "conversation") -> str:
    """What a piece of `group_size` texts is, for messages."""
    return noun if group_size == 1 else "pair"


def too_long_note(
    num_long: int, unit: str, name: str, seq_len: int, too_long: TooLong, done: str
) -> str:
    """What a user should know about texts that are longer than an example.

    Args:
      done: what was done with them.
    """
    return (
        f"{num_long:,} {unit}(s) of {name} are longer than seq_len={seq_len:,}"
        f" (data.too_long={too_long}): {done}"
    )
