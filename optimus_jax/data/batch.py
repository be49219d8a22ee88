"""The arrays of a batch: their names, dtypes and shapes.

The shapes that a step is compiled for follow from the table `BATCH_ARRAYS`. A test compares it with
the batches of the loader and with synthetic ones (tests/data/test_batch.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from optimus_jax.config.model import CLASS_TOKEN, PATCH_TOKEN

HostBatch = dict[str, np.ndarray]
"""Arrays on the host, keyed by the names of `BATCH_ARRAYS`."""


class BatchShape(NamedTuple):
    """Shape of a global batch."""

    global_batch: int
    """Examples per step."""
    seq_len: int
    """Tokens per example."""


@dataclass(frozen=True)
class BatchArray:
    """One array of a batch of B examples of L tokens."""

    dtype: type[np.generic]
    meaning: str
    per: Literal["row", "token", "patch"] = "token"
    """What it is of: its shape is [B], [B, L], or with the values of a patch of an image
    [B, L, P]."""

    def shape(self, rows: int, seq_len: int, patch_values: int = 0) -> tuple[int, ...]:
        """The array's shape in a batch of `rows` examples.

        Args:
          patch_values: `ModelConfig.patch_values`.
        """
        shapes = {"row": (rows,), "token": (rows, seq_len), "patch": (rows, seq_len, patch_values)}
        return shapes[self.per]


BATCH_ARRAYS: Mapping[str, BatchArray] = {
    "tokens": BatchArray(np.int32, "token ids"),
    "targets": BatchArray(np.int32, "the token after each one"),
    "positions": BatchArray(np.int32, "place of the token in its document's part, from 0"),
    "segments": BatchArray(np.int32, "number of the token's document in the example, from 0"),
    "loss_mask": BatchArray(np.bool_, "False where a target does not count"),
    "examples": BatchArray(
        np.int32, "number of the example in the batch, or in the evaluation", per="row"
    ),
}


BEGINS_WORD = "begins_word"
"""Name of the array that says where words begin, where a run asks for it: bool [B, L]."""


def synthetic_batch(
    *,
    vocab_size: int,
    rows: int,
    seq_len: int,
    seed: int,
    examples: np.ndarray | None = None,
    patch_values: int = 0,
    frames: int = 0,
) -> HostBatch:
    """Random tokens, images or recordings, one document per example, for timing and for benchmarks.

    Args:
      rows: number of examples.
      seq_len: tokens of an example.
      seed: seed of the random generator; not negative.
      examples: int [rows], their numbers in the global batch; None: 0 to rows - 1.
      patch_values: `ModelConfig.patch_values`; 0: tokens.
      frames: `ModelConfig.frames`.
    Returns:
      The arrays of `BATCH_ARRAYS`; every target counts.
    """
    shape = (rows, seq_len)
    tokens = np.random.default_rng(seed).integers(
        0, vocab_size, (rows, seq_len + 1), dtype=np.int32
    )
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        "segments": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.bool_),
        "examples": np.arange(rows, dtype=np.int32)
        if examples is None
        else examples.astype(np.int32),
    }
    if not patch_values:
        return batch
    draw = np.random.default_rng(seed)
    if frames:
        is_frame = np.broadcast_to(np.arange(seq_len) < frames, shape)
        places = np.concatenate([np.arange(frames), np.arange(seq_len - frames)])
        return batch | {
            "tokens": np.where(is_frame, PATCH_TOKEN, batch["tokens"]).astype(np.int32),
            "targets": np.where(is_frame, -1, batch["targets"]).astype(np.int32),
            "positions": np.broadcast_to(places.astype(np.int32), shape).copy(),
            "loss_mask": ~is_frame,
            "patches": draw.standard_normal((*shape, patch_values), np.float32),
        }
    is_class = np.broadcast_to(np.arange(seq_len) == 0, shape)
    return batch | {
        "tokens": np.where(is_class, CLASS_TOKEN, PATCH_TOKEN).astype(np.int32),
        "targets": np.zeros(shape, np.int32),
        "loss_mask": is_class.copy(),
        "patches": draw.integers(0, 256, (*shape, patch_values), dtype=np.uint8),
    }
