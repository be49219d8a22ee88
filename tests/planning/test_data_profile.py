"""The data profile against counts over the batches themselves."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.data.pieces import Pieces
from optimus_jax.data.sampler import count_examples, cut_examples
from optimus_jax.data.tokenizers import ByteTokenizer
from optimus_jax.data.tokens import TokenStream, read_token_file, write_token_file
from optimus_jax.planning.profiles import data_profile
from optimus_jax.planning.profiles.data_profile import MIN_STEPS_PER_EPOCH, profile_data

EOS = 256


def test_profile_of_conversations_equals_counts_over_the_batches():
    random = np.random.default_rng(1)
    lengths = random.integers(2, 14, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    conversations = Pieces(
        name="chats",
        tokens=np.ones(starts[-1], np.uint16),
        counts=random.random(starts[-1]) < 0.5,
        starts=starts,
        vocab_size=257,
        too_long="truncate",
    )
    profile = profile_data(conversations, seq_len=9)
    assert profile.num_examples == count_examples(conversations, 9)
    batch = cut_examples(
        conversations, np.arange(profile.num_examples), seq_len=9, respect_documents=True
    )
    assert profile.trained_share == pytest.approx(batch["loss_mask"].mean())
    same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    assert profile.attended_share == pytest.approx(same.mean())
    assert profile.length_quantiles[1.0] == lengths.max()
    assert 0 < profile.whole_share < 1
    assert "50 documents" in profile.describe()


def stream_of(lengths: list[int], *, is_open: bool = False) -> TokenStream:
    """Documents of these lengths, each with its EOS; with `is_open` the last has none."""
    tokens = np.ones(sum(lengths), np.uint16)
    tokens[np.cumsum(lengths) - 1] = EOS
    if is_open:
        tokens[-1] = 1
    return TokenStream(name="test", tokens=tokens, eos=EOS, vocab_size=257)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    seq_len=st.integers(1, 20),
    is_open=st.booleans(),
    block=st.integers(1, 50),
)
def test_profile_equals_counts_over_the_batches(lengths, seq_len, is_open, block):
    stream = stream_of(lengths, is_open=is_open)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_profile, "BLOCK_TOKENS", block)
        profile = profile_data(stream, seq_len=seq_len)
    assert (profile.num_documents, profile.num_tokens, profile.tokens_read) == (
        len(lengths),
        sum(lengths),
        sum(lengths),
    )
    assert not profile.is_estimate
    assert profile.num_examples == count_examples(stream, seq_len)
    assert profile.length_quantiles.get(1.0, 0) == max(
        lengths[: -1 if is_open else None], default=0
    )
    if profile.num_examples:
        batch = cut_examples(
            stream, np.arange(profile.num_examples), seq_len=seq_len, respect_documents=True
        )
        assert profile.trained_share == pytest.approx(batch["loss_mask"].mean())
        assert profile.packing_efficiency == pytest.approx(batch["loss_mask"].sum() / len(stream))
        same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
        assert profile.attended_share == pytest.approx(same.mean())
        ends = np.cumsum(lengths)[: -1 if is_open else None]
        whole = [
            length
            for length, end in zip(lengths, ends, strict=False)
            if (end - length) // seq_len == (end - 1) // seq_len and end <= profile.tokens_per_epoch
        ]
        assert profile.whole_share == pytest.approx(sum(whole) / profile.tokens_per_epoch)


def test_length_quantiles_and_padded_share_by_hand():
    profile = profile_data(stream_of([10] * 3 + [20] * 6 + [100]), seq_len=16)
    assert profile.mean_length == 25
    assert profile.length_quantiles[0.25] == 10
    assert profile.length_quantiles[0.5] == 20
    assert profile.length_quantiles[1.0] == 100
    assert profile.padded_share == pytest.approx(250 / (3 * 16 + 6 * 32 + 112)), (
        "rows of 16 that each document alone would fill"
    )


def test_without_documents_every_token_is_trained_on():
    profile = profile_data(stream_of([5] * 20), seq_len=10, respect_documents=False)
    assert (profile.trained_share, profile.attended_share) == (1, 1)
    assert profile.packing_efficiency == 0.9, "the last window has no token to predict"


def test_profile_of_a_long_file_is_marked_as_an_estimate(tmp_path, monkeypatch):
    """Blocks spread over the file are read; the number of documents is extrapolated from them."""
    monkeypatch.setattr(data_profile, "BLOCK_TOKENS", 1000)
    lengths = [40] * 1000
    tokenizer = ByteTokenizer()
    write_token_file(tmp_path / "a.bin", [stream_of(lengths).tokens], tokenizer)
    stream, header = read_token_file(tmp_path / "a.bin", tokenizer)
    assert isinstance(stream.tokens, np.memmap)
    profile = profile_data(stream, seq_len=64, max_tokens=5000)
    assert profile.is_estimate
    assert profile.tokens_read == 4 * 15 * 64 + 40_000 % (15 * 64), (
        "five blocks of whole windows, of which the last is the file's end"
    )
    assert profile.num_documents == pytest.approx(header.num_documents, rel=0.02), (
        "some blocks begin inside a document"
    )
    assert set(profile.length_quantiles.values()) == {40}, "no document is cut by what was not read"
    assert "estimated from" in profile.describe()
    assert profile_data(stream, seq_len=64).num_documents == header.num_documents


def test_suggested_batch_sizes_leave_enough_steps_per_epoch():
    profile = profile_data(stream_of([50] * 2001), seq_len=50)
    assert profile.num_examples == 2000
    assert [size.global_batch for size in profile.batch_sizes()] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert [size.global_batch for size in profile.batch_sizes(multiple_of=6)] == [6, 12, 18]
    assert all(
        size.steps_per_epoch >= MIN_STEPS_PER_EPOCH and size.tokens == 50 * size.global_batch
        for size in profile.batch_sizes()
    )
    assert profile_data(stream_of([50] * 3), seq_len=50).batch_sizes() == ()


def test_too_little_data_gives_warnings():
    profile = profile_data(stream_of([50] * 2001), seq_len=50)
    assert profile.warnings(global_batch=16, steps=100) == ()
    assert profile.warnings(global_batch=16, steps=250) == ("250 steps see the data 2.0 times",)
    (more,) = profile.warnings(global_batch=5000, steps=0)
    assert "5,000 examples is more than the data has (2,000)" in more
    assert "only 20.0 steps of 100" in profile.warnings(global_batch=100, steps=1)[0]


def test_a_profile_is_readable_and_json():
    profile = profile_data(stream_of([30, 20, 40]), seq_len=16)
    assert json.loads(profile.to_json())["tokens_per_epoch"] == 80
    assert "3 documents" in profile.describe()
    empty = profile_data(stream_of([5], is_open=True), seq_len=16)
    assert (empty.num_examples, empty.length_quantiles) == (0, {})
    assert "unknown" in empty.describe()
