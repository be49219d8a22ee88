import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from backports import zstd  # of Python 3.14
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimus_jax.data.formats import SUFFIXES
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.sources import find_files, read_documents
from optimus_jax.errors import DataError
from optimus_jax.system.paths import PathError


def read(*sources, text_field="text"):
    return list(read_documents([str(source) for source in sources], text_field))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_stdlib_is_every_py_file_but_installed_packages(tmp_path, monkeypatch):
    for name, content in {
        "b.py": "three",
        "a/y.py": "one",
        "a/z.py": "two",
        "c/a.py": "four",
        "c.txt": "no",
        "empty.py": "",
        "latin.py": b"\xe9",
        "site-packages/x.py": "no",
        "d/dist-packages/x.py": "no",
    }.items():
        write(tmp_path / name, content)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    assert read("stdlib") == ["one", "two", "three", "four"]


def test_stdlib_of_this_machine_is_large_and_stable():
    texts = read("stdlib")
    assert sum(map(len, texts)) > 5_000_000
    assert texts == read("stdlib")


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path):
    assert read(write(tmp_path / "a.txt", "one\r\ntwo\n\né")) == ["one\r\ntwo\n\né"]


def test_jsonl_has_a_document_a_line(tmp_path):
    file = write(
        tmp_path / "a.jsonl", '{"body": "one"}\n\n{"body": "", "id": 2}\n{"body": "two\\n"}'
    )
    assert read(file, text_field="body") == ["one", "two\n"]


def test_parquet_has_a_document_a_row(tmp_path):
    table = pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two"]


TABLE = pyarrow.table({"text": ["one", None, "two\n"], "id": [1, 2, 3]})
JSON_LINES = b'{"text": "one"}\n{"text": "two\\n", "id": 1}\n'
MARK = b"\xef\xbb\xbf"


