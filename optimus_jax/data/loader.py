"""Makes the batches of a run: shuffled, endless and by step for training; in order for evaluation.

A *row* is a position in the global batch. Each process asks for the rows that its devices hold; the
content of a row does not depend on which process asks for it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from optimus_jax.data.batch import BEGINS_WORD, HostBatch
from optimus_jax.data.iterated import IteratedExamples
from optimus_jax.data.mixture import Mixture
from optimus_jax.data.pieces import Pieces
from optimus_jax.data.sampler import (
    ExampleOrder,
    Examples,
    count_examples,
    cut_examples,
    order_of,
)
from optimus_jax.errors import DataError, explain

WordMarker = Callable[[np.ndarray], np.ndarray]
"""As `Tokenizer.begins_word`."""
_PREFETCH = 2
"""Batches made ahead: one while the device computes, one in reserve."""
_CHECKED_ROWS = 16
"""Rows per batch when held-out examples are checked before a run begins."""


@dataclass(frozen=True, eq=False)
class BatchLoader:
    """Makes the batches of training data. It has no state: a batch depends on its step alone.

    Raises:
      DataError: the data, or a source of a mixture, is shorter than one example.
    """

    stream: Examples
    _: KW_ONLY
    seq_len: int
    """Tokens per example."""
    global_batch: int
    """Rows of a batch, over all processes."""
    seed: int
    """Seed of the order of examples; not negative."""
    rows: np.ndarray
    """The rows that this process needs: int [R], from 0 to global_batch - 1, in any order."""
    respect_documents: bool
    """Whether each document has its own positions and segment, and no loss across its end."""
    begins_word: WordMarker | None = None
    """Says where words begin, for tasks that want to know; None: nobody does."""
    steps_before: int = 0
    """Steps before this loader's first one, in a run with phases; they are never asked for."""
    examples_before: int = 0
    """Examples of `seq_len` tokens that those steps used."""

    def __post_init__(self) -> None:
        _check_rows(self.rows, self.global_batch)
        _check_length(self.stream, self.seq_len, do="give more data, or use a smaller --seq-len")

    @property
    def num_examples(self) -> int:
        """Examples per epoch."""
        return count_examples(self.stream, self.seq_len)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of one epoch."""
        return self.num_examples * self.seq_len

    @cached_property
    def _order(self) -> ExampleOrder:
        return order_of(self.stream, self.seq_len, self.seed)

    def batch(self, step: int) -> HostBatch:
        """This process's rows of the batch of `step` (the first step is 1).

        Returns:
          The arrays of `cut_examples`, [R, seq_len], and `examples`, int32 [R]: the row numbers.
        """
        first = self.examples_before + (step - 1 - self.steps_before) * self.global_batch
        if isinstance(self.stream, IteratedExamples):
            self.stream.draw_through(range(first, first + self.global_batch), self.seq_len)
        examples = np.array([self._order[first + int(row)] for row in self.rows], np.int64)
        batch = cut_examples(
            self.stream, examples, seq_len=self.seq_len, respect_documents=self.respect_documents
        )
        batch = _with_words(batch, self.begins_word)
        return batch | {"examples": np.asarray(self.rows, np.int32)}

    def iterate(self, first_step: int) -> Generator[tuple[int, HostBatch], None, None]:
        """Yield (step, batch) from `first_step` on, endlessly; a thread makes batches ahead of use.

        An error is raised at the step whose batch failed. Closing the iterator ends the thread.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        try:
            ahead = deque(pool.submit(self.batch, first_step + i) for i in range(_PREFETCH))
            for step in itertools.count(first_step):
                batch = ahead.popleft().result()
                ahead.append(pool.submit(self.batch, step + _PREFETCH))
                yield step, batch
        finally:
            pool.shutdown(cancel_futures=True)


def eval_batches(
    stream: Examples,
    *,
    seq_len: int,
    num_rows: int,
    rows: np.ndarray,
    respect_documents: bool,
    num_examples: int,
    begins_word: WordMarker | None = None,
) -> Iterator[HostBatch]:
    """Batches of the first `num_examples` of a held-out stream (or of all it has), in order.

    The batches have the arrays of `BatchLoader.batch`. If the last batch has too few examples, its
    other rows repeat the last example, with loss_mask False everywhere.

    Args:
      num_rows: rows of a batch, over all processes.
      rows: the rows that this process needs.
    """
    _check_rows(rows, num_rows)
    num_examples = min(num_examples, count_examples(stream, seq_len))

    def cut(index: int) -> HostBatch:
        examples = index * num_rows + np.asarray(rows, np.int64)
        batch = cut_examples(
            stream,
            np.minimum(examples, num_examples - 1),
            seq_len=seq_len,
            respect_documents=respect_documents,
        )
        batch = _with_words(batch, begins_word)
        batch["loss_mask"] &= (examples < num_examples)[:, None]
        return batch | {"examples": examples.astype(np.int32)}

    return map(cut, range(-(-num_examples // num_rows)))


def _with_words(batch: HostBatch, begins_word: WordMarker | None) -> HostBatch:
    """A batch that says where words begin, if anyone knows."""
    return batch if begins_word is None else batch | {BEGINS_WORD: begins_word(batch["tokens"])}


def check_held_out(
    stream: Examples, *, seq_len: int, respect_documents: bool, num_examples: int
) -> int:
    """The number of examples that an evaluation uses: `num_examples`, or all if there are fewer.

    Raises:
      DataError: the stream is shorter than one example, or no token of the examples counts.
    """
    _check_length(
        stream,
        seq_len,
        do="raise data.eval_fraction, name more --eval-data, or do not evaluate: --set"
        " eval_every=0",
    )
    found = min(num_examples, count_examples(stream, seq_len))
    cut = {"seq_len": seq_len, "num_rows": _CHECKED_ROWS, "rows": np.arange(_CHECKED_ROWS)}
    batches = eval_batches(stream, **cut, respect_documents=respect_documents, num_examples=found)
    if not any(batch["loss_mask"].any() for batch in batches):
        raise DataError(
            explain(
                f"no token of {stream.name} counts: each is the last one of its document",
                given=f"{found:,} examples of {seq_len:,} tokens",
                do="raise data.eval_fraction, name other --eval-data, use --set"
                " data.respect_documents=false, "
                "or do not evaluate: --set eval_every=0",
            )
        )
    return found


def _check_rows(rows: np.ndarray, global_batch: int) -> None:
    assert all(0 <= row < global_batch for row in rows), f"rows {rows} of a batch of {global_batch}"


def _check_length(stream: Examples, seq_len: int, do: str) -> None:
    if isinstance(stream, Mixture):
        for part in stream.parts:
            _check_length(part, seq_len, do)
    elif isinstance(stream, Pieces):
        if not count_examples(stream, seq_len):
            raise DataError(
                explain(
                    f"no {stream.unit} of {stream.name} fits into an example",
                    given=f"{len(stream):,} tokens of {stream.unit}s; seq_len={seq_len}",
                    do="use a larger --seq-len, or --set data.too_long=truncate",
                )
            )
    elif not count_examples(stream, seq_len):
        raise DataError(
            explain(
                f"{stream.name} is shorter than one example",
                given=f"{len(stream)} tokens; seq_len={seq_len} needs {seq_len + 1}",
                do=do,
            )
        )
