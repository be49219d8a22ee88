import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import run_in_process

from optimus_jax.data import digests
from optimus_jax.data import joined as joined_module
from optimus_jax.data import tokens as tokens_module
from optimus_jax.data.joined import JoinedTokens
from optimus_jax.data.sampler import cut_examples
from optimus_jax.data.tokenizers import ByteTokenizer, encode_documents
from optimus_jax.data.tokens import (
    TokenStream,
    check_vocab,
    read_token_file,
    split,
    write_token_file,
)
from optimus_jax.errors import DataError

BYTES = ByteTokenizer()
SCRIPT = Path(__file__).parents[2] / "scripts" / "tokenize.py"


def stream_of(*texts):
    return TokenStream(
        name="texts",
        tokens=np.concatenate(list(encode_documents(BYTES, texts))),
        eos=BYTES.eos,
        vocab_size=BYTES.vocab_size,
    )


def texts_of(stream):
    borders = np.flatnonzero(stream.tokens == stream.eos) + 1
    return [BYTES.decode(part) for part in np.split(stream.tokens, borders)[:-1]]


def split_in_two(stream, eval_fraction):
    train, held_out = split(stream, eval_fraction)
    assert held_out is not None
    return train, held_out


def write_texts(path, *texts):
    return write_token_file(path, encode_documents(BYTES, texts), BYTES)


@given(texts=st.lists(st.text("abc"), min_size=2), eval_fraction=st.floats(0.001, 0.999))
def test_split_keeps_every_document_whole_in_order_and_on_one_side(texts, eval_fraction):
    train, held_out = split_in_two(stream_of(*texts), eval_fraction)
    assert len(train)
    assert len(held_out)
    assert train.tokens[-1] == held_out.tokens[-1] == BYTES.eos
    rest = iter(texts)
    assert all(text in rest for text in texts_of(train))  # a subsequence
    assert sorted(texts_of(train) + texts_of(held_out)) == sorted(texts)


def test_split_depends_on_the_text_alone():
    texts = [f"document {i}" for i in range(2000)]
    first = split_in_two(stream_of(*texts), 0.1)[1]
    assert 100 < len(texts_of(first)) < 300
    assert set(texts_of(split_in_two(stream_of(*reversed(texts)), 0.1)[1])) == set(texts_of(first))
    assert set(texts_of(split_in_two(stream_of(*texts[:1000]), 0.1)[1])) == set(
        texts_of(first)
    ) & set(texts[:1000])
    train, held_out = split_in_two(stream_of(*texts, *texts), 0.1)
    assert not set(texts_of(train)) & set(texts_of(held_out))
    assert held_out.name == "texts (held out)"


def test_split_cuts_a_single_document():
    train, held_out = split_in_two(stream_of("0123456789" * 10), 0.2)
    assert (len(train), len(held_out)) == (81, 20)
    assert BYTES.decode([*train.tokens, *held_out.tokens]) == "0123456789" * 10


def test_split_without_a_fraction_holds_nothing_out():
    stream = stream_of("a", "b")
    assert split(stream, 0.0) == (stream, None)


