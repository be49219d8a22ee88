"""Every batch has the arrays that `BATCH_ARRAYS` describes."""

import numpy as np
import pytest

from optimus_jax.data.batch import BATCH_ARRAYS, synthetic_batch
from optimus_jax.data.loader import BatchLoader, eval_batches
from optimus_jax.data.tokens import TokenStream

ROWS, SEQ_LEN = np.array([3, 1]), 8
STREAM = TokenStream(tokens=np.arange(100, dtype=np.int32) % 7, eos=3, vocab_size=7, name="made up")


def training_batch():
    return BatchLoader(
        STREAM, seq_len=SEQ_LEN, global_batch=4, seed=0, rows=ROWS, respect_documents=True
    ).batch(1)


def held_out_batch():
    return next(
        eval_batches(
            STREAM, seq_len=SEQ_LEN, num_rows=4, rows=ROWS, respect_documents=True, num_examples=4
        )
    )


def synthetic_rows():
    return synthetic_batch(vocab_size=7, rows=2, seq_len=SEQ_LEN, seed=0, examples=ROWS)


@pytest.mark.parametrize("make", [training_batch, held_out_batch, synthetic_rows])
def test_batches_have_the_described_arrays(make):
    batch = make()
    assert list(batch["examples"]) == list(ROWS)
    assert {name: (array.dtype.type, array.shape) for name, array in batch.items()} == {
        name: (array.dtype, array.shape(2, SEQ_LEN)) for name, array in BATCH_ARRAYS.items()
    }
