import io
import os
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.data.token_ids import token_dtype
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents, load_tokenizer
from optimus_jax.errors import DataError
from optimus_jax.system.paths import PathError

# Half a surrogate pair is no text; sources let none through.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def save_tokenizer(path, special_tokens):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special_tokens,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat and the hat and the mat"], trainer)
    # Files of chat models come with both; neither may cut or fill a document.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return load_tokenizer(save_tokenizer(path, ["<|pad|>", "</s>", "<|endoftext|>"]))


@given(TEXT)
def test_byte_tokenizer_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_byte_tokenizer_decodes_invalid_bytes():
    assert ByteTokenizer().decode([104, 256, 105, 50256, -1, 0xE9]) == "hi\N{REPLACEMENT CHARACTER}"


@settings(deadline=None)
@given(text=TEXT)
def test_hugging_face_tokenizer_round_trip(hugging_face, text):
    ids = hugging_face.encode(text)
    assert ids.dtype == np.uint16
    assert hugging_face.eos not in ids
    assert hugging_face.decode([*ids, hugging_face.eos]) == text


def test_hugging_face_uses_its_merges_and_takes_the_first_known_eos(hugging_face):
    assert len(hugging_face.encode("the cat")) < 7
    assert hugging_face.eos == 2  # not 1, which is </s>
    assert 3 + 256 < hugging_face.vocab_size <= 300


def test_text_of_eos_is_not_encoded_as_eos(hugging_face):
    text = "the <|endoftext|> cat"
    assert hugging_face.eos not in hugging_face.encode(text)
    assert hugging_face.decode(hugging_face.encode(text)) == text


def test_vocab_size_counts_ids_with_gaps(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 7, "</s>": 70_000}, unk_token="a")).save(
        str(path)
    )
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos) == (70_001, 70_000)
    assert tokenizer.encode("a").dtype == np.uint32


def test_tokenizer_dropout_is_switched_off(tmp_path):
    """A tokenizer file may ask for a random choice of merges."""
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(save_tokenizer(path, ["</s>"]))
    made.model.dropout = 0.5
    made.save(str(path))
    text = "the cat the cat the cat the the the"
    assert len({tuple(made.encode(text).ids) for _ in range(20)}) > 1
    tokenizer = load_tokenizer(str(path))
    assert len({tuple(tokenizer.encode(text).tolist()) for _ in range(20)}) == 1
    assert tokenizer.notes == [
        "the tokenizer's dropout of 0.5 is switched off, because token ids must not"
        " differ between two readings of the data"
    ]
    assert tokenizer.files["tokenizer.json"] == path.read_bytes(), (
        "what a run keeps is the file itself"
    )


def test_digests_tell_tokenizers_apart(tmp_path, hugging_face):
    other = load_tokenizer(save_tokenizer(tmp_path / "tokenizer.json", ["</s>"]))
    assert len({hugging_face.digest, other.digest, load_tokenizer("bytes").digest}) == 3
    assert other.digest == load_tokenizer(str(tmp_path / "tokenizer.json")).digest
    assert all(len(tokenizer.digest) == 16 for tokenizer in (hugging_face, other, ByteTokenizer()))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_token_dtype_is_the_smaller_that_fits(vocab_size, dtype):
    assert token_dtype(vocab_size) is dtype


@given(documents=st.lists(TEXT, min_size=1), group=st.integers(1, 20))
def test_documents_are_encoded_in_order_each_with_its_end(documents, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optimus_jax.data.tokenizers._GROUP_CHARACTERS", group)
        tokens = np.concatenate(list(encode_documents(ByteTokenizer(), documents)))
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [token for text in documents for token in (*text.encode(), 256)]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(monkeypatch, is_terminal):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    list(encode_documents(ByteTokenizer(), ["text"]))
    assert ("tokenizing" in stderr.getvalue()) == is_terminal


def test_error_without_tokenizers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'optimus-jax\[tokenizers\]'"):
        load_tokenizer("tokenizer.json")


def test_unusable_tokenizers_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"a tokenizer file cannot be read\n.*No such file(.|\n)*`bytes`"
    ):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "a\0b", "n" * 300):
        with pytest.raises(
            (DataError, PathError),
            match=r"a tokenizer file cannot be read|--tokenizer (holds a NUL|is too long)",
        ):
            load_tokenizer(str(tmp_path / name))
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e\xff")
    with pytest.raises(
        DataError, match=r"spiece.model is not a tokenizer(.|\n)*AutoTokenizer.from_pretrained"
    ):
        load_tokenizer(str(tmp_path / "spiece.model"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"tokenizer.json is not a tokenizer of the tokenizers library"
    ):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        DataError, match=r"no token that ends a document\n.*\n  do:    add one of <\|endoftext\|>, "
    ):
        load_tokenizer(save_tokenizer(tmp_path / "tokenizer.json", ["<|pad|>"]))