def arrow_file(path, *, stream=False):
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, make(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


FORMATS = {
    "a.jsonl": JSON_LINES,
    "b.ndjson": MARK + JSON_LINES,
    "a.json": b'[{"text": "one"}, "two\\n"]',
    "lines.json": JSON_LINES,
    "a.csv": b'id,text\r\n1,one\r\n\r\n2,"two\n"\r\n',
    "b.CSV": MARK + b'text\none\n"two\n"',
    "a.tsv": b'text\tid\none\t1\n"two\n"\t2\n',
    "a.jsonl.gz": gzip.compress(JSON_LINES),
    "b.jsonl.gz": gzip.compress(JSON_LINES[:16]) + gzip.compress(JSON_LINES[16:]),
    "a.jsonl.bz2": bz2.compress(JSON_LINES),
    "a.json.xz": lzma.compress(MARK + JSON_LINES),
    "a.jsonl.zst": zstd.compress(JSON_LINES),
    "b.jsonl.zst": zstd.compress(JSON_LINES[:16]) + zstd.compress(JSON_LINES[16:]),
    "a.csv.zst": zstd.compress(b'text\none\n"two\n"'),
    "a.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path),
    "b.parquet": lambda path: pyarrow.parquet.write_table(
        TABLE.set_column(0, "text", TABLE["text"].dictionary_encode()), path
    ),
    "a.arrow": arrow_file,
    "b.arrow": lambda path: arrow_file(path, stream=True),
    "a.feather": lambda path: pyarrow.feather.write_feather(TABLE, path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_documents(tmp_path, name):
    content = FORMATS[name]
    content(tmp_path / name) if callable(content) else write(tmp_path / name, content)
    assert read(tmp_path / name) == ["one", "two\n"]


@pytest.mark.parametrize(
    ("name", "content"),
    # mtime: two workers must collect the same names.
    [("a.txt", MARK + b"x"), ("a.md.gz", gzip.compress(MARK + b"x", mtime=0)), ("a.TXT", b"x")],
)
def test_byte_order_mark_is_removed(tmp_path, name, content):
    assert read(write(tmp_path / name, content)) == ["x"]


def join_streams(name, *, damage=None, behind=b""):
    """Two streams in a row, some bytes of the second overwritten, and what follows them."""
    compress = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": zstd.compress,
    }[name]
    second = bytearray(compress(b'{"text": "two"}\n' * 50))
    if damage is not None:
        second[damage] ^= 255
    return compress(b'{"text": "one"}\n') + bytes(second) + behind


@pytest.mark.parametrize("name", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize(
    "change",
    [
        {"damage": 0},
        {"damage": 3},
        {"damage": 30},
        {"damage": -6},
        {"behind": b"more"},
        {"behind": b"BZ"},
        {"behind": b"\xfd7zX"},
    ],
)
def test_damaged_or_trailing_compressed_data_is_an_error(tmp_path, name, change):
    file = write(tmp_path / f"a.jsonl.{name}", join_streams(name, **change))
    with pytest.raises(DataError, match=r"cannot be read(.|\n)*this one is damaged or cut short"):
        read(file)


def test_xz_may_be_padded_by_zeros_in_fours(tmp_path):
    assert len(read(write(tmp_path / "a.jsonl.xz", join_streams("xz", behind=b"\0" * 8)))) == 51
    between = (
        lzma.compress(JSON_LINES) + b"\0" * 70_000 + lzma.compress(JSON_LINES) + lzma.compress(b"")
    )
    assert read(write(tmp_path / "b.jsonl.xz", between)) == ["one", "two\n"] * 2
    with pytest.raises(DataError, match="3 zero bytes follow a stream"):
        read(write(tmp_path / "c.jsonl.xz", join_streams("xz", behind=b"\0" * 3)))


def test_bad_lines_are_skipped_and_counted_on_request(tmp_path):
    lines = write(
        tmp_path / "a.jsonl",
        b'nope\n{"text": "one"}\n{"text": null}\n{"txt": "x"}\n{"text": "\xe9"}\n{"text":'
        b' "\\ud800"}\n' + b"[" * 100_000,
    )
    table = write(tmp_path / "b.csv", "text,n\ntwo,2\nthree\n")
    array = write(tmp_path / "c.json", '[1, "four"]')
    skipped_input = SkippedInput()
    sources = [str(lines), str(table), str(array)]
    assert list(
        read_documents(sources, "text", skip_bad_lines=True, skipped_input=skipped_input)
    ) == [
        "one",
        "two",
        "four",
    ]
    assert skipped_input.bad_lines == {lines: [1, 3, 4, 5, 6, 7], table: [3], array: [1]}
    assert skipped_input.notes() == [
        f"data.skip_bad_lines: 8 bad line(s) skipped: 6 in {lines} (the first is 1), 1 in {table}"
        f" (the first is 3), 1 in {array} (the first is 1)"
    ]
    with pytest.raises(DataError, match=r"holds no text\n.*1 bad line\(s\) skipped"):
        list(
            read_documents([str(write(tmp_path / "d.jsonl", "nope"))], "text", skip_bad_lines=True)
        )


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('1,one\n2,"two\n3,three\n4,four\n', 3),
        ('1,"o ""n"" e"\r\n\r\n2,"two\r\nlines\r\n', 4),
        ('"1\n""\n",5" wide\n"2\n\n",""\n"3\n\n","two ""\nmore', 10),
        ('1,one\n2,"', 3),
        ('1,one\n2,"two""', 3),
        ('"1,one\n2,two', 2),
    ],
)
def test_unclosed_quote_is_an_error_even_if_bad_lines_are_skipped(tmp_path, name, rows, line):
    """It takes in all that follows, so it is an error where bad lines are skipped too."""
    rows = ("id,text\n" + rows).replace(",", "\t" if "tsv" in name else ",").encode()
    file = write(tmp_path / name, gzip.compress(rows) if name.endswith("gz") else rows)
    for skip in (False, True):
        with pytest.raises(DataError, match=f", line {line}, opens a quote that is never closed"):
            list(read_documents([str(file)], "text", skip_bad_lines=skip))


def test_every_line_of_a_skipped_row_is_counted(tmp_path):
    file = write(
        tmp_path / "a.csv",
        'id,text\n1,one\n2,"two\n3,three\n4,"four"\n5,five\n"6\n",six,x\n7,seven\n',
    )
    skipped_input = SkippedInput()
    assert list(
        read_documents([str(file)], "text", skip_bad_lines=True, skipped_input=skipped_input)
    ) == [
        "one",
        "five",
        "seven",
    ]
    assert skipped_input.bad_lines == {file: [3, 4, 5, 7, 8]}


def test_folder_is_read_as_all_readable_files_in_it(tmp_path):
    for name in (
        "b.txt",
        "a/c.txt",
        "a/B.md",
        ".hidden.txt",
        ".git/d.txt",
        "e.png",
        "a/f",
        "t.bin.json.txt",
    ):
        write(tmp_path / name, name)
    write(tmp_path / "empty.py", "")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    skipped_input = SkippedInput()
    assert list(read_documents([str(tmp_path)], "text", skipped_input=skipped_input)) == [
        "a/B.md",
        "a/c.txt",
        "b.txt",
        "t.bin.json.txt",
    ]
    assert skipped_input.notes() == [
        f"1 empty file(s) left out: {tmp_path}/empty.py",
        (
            "file(s) in folders left out, because their format is not supported: 1 without a"
            " suffix, 1 .png"
        ),
    ]
    assert len(find_files([f"{tmp_path}/**/*.txt"])) == 3, (
        "the link that leads back is not followed"
    )


def test_links_between_folders_are_followed_once(tmp_path):
    """Each folder has links to all others: there are too many paths to walk all of them."""
    names = [f"d{number}" for number in range(12)]
    for name in names:
        write(tmp_path / "top" / name / "a.txt", name)
        write(tmp_path / "top" / name / "in" / "er" / "b.txt", name)
        for other in (*names, ".."):
            (tmp_path / "top" / name / f"to {other.strip('.')}").symlink_to(
                tmp_path / "top" / other
            )
    (tmp_path / "top" / "itself.txt").symlink_to("itself.txt")
    write(tmp_path / "beside" / "a.txt", "beside")
    (tmp_path / "top" / "a link").symlink_to(tmp_path / "beside")
    a = [str(tmp_path / "top" / name / "a.txt") for name in ("a link", *names)]
    b = [str(tmp_path / "top" / name / "in" / "er" / "b.txt") for name in names]
    top = tmp_path / "top"
    for source, files in {
        top: a + b,
        top / "**": a + b,
        top / "**" / "*.txt": a + b,
        top / "**" / "**" / "a.txt": a,
        top / "**" / "in" / "**" / "*.txt": b,
        top / "**" / "b.txt": b,
        tmp_path / "t*" / "**" / "er" / "*": b,
    }.items():
        assert sorted(map(str, find_files([str(source)]))) == sorted(files), source


def test_arrow_stream_without_an_end_marker_is_reported(tmp_path):
    for name in ("whole", "cut", "more", "padded"):
        arrow_file(tmp_path / f"{name}.arrow", stream=True)
    whole = (tmp_path / "whole.arrow").read_bytes()
    write(tmp_path / "cut.arrow", whole[:-8])
    write(tmp_path / "padded.arrow", whole + b"\0" * 8)
    write(tmp_path / "more.arrow", whole * 2)
    old = pyarrow.ipc.IpcWriteOptions(use_legacy_format=True)
    with (
        pyarrow.OSFile(str(tmp_path / "old.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, TABLE.schema, options=old) as writer,
    ):
        writer.write_table(TABLE)
    for name in ("whole", "cut", "padded", "old"):
        skipped_input = SkippedInput()
        assert list(
            read_documents([str(tmp_path / f"{name}.arrow")], "text", skipped_input=skipped_input)
        ) == ["one", "two\n"]
        assert skipped_input.without_end == ([tmp_path / "cut.arrow"] if name == "cut" else []), (
            name
        )
        assert skipped_input.notes() == (
            [
                "1 Arrow stream(s) have no end-of-stream marker, which a writer may leave out; but"
                f" if they were cut short, rows are missing: {tmp_path}/cut.arrow"
            ]
            if name == "cut"
            else []
        )
    with pytest.raises(DataError, match="more data follows the end of its stream"):
        read(tmp_path / "more.arrow")


def test_folder_of_a_hugging_face_dataset_is_read_as_its_shards(tmp_path):
    for split in ("train", "test"):
        for shard in (0, 1):
            write(tmp_path / split / "x", "x")
            arrow_file(tmp_path / split / f"data-{shard}.arrow", stream=True)
        arrow_file(tmp_path / split / "cache-1.arrow", stream=True)
        write(tmp_path / split / "dataset_info.json", "{}")
        write(
            tmp_path / split / "state.json",
            json.dumps(
                {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
            ),
        )
    assert read(tmp_path / "train") == ["one", "two\n"] * 2
    (tmp_path / "test" / "state.json").unlink()
    assert read(tmp_path / "test") == ["one", "two\n"] * 2
    write(tmp_path / "in parquet" / "dataset_info.json", "{}")
    pyarrow.parquet.write_table(TABLE, tmp_path / "in parquet" / "a.parquet")
    assert read(tmp_path / "in parquet") == ["one", "two\n"]
    shutil.rmtree(tmp_path / "in parquet")
    write(tmp_path / "dataset_dict.json", "{}")
    with pytest.raises(
        DataError,
        match=r"several splits of a data set\n.*test, train\n.*name one to train on: .*train",
    ):
        read(tmp_path)


def test_sources_that_are_no_regular_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere.txt").symlink_to("gone.txt")
    for name, message in {
        "pipe": "is a named pipe, which can be read only once",
        "loop": "a link leads in a circle",
        "nowhere.txt": "a link leads nowhere\n.* -> gone.txt",
    }.items():
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)
    for name, message in {"/dev/null": "is a device", "": "a data source has no name"}.items():
        with pytest.raises(DataError, match=message):
            read(name)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_broken_file_is_a_readable_error(tmp_path, data):
    """Files of every format, cut short, changed and given the suffix of any other."""
    name = data.draw(st.sampled_from(list(FORMATS)))
    content = FORMATS[name]
    if callable(content):
        content(tmp_path / "made")
        content = (tmp_path / "made").read_bytes()
    mutated = bytearray(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content)), st.integers(0, 255)), max_size=8)
    ):
        mutated[place : place + 1] = bytes([value])
    mutated += data.draw(
        st.sampled_from(
            [b"", b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"[" * 20_000, b"\n\n", b"\xed\xa0\x80"]
        )
    )
    suffix = data.draw(
        st.just("".join(Path(name).suffixes))
        | st.sampled_from([*SUFFIXES, ".txt.gz", ".csv.xz", ".jsonl.zst", ".json.bz2", ".x", ""])
    )
    file = write(tmp_path / f"file{suffix}", bytes(mutated))
    message = None
    try:
        for text in read_documents([str(file)], "text", skip_bad_lines=data.draw(st.booleans())):
            text.encode()
    except DataError as error:
        message = str(error)
    assert message is None or (str(file) in message and "\n  do:    " in message)