@pytest.mark.parametrize(
    ("texts", "held_out"),
    [
        # 15 tokens, 3 asked for: they begin before the end of "cc"
        (["aaaaa", "bbb", "cc", "d"], "d."),
        (["aaaaa" * 3, "b", "c"], "b.c."),  # 20 tokens, 4 asked for: they begin at a border
        (["aa", "bbbbbbbbbbbb"], "bb."),  # 16 tokens, 3 asked for: no border among them
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_split_of_a_token_file_holds_out_its_end(tmp_path, monkeypatch, texts, held_out, chunk):
    monkeypatch.setattr(tokens_module, "_CHUNK_TOKENS", chunk)
    write_texts(tmp_path / "a.bin", *texts)
    stream, _ = read_token_file(tmp_path / "a.bin", BYTES)
    train, rest = split_in_two(stream, 0.2)
    assert "".join("." if token == BYTES.eos else chr(token) for token in rest.tokens) == held_out
    assert np.array_equal(np.concatenate([train.tokens, rest.tokens]), stream.tokens)
    assert isinstance(train.tokens, np.memmap)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_check_vocab_names_the_first_unknown_token(monkeypatch, chunk):
    monkeypatch.setattr(tokens_module, "_CHUNK_TOKENS", chunk)
    stream = stream_of("abcd", "zz")
    # no id is as high as it says
    check_vocab(dataclasses.replace(stream, vocab_size=1000), 257, "tiny")
    with pytest.raises(DataError) as error:
        check_vocab(stream, 256, "tiny")
    assert (
        str(error.value) == "texts has a token that tiny does not know\n"
        "  given: token id 256 at position 4; the model's vocabulary is 256, the data's 257\n"
        "  do:    use the model's own tokenizer, or --set model.vocab_size=257"
    )


def test_check_vocab_trusts_tokens_made_in_memory():
    check_vocab(
        TokenStream(name="unread", tokens=np.array([999]), eos=256, vocab_size=257), 257, "tiny"
    )


def test_ids_of_a_token_file_are_checked_against_its_header(tmp_path, monkeypatch):
    header = write_texts(tmp_path / "a.bin", "abcd", "zz")
    (tmp_path / "a.bin.json").write_text(
        json.dumps(dataclasses.asdict(header) | {"vocab_size": 120})
    )
    stream, _ = read_token_file(tmp_path / "a.bin", BYTES)
    message = (
        r"outside of its own vocabulary\n.*token id 256 at position 4; the vocabulary is"
        r" 120\n.*optimus tokenize"
    )
    with pytest.raises(DataError, match=message):
        check_vocab(stream, 257, "tiny")
    monkeypatch.setattr(tokens_module, "CHECKED_TOKENS", 3)
    check_vocab(stream, 257, "tiny")  # too long a file to be read before training
    cut_examples(stream, np.array([0]), seq_len=3, respect_documents=True)
    with pytest.raises(DataError, match=message):
        cut_examples(stream, np.array([0, 1]), seq_len=3, respect_documents=True)


@pytest.mark.parametrize("limit", [1 << 26, 8])
def test_a_digest_tells_contents_apart(monkeypatch, limit):
    monkeypatch.setattr(digests, "DIGEST_TOKENS", limit)
    monkeypatch.setattr(digests, "_DIGEST_BLOCKS", 4)
    digest = digests.content_digest(stream_of("0123456789" * 3).tokens)
    assert re.fullmatch("[0-9a-f]{16}", digest)
    assert digests.content_digest(stream_of("0123456789" * 3).tokens) == digest
    for other in (
        "0123456789" * 4,
        "1123456789" + "0123456789" * 2,
        "0123456789" * 2 + "0123456780",
    ):
        assert digests.content_digest(stream_of(other).tokens) != digest


def test_token_file_round_trip(tmp_path):
    header = write_texts(tmp_path / "a.bin", "one", "", "three")
    stream, read = read_token_file(tmp_path / "a.bin", BYTES)
    assert isinstance(stream.tokens, np.memmap)
    assert np.array_equal(stream.tokens, stream_of("one", "", "three").tokens)
    assert read == header
    assert json.loads((tmp_path / "a.bin.json").read_text()) == {
        "format": 1,
        "dtype": "uint16",
        "vocab_size": 257,
        "num_tokens": 11,
        "num_documents": 3,
        "eos": 256,
        "tokenizer": BYTES.digest,
        "content": read.content,
        "bad_lines": 0,
    }
    assert (tmp_path / "a.bin").read_bytes()[:4] == b"o\0n\0"


def test_a_token_file_is_never_overwritten(tmp_path):
    for name in ("a.bin", "b.bin.json"):
        (tmp_path / name).write_text("precious")
        with pytest.raises(DataError, match=f"never overwritten\n  given: .*{name} exists"):
            write_texts(tmp_path / name.removesuffix(".json"), "x")
        assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_nothing(tmp_path):
    def parts():
        yield np.array([1, 256], np.uint16)
        raise DataError("line 2 is bad")

    with pytest.raises(DataError, match="line 2 is bad"):
        write_token_file(tmp_path / "a.bin", parts(), BYTES)
    with pytest.raises(DataError, match=r"another suffix\n.*\n.*a.bin"):
        write_texts(tmp_path / "a.dat", "x")
    with pytest.raises(DataError, match=r"cannot be written\n.*No such file"):
        write_texts(tmp_path / "missing" / "a.bin", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 3}, "given: 4 bytes; 3 tokens of uint16 are 6 bytes"),
        ({"dtype": "uint32"}, "given: 4 bytes; 2 tokens of uint32 are 8 bytes"),
        ({"dtype": "int64"}, "no header of format 1 beside it\n  given: format 1, dtype int64"),
        ({"format": 2}, "given: format 2, dtype uint16"),
        ({"colour": "red"}, "given: .*colour"),
        (
            {"tokenizer": "0" * 16},
            f"another tokenizer\n.*{'0' * 16}.*{BYTES.digest} here\n.*--tokenizer PATH",
        ),
    ],
)
def test_token_file_with_a_wrong_header_is_refused(tmp_path, change, message):
    header = write_texts(tmp_path / "a.bin", "x")
    (tmp_path / "a.bin.json").write_text(json.dumps(dataclasses.asdict(header) | change))
    with pytest.raises(DataError, match=message):
        read_token_file(tmp_path / "a.bin", BYTES)


