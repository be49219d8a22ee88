"""Decides which tokens the rows of a batch hold, and in which order examples come.

*Example* i of a stream is its window of `seq_len` tokens that starts at token i * seq_len; the
token after the window is the last target. Leftover tokens at the end of the stream are not used.
Documents are cut where a window ends. The batch of step k takes `global_batch` elements of an
endless shuffle, from element (k - 1) * global_batch on. Each epoch has another order. So a batch
depends only on (seed, k, global batch) and, in a run with phases (config/phases.py), on the batches
of the earlier phases.
"""

import grain
import numpy as np

from optimus_jax.data.batch import HostBatch
from optimus_jax.data.tokens import TokenStream, check_tokens


def count_examples(stream: TokenStream, seq_len: int) -> int:
    """Number of whole windows in a stream that have a target for their last token."""
    return (len(stream) - 1) // seq_len


def example_order(num_examples: int, seed: int) -> grain.MapDataset[int]:
    """An endless random-access sequence of example numbers; every epoch has each of them once.

    Element n depends only on (num_examples, seed, n), not on earlier accesses.
    """
    return grain.MapDataset.source(range(num_examples)).seed(seed).shuffle().repeat()


def cut_examples(
    stream: TokenStream, examples: np.ndarray, *, seq_len: int, respect_documents: bool
) -> HostBatch:
    """Cut the examples numbered `examples` [R] out of a stream.

    Returns:
      The per-token arrays of a batch, [R, seq_len] (data/batch.py). A target does not count if it
      belongs to another document than its token. Without `respect_documents` a window counts as
      one document.
    Raises:
      DataError: a token id is not below the stream's vocabulary size.
    """
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