def test_sources_keep_their_order_and_globs_are_sorted(tmp_path):
    for name in ("b.md", "a.md", "deep/er/c.md"):
        write(tmp_path / name, name)
    last = write(tmp_path / "[0].txt", "glob characters in a name")
    assert read(last, tmp_path / "**/*.md") == [
        "glob characters in a name",
        "a.md",
        "b.md",
        "deep/er/c.md",
    ]


def test_file_given_twice_is_reported(tmp_path):
    for name in ("a.txt", "b.txt"):
        write(tmp_path / name, name)
    for find in (
        find_files,
        lambda sources, skipped_input: list(
            read_documents(sources, "text", skipped_input=skipped_input)
        ),
    ):
        skipped_input = SkippedInput()
        assert len(find([str(tmp_path / "a.txt"), f"{tmp_path}/*.txt"], skipped_input)) == 3
        assert skipped_input.notes() == [
            f"1 file(s) are given more than once, and read as often: {tmp_path}/a.txt"
        ]


def test_other_fields_need_not_be_convertible_to_python(tmp_path):
    long = "9" * 6000
    file = write(
        tmp_path / "a.jsonl", f'{{"text": "one", "n": {long}}}\n{{"text": "two", "n": -{long}}}\n'
    )
    array = write(tmp_path / "b.json", f'[{{"n": [{long}], "text": "three"}}]')
    assert read(file, array) == ["one", "two", "three"]
    table = pyarrow.table({"text": pyarrow.array([b"caf\xc3\xa9", None], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["caf\u00e9"]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([b"caf\xe9"], pyarrow.large_binary())}),
        tmp_path / "b.parquet",
    )
    with pytest.raises(
        DataError, match=r"b.parquet cannot be read\n.*0xe9(.|\n)*whose text is UTF-8"
    ):
        read(tmp_path / "b.parquet")


