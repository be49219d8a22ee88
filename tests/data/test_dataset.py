import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.data.dataset import load_data
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents
from optimus_jax.data.tokens import write_token_file
from optimus_jax.errors import DataError


def load(*sources, vocab_size=257, **fields):
    config = DataConfig(sources=tuple(map(str, sources)), **fields)
    return load_data(config, seq_len=4, vocab_size=vocab_size, model_name="tiny")


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    return tmp_path / "a.txt"


@pytest.fixture
def token_file(tmp_path):
    write_token_file(tmp_path / "a.bin", encode_documents(ByteTokenizer(), ["0123456789" * 5, "abc"]), ByteTokenizer())
    return tmp_path / "a.bin"


def test_text_is_tokenized_and_split(text_file):
    data = load(text_file, eval_fraction=0.2)
    assert data.held_out is not None
    assert data.tokenizer.decode([*data.train.tokens, *data.held_out.tokens]) == text_file.read_text()
    assert data.description == (f"{text_file}: 101 tokens (202 bytes as uint16) in 1 documents; "
                                "20 examples of 4 tokens to train on, 20 tokens held out")


def test_a_token_file_stays_on_disk(token_file):
    data = load(token_file, eval_fraction=0.1)
    assert isinstance(data.train.tokens, np.memmap)
    assert data.held_out is not None
    assert data.tokenizer.decode(data.held_out.tokens) == "abc"
    assert "55 tokens (110 bytes as uint16) in 2 documents; 12 examples" in data.description


def test_several_sources_become_one_stream(text_file):
    data = load(text_file, text_file, eval_fraction=0)
    assert data.held_out is None
    assert len(data.train) == 202
    assert data.train.name == f"{text_file} {text_file}"
    assert data.description.endswith(" 0 tokens held out")


def test_tokens_that_cannot_be_trained_on(text_file, token_file):
    for other in (text_file, "stdlib", token_file):
        with pytest.raises(DataError, match=r"a.bin holds tokens, not text(.|\n)*one .bin file alone"):
            load(token_file, other)
    with pytest.raises(DataError, match=r"a.txt has a token that tiny does not know\n  given: token id 256"):
        load(text_file, vocab_size=100 + 156)


def test_data_is_known_by_its_content(text_file, token_file):
    identity = load(text_file).identity
    assert identity["tokens"] == 101
    assert identity["documents"] == 1
    assert load(text_file, eval_fraction=0.5).identity == identity
    assert load(token_file).identity.keys() == identity.keys()
    text_file.write_text("0123456789" * 9 + "012345678_")
    assert {name for name, value in load(text_file).identity.items() if identity[name] != value} == {"content"}
