import gzip
import json

import numpy as np
import pytest

from optimus_jax.config import DataConfig
from optimus_jax.data import digests, identity
from optimus_jax.data.dataset import load_data
from optimus_jax.data.identity import differences
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents
from optimus_jax.data.tokens import write_token_file
from optimus_jax.errors import DataError


def load(*sources, vocab_size=257, by=None, **fields):
    config = DataConfig(sources=tuple(map(str, sources)), **fields)
    return load_data(config, seq_len=4, vocab_size=vocab_size, model_name="tiny", by=by)


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    return tmp_path / "a.txt"


@pytest.fixture
def token_file(tmp_path):
    write_token_file(
        tmp_path / "a.bin",
        encode_documents(ByteTokenizer(), ["0123456789" * 5, "abc"]),
        ByteTokenizer(),
    )
    return tmp_path / "a.bin"


def test_text_is_tokenized_and_split(text_file):
    data = load(text_file, eval_fraction=0.2)
    assert data.held_out is not None
    assert (
        data.tokenizer.decode([*data.train.tokens, *data.held_out.tokens]) == text_file.read_text()
    )
    assert data.description == (
        f"{text_file}: 101 tokens (202 bytes as uint16) in 1 documents; "
        "20 examples of 4 tokens to train on, 20 tokens held out"
    )


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


def test_unusable_tokens_are_refused(text_file, token_file):
    for other in (text_file, "stdlib"):
        with pytest.raises(
            DataError,
            match=r"a.bin holds tokens, not text(.|\n)*train on .bin files alone, one or several",
        ):
            load(token_file, other)
    with pytest.raises(
        DataError, match=r"a.txt has a token that tiny does not know\n  given: token id 256"
    ):
        load(text_file, vocab_size=100 + 156)


def test_several_token_files_are_one_stream_that_stays_on_disk(tmp_path, token_file):
    (tmp_path / "parts").mkdir()
    for name, texts in {"1.bin": ["0123456789" * 5], "2.bin": ["abc"]}.items():
        write_token_file(
            tmp_path / "parts" / name, encode_documents(ByteTokenizer(), texts), ByteTokenizer()
        )
    whole = load(token_file, eval_fraction=0.1)
    for parts in (
        [tmp_path / "parts"],
        [tmp_path / "parts" / "*.bin"],
        [tmp_path / "parts" / "1.bin", tmp_path / "parts" / "2.bin"],
    ):
        data = load(*parts, eval_fraction=0.1)
        assert data.identity == whole.identity
        assert np.array_equal(data.train.tokens, whole.train.tokens)
        assert np.array_equal(data.held_out.tokens, whole.held_out.tokens)
        assert all(
            isinstance(stream.tokens, np.memmap) for stream in (data.train, data.held_out)
        ), "each lies in one file, and none is copied"
    assert (
        load(tmp_path / "parts" / "2.bin", tmp_path / "parts" / "1.bin").identity != whole.identity
    ), "the order of files is that of the batches"


def test_same_text_has_the_same_identity_in_every_format(tmp_path):
    texts = [f"document {n}" for n in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(texts))
    write_token_file(tmp_path / "d.bin", encode_documents(ByteTokenizer(), texts), ByteTokenizer())
    first = load(tmp_path / "a.jsonl", eval_fraction=0.1)
    for name in ("b.jsonl.gz", "c.json", "d.bin"):
        data = load(tmp_path / name, eval_fraction=0.1, by="documents")
        assert data.identity == first.identity
        assert np.array_equal(data.train.tokens, first.train.tokens), (
            "what a run that began with texts held out"
        )
    cut = load(tmp_path / "d.bin", eval_fraction=0.1)
    assert cut.identity == first.identity | {"held_out_by": "end"}
    assert np.array_equal(
        load(tmp_path / "a.jsonl", eval_fraction=0.1, by="end").train.tokens, cut.train.tokens
    )


def test_identity_depends_on_every_token(tmp_path, monkeypatch):
    """Evenly spread blocks alone would miss most of them."""
    monkeypatch.setattr(digests, "DIGEST_TOKENS", 16)
    monkeypatch.setattr(digests, "_DIGEST_BLOCKS", 2)
    monkeypatch.setattr(identity, "DIGEST_TOKENS", 16)
    text = "0123456789" * 10
    found = {}
    for name, content in {"same": text, "other": text[:50] + "x" + text[51:]}.items():
        (tmp_path / f"{name}.txt").write_text(content)
        write_token_file(
            tmp_path / f"{name}.bin", encode_documents(ByteTokenizer(), [content]), ByteTokenizer()
        )
        found[name] = [
            load(tmp_path / f"{name}.txt").identity,
            load(tmp_path / f"{name}.bin").identity,
        ]
        with monkeypatch.context() as patch:
            patch.setattr(identity, "CHECKED_TOKENS", 50)  # too long to be read at every start
            found[name].append(load(tmp_path / f"{name}.bin").identity)
    assert (
        differences(found["same"][0], found["same"][1])
        == differences(found["same"][1], found["same"][2])
        == []
    )
    assert [differences(*pair) for pair in zip(found["same"], found["other"], strict=True)] == [
        ["every_token"],
        ["every_token"],
        ["files"],
    ]


def test_identity_depends_on_the_content_alone(text_file, token_file):
    identity = load(text_file).identity
    assert identity["tokens"] == 101
    assert identity["documents"] == 1
    assert load(text_file, eval_fraction=0.5).identity == identity
    assert load(token_file).identity.keys() == identity.keys()
    text_file.write_text("0123456789" * 9 + "012345678_")
    assert {
        name for name, value in load(text_file).identity.items() if identity[name] != value
    } == {"content"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_texts_with_labels_that_are_not_learnt_are_said(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    rows = [{"text": f"text {n}", "label": str(n)} for n in range(3)]
    if suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(sources=(str(path),), eval_fraction=0.0)
    options = {"seq_len": 4, "vocab_size": 257, "model_name": "tiny"}
    (note,) = load_data(config, **options, kind="texts", suggests_labels=True).notes
    assert "'label'" in note
    assert "--task classification" in note
    assert not load_data(config, **options, kind="texts").notes
    assert not load_data(config, **options, suggests_labels=True).notes, "a decoder's"
