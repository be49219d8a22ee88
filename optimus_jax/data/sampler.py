"""Decides which tokens the rows of a batch hold, and in which order examples come.

*Example* i of a stream is its window of `seq_len` tokens that starts at token i * seq_len; the
token after the window is the last target. Leftover tokens at the end of the stream are not used.
Documents are cut where a window ends. The batch of step k takes `global_batch` elements of an
endless shuffle, from element (k - 1) * global_batch on. Each epoch has another order. So a batch
depends only on (seed, k, global batch) and, in a run with phases (config/phases.py), on the batches
of the earlier phases.

Sources of another kind than streams cut and order examples themselves (`ExampleSource`).
"""

from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from optimus_jax.data.batch import HostBatch
from optimus_jax.data.tokens import TokenStream, check_tokens


class ExampleOrder(Protocol):
    """An endless random-access sequence of example numbers."""

    def __getitem__(self, index: int, /) -> Any:
        """Element `index`, an integer, independent of earlier accesses."""
        ...


@runtime_checkable
class ExampleSource(Protocol):
    """What examples are cut from, other than a stream: conversations, or a mixture."""

    @property
    def name(self) -> str:
        """Where it comes from, for messages."""
        ...

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def count_examples(self, seq_len: int) -> int:
        """Examples per epoch."""
        ...

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """The order of the examples in training."""
        ...

    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """As the function of that name."""
        ...


Examples = TokenStream | ExampleSource
"""Data that is cut into examples."""


def count_examples(source: Examples, seq_len: int) -> int:
    """Number of examples. A stream's are whole windows that have a target for their last token."""
    if isinstance(source, ExampleSource):
        return source.count_examples(seq_len)
    return (len(source) - 1) // seq_len


def example_order(num_examples: int, seed: int) -> grain.MapDataset[int]:
    """An endless random-access sequence of example numbers; every epoch has each of them once.

    Element n depends only on (num_examples, seed, n), not on earlier accesses.
    """
    return grain.MapDataset.source(range(num_examples)).seed(seed).shuffle().repeat()


def order_of(source: Examples, seq_len: int, seed: int) -> ExampleOrder:
    """The order of a source's examples in training."""
    if isinstance(source, ExampleSource):
        return source.example_order(seq_len, seed)
    return example_order(count_examples(source, seq_len), seed)


def cut_examples(
    stream: Examples, examples: np.ndarray, *, seq_len: int, respect_documents: bool
) -> HostBatch:
    """Cut the examples numbered `examples` [R] out of a stream, or another source.

    Returns:
      The per-token arrays of a batch, [R, seq_len] (data/batch.py). A target does not count if it
      belongs to another document than its token. Without `respect_documents` a window counts as
      one document.
    Raises:
      DataError: a token id is not below the stream's vocabulary size.
    """
    if isinstance(stream, ExampleSource):
        return stream.cut_examples(examples, seq_len=seq_len, respect_documents=respect_documents)
    windows = np.empty((len(examples), seq_len + 1), np.int32)
    for row, example in enumerate(examples):
        start = int(example) * seq_len
        window = np.asarray(stream.tokens[start : start + seq_len + 1])
        check_tokens(stream, window, start)
        windows[row] = window
    tokens, targets = windows[:, :-1], windows[:, 1:]

    ends = (tokens == stream.eos) & respect_documents
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    index = np.arange(seq_len, dtype=np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0), axis=1),
        "segments": np.cumsum(begins, axis=1, dtype=np.int32),
        "loss_mask": ~ends,
    }
