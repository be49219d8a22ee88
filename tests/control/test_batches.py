"""Share of padding and lengths of documents, compared with counts by hand."""

import numpy as np
import pytest

from optimus_jax.control.batches import MAX_TOKENS, BatchStatistics, document_lengths, padding_share
from optimus_jax.data.sampler import cut_examples

NO, YES = False, True


def test_document_lengths_are_counted_row_by_row():
    segments = np.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    assert document_lengths(segments).tolist() == [3, 2, 1, 6]


@pytest.mark.parametrize(
    ("segments", "counts", "padding"),
    [
        ([0, 0, 0, 0], [YES, YES, YES, YES], 0),
        ([0, 0, 1, 1], [YES, NO, YES, YES], 0),  # a document ends
        # a document of a single token, and one that ends with the window
        ([0, 1, 1, 1], [NO, YES, YES, NO], 0),
        ([0, 0, 0, 0], [YES, NO, NO, NO], 3),  # a row padded after its only document
        ([0, 0, 1, 1], [YES, NO, NO, NO], 2),  # padding as a document of its own
        ([0, 0, 0, 0], [NO, NO, NO, NO], 4),
        ([0, 0, 0, 0], [NO, YES, NO, YES], 0),  # a conversation with two answers
        ([0, 0, 1, 1], [NO, YES, NO, NO], 2),  # a conversation, then padding
    ],
)  # a row that only fills its place
def test_padding_is_told_from_ends_of_documents(segments, counts, padding):
    assert padding_share(np.array([segments]), np.array([counts])) == padding / 4


class Stream:
    """A token stream of documents with two tokens and an end-of-document token."""

    tokens, eos, vocab_size, name = np.array([5, 6, 0] * 100), 0, 10, "a stream"

    def __len__(self):
        return len(self.tokens)


def test_batches_of_the_loader_have_no_padding():
    shape = BatchStatistics()
    shape.offer(cut_examples(Stream(), np.arange(4), seq_len=12, respect_documents=True))
    assert shape.poll(1, 0.0) == {"padding_share": 0.0, "length_median": 3.0}
    assert shape.histogram == {2: 16}
    assert shape.poll(2, 1.0) is None, "no batch is looked at twice"


def test_the_first_rows_of_a_large_batch_are_the_sample():
    rows = MAX_TOKENS // 1024
    counts = np.ones((3 * rows, 1024), bool)
    counts[rows:] = False
    shape = BatchStatistics()
    shape.offer({"segments": np.zeros(counts.shape, np.int32), "loss_mask": counts})
    assert shape.poll(1, 0.0) == {"padding_share": 0.0, "length_median": 1024.0}
    assert shape.histogram == {1024: rows}
