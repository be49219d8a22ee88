import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.data.sampler import count_examples, cut_examples, example_order
from optimus_jax.data.tokens import TokenStream

EOS = 9
TOKENS = st.lists(st.integers(0, EOS), min_size=2, max_size=60)


def stream_of(tokens, eos=EOS):
    return TokenStream(
        name="digits", tokens=np.array(tokens, np.uint16), eos=eos, vocab_size=max(tokens) + 1
    )


def cut(tokens, seq_len, respect_documents=True):
    stream = stream_of(tokens)
    examples = np.arange(count_examples(stream, seq_len))
    return cut_examples(stream, examples, seq_len=seq_len, respect_documents=respect_documents)


@given(length=st.integers(2, 200), seq_len=st.integers(1, 20))
def test_every_token_is_in_one_window_and_followed_by_its_target(length, seq_len):
    batch = cut(range(length), seq_len)
    used = batch["tokens"].size
    assert batch["tokens"].ravel().tolist() == list(range(used))
    assert batch["targets"].ravel().tolist() == list(range(1, used + 1))
    # what is left over is less than one window and its target
    assert length - 1 - seq_len < used <= length - 1


@given(tokens=TOKENS, seq_len=st.integers(1, 12))
def test_documents_within_a_window_match_a_naive_reference(tokens, seq_len):
    batch = cut(tokens, seq_len)
    for row, window in enumerate(batch["tokens"]):
        segment = position = 0
        for column, token in enumerate(window):
            assert batch["segments"][row, column] == segment
            assert batch["positions"][row, column] == position
            assert batch["loss_mask"][row, column] == (token != EOS)
            segment, position = (segment + 1, 0) if token == EOS else (segment, position + 1)


@given(tokens=TOKENS, seq_len=st.integers(1, 12))
def test_without_documents_a_window_is_one_segment(tokens, seq_len):
    batch = cut(tokens, seq_len, respect_documents=False)
    assert not batch["segments"].any()
    assert batch["loss_mask"].all()
    assert (batch["positions"] == np.arange(seq_len)).all()


def test_shapes_and_dtypes_of_examples():
    batch = cut_examples(stream_of(range(8)), np.array([1, 0]), seq_len=3, respect_documents=True)
    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "positions", "segments"), (np.int32, (2, 3))
    ) | {"loss_mask": (np.bool_, (2, 3))}


@pytest.mark.parametrize(("length", "count"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_an_example_needs_one_token_more_than_its_length(length, count):
    assert count_examples(stream_of(range(length)), seq_len=4) == count


@settings(max_examples=30, deadline=None)
@given(num_examples=st.integers(1, 50), seed=st.integers(0, 2**40))
def test_every_epoch_has_every_example_once(num_examples, seed):
    order = example_order(num_examples, seed)
    for epoch in range(3):
        examples = [order[epoch * num_examples + i] for i in range(num_examples)]
        assert sorted(examples) == list(range(num_examples))


def test_example_order_never_changes():
    """A run that is resumed under another version of grain must go on in the same order."""
    order = example_order(10, seed=0)
    epochs = [[order[epoch * 10 + i] for i in range(10)] for epoch in range(2)]
    assert epochs == [[1, 2, 4, 5, 9, 7, 8, 6, 0, 3], [9, 6, 1, 8, 2, 0, 3, 5, 4, 7]]
    assert [example_order(10, seed=1)[i] for i in range(10)] != epochs[0]