@settings(deadline=None, max_examples=100)
@given(
    start=st.integers(-30, 30),
    stop=st.integers(-30, 30),
    lengths=st.lists(st.integers(0, 7), min_size=1).filter(any),
)
def test_joined_tokens_are_sliced_as_one_array(start, stop, lengths):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    joined = JoinedTokens(np.split(whole, np.cumsum(lengths)[:-1]))
    assert (len(joined), joined.nbytes, joined.dtype) == (len(whole), whole.nbytes, whole.dtype)
    assert np.array_equal(joined[start:stop], whole[start:stop])
    assert [joined[index] for index in range(-len(whole), len(whole))] == [*whole, *whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_module, "_COPIED_TOKENS", 0)
        assert np.array_equal(np.asarray(joined[start:stop]), whole[start:stop])


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_broken_token_file_is_a_readable_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    for old in (path, path.with_name("fuzzed.bin.json")):
        old.unlink(missing_ok=True)
    write_texts(path, "one", "two")
    for file in (path, path.with_name("fuzzed.bin.json")):
        content = file.read_bytes()
        place, cut = (
            data.draw(st.integers(0, len(content))),
            data.draw(st.sampled_from([0, 0, 1, 5])),
        )
        file.write_bytes(
            content[:place]
            + data.draw(st.sampled_from([b"", b"", b"\0", b"9", b"null", b"[", b"\xff", b"-"]))
            + content[place + cut :]
        )
    message = None
    try:
        stream, _ = read_token_file(path, BYTES)
        check_vocab(stream, 300, "tiny")
    except DataError as error:
        message = str(error)
    assert message is None or "\n  do:    " in message


def test_header_is_checked_against_eos_and_number_of_documents(tmp_path):
    header = write_texts(tmp_path / "a.bin", "one", "two")
    for change, message in {
        "num_documents": r"does not have the documents(.|\n)*2 ends of documents; 1 in a.bin.json",
        "eos": (
            r"another end of documents\n  given: id 1 in a.bin.json; here it is id 256, which is no"
            r" byte"
        ),
    }.items():
        (tmp_path / "a.bin.json").write_text(json.dumps(dataclasses.asdict(header) | {change: 1}))
        with pytest.raises(DataError, match=message):
            read_token_file(tmp_path / "a.bin", BYTES)


def test_old_header_without_a_digest_is_read(tmp_path):
    header = dataclasses.asdict(write_texts(tmp_path / "a.bin", "one"))
    (tmp_path / "a.bin.json").write_text(
        json.dumps(
            {name: value for name, value in header.items() if name not in ("content", "bad_lines")}
        )
    )
    assert read_token_file(tmp_path / "a.bin", BYTES)[1].content is None


def test_token_file_without_header_or_tokens_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"no header of format 1 beside it\n.*No such file(.|\n)*restore a.bin.json"
    ):
        read_token_file(tmp_path / "a.bin", BYTES)
    (tmp_path / "a.bin.json").write_text('{"format": 1')
    with pytest.raises(DataError, match="no header of format 1 beside it"):
        read_token_file(tmp_path / "a.bin", BYTES)
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin.json").unlink()
    write_token_file(tmp_path / "a.bin", [], BYTES)
    with pytest.raises(DataError, match="given: 0 bytes"):
        read_token_file(tmp_path / "a.bin", BYTES)


def run_script(folder, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_writes_a_file_once(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    done = run_script(tmp_path, "--tokenizer", "bytes", "--out", "data.bin", "a.txt", "*.jsonl")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "data.bin: 3 documents, 14 tokens of uint16\n",
        "",
    )
    assert texts_of(read_token_file(tmp_path / "data.bin", BYTES)[0]) == ["one", "two", "three"]

    again = run_in_process("tokenize", "--out", "data.bin", "a.txt", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(
        "error: a token file is never overwritten\n  given: data.bin exists\n  do:    "
    )
    assert len(read_token_file(tmp_path / "data.bin", BYTES)[0]) == 14


def test_the_script_explains_its_arguments(tmp_path):
    (tmp_path / "a.jsonl").write_text("nope")
    bad = run_in_process("tokenize", "--out", "data.bin", "a.jsonl", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert (
        "name the field: --text-field NAME, or leave bad lines out: --skip-bad-lines\n"
        in bad.stderr
    )
    shown = run_in_process("tokenize", "--help")
    assert shown.returncode == 0
    assert "--tokenizer" in shown.stdout
    assert run_in_process("tokenize").returncode == 2
