"""transformers makes the same ids from a run's tokenizer as the run did."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_models import libraries

from optimus_jax.data.published_tokenizer import adds_tokens, published_files
from optimus_jax.data.tokenizers import ByteTokenizer, load_tokenizer


def loaded(files: dict[str, bytes], directory: Path):
    """The tokenizer that transformers makes of files."""
    _, transformers = libraries()
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizers")
    return loaded(published_files(ByteTokenizer(), directory / "none", 64), directory)


@given(st.text(max_size=60) | st.lists(st.sampled_from(["<|endoftext|>", " ", "é\n"])).map("".join))
def test_bytes_have_the_same_ids(of_bytes, text):
    expected = ByteTokenizer().encode(text).tolist()
    assert of_bytes(text)["input_ids"] == expected
    assert of_bytes(text, add_special_tokens=False)["input_ids"] == expected
    assert of_bytes.decode(expected) == text


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_ids_become_the_same_text(of_bytes, ids):
    assert of_bytes.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_the_end_of_a_document_of_bytes(of_bytes):
    assert (of_bytes.eos_token_id, of_bytes.pad_token_id, of_bytes.bos_token_id) == (256, 256, None)
    assert len(of_bytes) == 257
    assert of_bytes.model_max_length == 64
    assert not adds_tokens(ByteTokenizer())


@pytest.fixture
def word_tokenizer(tmp_path):
    """A tokenizer.json that puts a token in front of each text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "</s>", "<s>", "the", "cat", "sat"]
    whole = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.add_special_tokens(["</s>", "<s>"])
    whole.post_processor = tokenizers.processors.TemplateProcessing("<s> $0", None, [("<s>", 2)])
    whole.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_file_is_passed_on(word_tokenizer, tmp_path):
    own = tmp_path / "run"
    own.mkdir()
    (own / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"})
    )
    (own / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    ours = load_tokenizer(str(word_tokenizer / "tokenizer.json"))
    files = published_files(ours, own, 32)
    assert files["tokenizer.json"] == (word_tokenizer / "tokenizer.json").read_bytes()
    theirs = loaded(files, tmp_path / "exported")
    assert type(theirs).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")
    expected = ours.encode("the cat sat").tolist()
    assert theirs("the cat sat", add_special_tokens=False)["input_ids"] == expected == [3, 4, 5]
    assert adds_tokens(ours)
    assert theirs("the cat sat")["input_ids"] == [2, 3, 4, 5]
    assert (theirs.eos_token, theirs.pad_token, theirs.bos_token) == ("</s>", "</s>", "<s>")
    chat = [{"role": "user", "content": "the cat"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == "the cat"
    assert np.array_equal(load_tokenizer(str(tmp_path / "exported")).encode("cat"), [4])


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_run_without_a_readable_config_has_the_tokenizers_own(word_tokenizer, tmp_path, content):
    own = tmp_path / "run"
    own.mkdir()
    if content is not None:
        (own / "tokenizer_config.json").write_text(content)
    ours = load_tokenizer(str(word_tokenizer / "tokenizer.json"))
    config = json.loads(published_files(ours, own, 32)["tokenizer_config.json"])
    assert config["eos_token"] == config["pad_token"] == "</s>"
