import json
import sys
import sysconfig

import pyarrow
import pyarrow.parquet
import pytest

from optimus_jax.data.sources import find_files, read_documents
from optimus_jax.errors import DataError


def read(*sources, text_field="text"):
    return list(read_documents([str(source) for source in sources], text_field))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_stdlib_is_every_py_file_but_installed_packages(tmp_path, monkeypatch):
    for name, content in {"b.py": "three", "a/y.py": "one", "a/z.py": "two", "c/a.py": "four",
                          "c.txt": "no", "empty.py": "", "latin.py": b"\xe9",
                          "site-packages/x.py": "no", "d/dist-packages/x.py": "no"}.items():
        write(tmp_path / name, content)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    assert read("stdlib") == ["one", "two", "three", "four"]


def test_this_machine_has_a_stdlib_to_train_on():
    texts = read("stdlib")
    assert sum(map(len, texts)) > 5_000_000
    assert texts == read("stdlib")


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path):
    assert read(write(tmp_path / "a.txt", "one\r\ntwo\n\né")) == ["one\r\ntwo\n\né"]


def test_jsonl_has_a_document_a_line(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"body": "one"}\n\n{"body": "", "id": 2}\n{"body": "two\\n"}')
    assert read(file, text_field="body") == ["one", "two\n"]


def test_parquet_has_a_document_a_row(tmp_path):
    table = pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two"]


def test_sources_keep_their_order_and_globs_are_sorted(tmp_path):
    for name in ("b.md", "a.md", "deep/er/c.md"):
        write(tmp_path / name, name)
    last = write(tmp_path / "[0].txt", "glob characters in a name")
    assert read(last, tmp_path / "**/*.md") == ["glob characters in a name", "a.md", "b.md", "deep/er/c.md"]


def test_find_files_leaves_stdlib_out(tmp_path):
    file = write(tmp_path / "a.txt", "x")
    assert find_files(["stdlib", str(file)]) == [file]


def test_every_name_is_checked_before_anything_is_read(tmp_path):
    first = write(tmp_path / "a.txt", "x")
    with pytest.raises(DataError, match="no such data file"):
        next(read_documents([str(first), str(tmp_path / "b.txt")], "text"))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("missing.txt", None, r"no such data file\n  given: .*missing.txt"),
    ("*.txt", None, r"no file matches a glob\n  given: .*\*.txt"),
    ("folder/", None, r"no such data file(.|\n)*a glob such as 'FOLDER/\*\*/\*.txt'"),
    ("a.csv", "x", r"a.csv has a suffix that says nothing about its format\n  given: .csv\n.*\.txt .*\.parquet"),
    ("a", "x", "given: no suffix"),
    ("a.bin", "x", "a.bin holds tokens, not text"),
    ("a.txt", "", r"a.txt holds no text\n  given: 0 bytes"),
    ("a.txt", b"caf\xe9", "a.txt cannot be read\n.*can't decode byte 0xe9 in position 3(.|\n)*UTF-8"),
    ("a.jsonl", "", "a.jsonl holds no text"),
    ("a.jsonl", '{"text": "x"}\nnope\n',
     r"a.jsonl, line 2, is not a JSON object with a text named 'text'\n  given: b'nope"),
    ("a.jsonl", '{"txt": "x"}', r"line 1, .*\n.*KeyError: 'text'(.|\n)*--set data.text_field=NAME"),
    ("a.jsonl", '["text"]', "line 1, "),
    ("a.jsonl", '{"text": 7}', "line 1, "),
    ("a.jsonl", b'{"text": "\xe9"}', "line 1, .*\n.*UnicodeDecodeError"),
    ("a.jsonl", json.dumps({"text": "\ud800"}), "line 1, .*\n.*UnicodeEncodeError"),
    ("a.parquet", "not parquet", "a.parquet cannot be read"),
])
def test_a_source_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / "folder").mkdir()
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("columns", [{"body": ["x"]}, {"text": [1]}])
def test_a_parquet_column_must_exist_and_be_text(tmp_path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column of text named 'text'\n  given: (body: string|text: int64)\n"):
        read(tmp_path / "a.parquet")


def test_parquet_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'optimus-jax\[parquet\]'"):
        read(write(tmp_path / "a.parquet", "x"))