def test_find_files_leaves_stdlib_out(tmp_path):
    file = write(tmp_path / "a.txt", "x")
    assert find_files(["stdlib", str(file)]) == [file]


def test_every_name_is_checked_before_anything_is_read(tmp_path):
    first = write(tmp_path / "a.txt", "x")
    with pytest.raises(DataError, match="no such data file"):
        next(read_documents([str(first), str(tmp_path / "b.txt")], "text"))


def gzipped(content):
    """Gzip data without a time: its bytes are part of test names, which must not change."""
    return gzip.compress(content, mtime=0)


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
)


def tar_of(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        (member := tarfile.TarInfo("a.txt")).size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"no such data file\n  given: .*missing.txt"),
        ("*.txt", None, r"no file matches a glob\n  given: .*\*.txt"),
        (
            "folder/",
            None,
            r"a folder holds no file to train on\n  given: .*folder/\n.*\.txt .*\.parquet",
        ),
        (
            "a.log",
            "x",
            r"a.log has an unknown suffix(.|\n)*given: .log; by its first"
            r" bytes it is plain text\n"
            r".*end with \.txt if the whole file is one document.*\.parquet",
        ),
        ("a", '{"text": "x"}', "given: no suffix; by its first bytes it is JSON"),
        ("a.docx", b"PK\x03\x04\x14", r"it is a zip archive \(\.docx.*\n  do:    unpack it"),
        ("a.pdf", b"%PDF-1.7", "it is a PDF document\n  do:    write its text out"),
        ("a.pt", b"\x80\x02}", "it is a Python pickle, which could run anything"),
        ("a.npy", b"\x93NUMPY\x01", "it is a NumPy array"),
        ("a.gz", b"\x1f\x8b", r"format of the compressed file is unknown\n.*\n.*\.jsonl\.gz"),
        ("a.parquet.gz", b"\x1f\x8b", "compressed .parquet files cannot be read"),
        (
            "a.txt.gz",
            "no gzip",
            "a.txt.gz cannot be read\n.*Not a gzipped file(.|\n)*damaged or cut short",
        ),
        ("a.txt.gz", gzipped(b"text" * 1000)[:-9], "a.txt.gz cannot be read\n.*EOFError"),
        ("a.txt.gz", b"", "a.txt.gz holds no text"),
        (
            "a.jsonl.zst",
            zstd.compress(b'{"text": "x"}')[:-3],
            "a.jsonl.zst cannot be read\n.*EOFError",
        ),
        ("a.txt", gzipped(b"text"), "a.txt cannot be read: it is gzip data"),
        (
            "a.txt",
            "text".encode("utf-16"),
            "a.txt cannot be read: it is text in UTF-16\n(.|\n)*iconv -f UTF-16",
        ),
        ("a.txt", "plain text".encode("utf-16-le"), "it is text in UTF-16"),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16"), "it is text in UTF-16"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "x"}], "text": [{"role": 1}]}',
            (
                "'text' holds a list of objects with 'role', not a text; a conversation becomes"
                " tokens when training starts"
            ),
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "x"}]}',
            "no field 'text'; there are 'messages'; a conversation becomes tokens when training",
        ),
        ("a.jsonl", '{"text": ' + "[" * 100_000, "line 1, .*\n.*RecursionError"),
        ("a.jsonl", '{"text": ' + "9" * 5000 + "}", "line 1, .*\n.*'text' holds a number"),
        (
            "a.jsonl",
            gzipped(JSON_LINES),
            "a.jsonl cannot be read: it is gzip data\n(.|\n)*end with .txt.gz or .jsonl.gz",
        ),
        ("a.json", b"PAR1\x15\x00\x15\x80", "a.json cannot be read: it is a Parquet file"),
        ("a.txt", tar_of(b"plain words"), "a.txt cannot be read: it is a tar archive"),
        (
            "a.jsonl.gz",
            gzipped(tar_of(JSON_LINES)),
            "a.jsonl.gz cannot be read: it is a tar archive",
        ),
        *(
            (
                name,
                LFS_POINTER,
                f"{name} cannot be read: it is a pointer of git-lfs(.|\\n)*git lfs pull",
            )
            for name in ("a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.txt.gz")
        ),
        (
            "a.txt.gz",
            gzipped("text".encode("utf-16")),
            "a.txt.gz cannot be read: it is text in UTF-16",
        ),
        (
            "a.csv.bz2",
            bz2.compress("text\nx\n".encode("utf-16")),
            "a.csv.bz2 cannot be read: it is text in UTF-16",
        ),
        (
            "a.txt.gz",
            gzipped(b"caf\xe9"),
            "a.txt.gz cannot be read\n.*0xe9(.|\n)*whose text is UTF-8",
        ),
        ("a.json", "[" * 100_000, "too deep inside one another"),
        ("a.json", '{"a": 1}', "item 1, .*\n.*no field 'text'; there are 'a'"),
        ("a.csv", "x\n1\n", "no column of text named 'text'\n  given: x\n"),
        (
            "a.csv",
            "text,b\n1,2,3\n",
            "line 2, is no row of its table\n  given: 3 fields; the names above are 2",
        ),
        ("a.csv", 'text\n"open', "line 2, opens a quote that is never closed"),
        ("a.csv", '"text\nopen', "line 1, opens a quote that is never closed"),
        ("a.csv", '"te"xt\n', "line 1, is no row of names"),
        (
            "a.csv",
            'text,b\n"1\n2",3\n"4\n5",6,7\n',
            "lines 4 to 5, is no row of its table\n  given: 3 fields",
        ),
        ("a.arrow", b"ARROW1\0\0broken", "a.arrow cannot be read"),
        ("a\0.txt", None, "--data holds a NUL character"),
        ("n" * 300, None, "--data is too long for a path"),
        ("a.bin", "x", "a.bin holds tokens, not text"),
        ("a.txt", "", r"a.txt holds no text\n  given: 0 bytes"),
        (
            "a.txt",
            b"caf\xe9",
            "a.txt cannot be read\n.*can't decode byte 0xe9 in position 3(.|\n)*UTF-8",
        ),
        ("a.jsonl", "", "a.jsonl holds no text"),
        (
            "a.jsonl",
            '{"text": "x"}\nnope\n',
            r"a.jsonl, line 2, is not a JSON object with a text named 'text'\n  given: b'nope",
        ),
        (
            "a.jsonl",
            '{"txt": "x"}',
            r"line 1, .*\n.*no field 'text'; there are 'txt'(.|\n)*--set data.text_field=NAME",
        ),
        ("a.jsonl", '["text"]', "line 1, "),
        ("a.jsonl", '{"text": 7}', "line 1, "),
        ("a.jsonl", b'{"text": "\xe9"}', "line 1, .*\n.*UnicodeDecodeError"),
        ("a.jsonl", json.dumps({"text": "\ud800"}), "line 1, .*\n.*UnicodeEncodeError"),
        ("a.parquet", "not parquet", "a.parquet cannot be read"),
    ],
)
def test_unusable_sources_are_refused(tmp_path, name, content, message):
    (tmp_path / "folder").mkdir()
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises((DataError, PathError), match=message):
        read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("columns", [{"body": ["x"]}, {"text": [1]}])
def test_a_parquet_column_must_exist_and_be_text(tmp_path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"no column of text named 'text'\n  given: (body: string|text: int64)\n"
    ):
        read(tmp_path / "a.parquet")


def test_error_without_zstd_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.delattr(sys.modules["backports"], "zstd", raising=False)
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(
        DataError, match=r"pip install 'optimus-jax\[zstd\]', or decompress the file"
    ):
        read(write(tmp_path / "a.jsonl.zst", "x"))


def test_error_without_parquet_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'optimus-jax\[parquet\]'"):
        read(write(tmp_path / "a.parquet", "x"))
