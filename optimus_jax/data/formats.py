"""Reads the texts in a file: one reader function per format, and a table from suffix to reader.

A reader takes a `SourceFile` and yields documents: texts, or what a RecordReader makes of records;
"" and None do not count. It may raise whatever its library raises: `sources.py` turns that into a
DataError.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from optimus_jax.data.compressed import open_file, suffixes_of
from optimus_jax.data.file_kinds import TEXT_BYTE_ORDER_MARK, wide_encoding
from optimus_jax.data.other_names import (
    advice_to_rename,
    advice_to_train,
    prompt_and_completion,
)
from optimus_jax.data.record_names import COMPLETION, PROMPT
from optimus_jax.data.record_reader import RecordReader, column_types
from optimus_jax.data.records import (
    LEARN_PREFERENCES,
    USE_TRAINING,
    NotConversationError,
    NotTextError,
    has_pair,
    text_in,
    without_nulls,
)
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.errors import DataError, explain

_READ_BYTES = 1 << 20
ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file; a stream has no such."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Marker that ends an Arrow stream; a writer may leave it out."""
_OLD_END_OF_STREAM = b"\0\0\0\0"
"""The marker before Arrow 0.15, whose messages do not begin with four bytes of 255."""
_SHOWN = 80
"""Most characters of a bad line that a message shows."""
_LONGEST_FIELD = 2**31 - 1
"""Longest CSV field, in characters; Python's default limit is 131,072."""
_UNCLOSED = "unexpected end of data"
"""The csv module's message for a quoted field that is still open at the end of the file."""
TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".java",
    ".js",
)
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow types of a text column; binary ones hold UTF-8 that the writer did not mark as text."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file that is being read."""

    path: Path
    text_field: str
    """Name of the field or column that holds the text."""
    skip_bad_lines: bool
    """Whether bad lines are skipped and counted instead of refused."""
    skipped_input: SkippedInput
    """Counts of what is skipped."""
    records: RecordReader | None = None
    """Reads JSON values and rows; None: they must be texts."""

    @property
    def counts_each(self) -> bool:
        """As `RecordReader.counts_each`."""
        return self.records is not None and self.records.counts_each

    def document(self, record: Any) -> Any:
        """The document in a JSON value. Raises ValueError if there is none."""
        if self.records is None:
            return text_in(record, self.text_field, advice_to_train)
        return self.records.document(record)

    def see_text(self, fields: Collection[str]) -> None:
        """As `RecordReader.see_text`."""
        if self.records is not None:
            self.records.see_text(fields)

    def records_in(self, value: Any) -> Iterable[Any]:
        """The records of a JSON file that is this value."""
        if self.records is None:
            return value if isinstance(value, list) else [value]
        return self.records.records_in(value)

    def bad(
        self, unit: str, number: int, shown: object, error: Exception, *, num_lines: int = 1
    ) -> None:
        """Count the bad line, row or item `number`, which takes up `num_lines` lines.

        Raises DataError if bad lines are not to be skipped.
        """
        if self.skip_bad_lines:
            numbers = range(number, number + num_lines)
            self.skipped_input.bad_lines.setdefault(self.path, []).extend(numbers)
            return
        reason = (
            str(error)
            if isinstance(error, NotTextError | csv.Error)
            else f"{type(error).__name__}: {error}"
        )
        text, name = repr(shown), ""
        if unit == "row":
            last = number + num_lines - 1
            lines = f"line {number}" if num_lines == 1 else f"lines {number} to {last}"
            what, given = f"{lines}, is no row of its table", reason
        elif isinstance(error, NotConversationError):
            what = f"{unit} {number}, is not a {error.wanted}"
            given = reason
        else:
            what = f"{unit} {number}, is not a JSON object with a text named {self.text_field!r}"
            given = f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({reason})"
            if not (isinstance(error, NotTextError) and error.do):
                name = "name the field: --set data.text_field=NAME, "
        leave_out = "leave bad lines out: --set data.skip_bad_lines=true"
        if self.counts_each:
            leave_out = f"leave the {unit} out"
        do = f"fix the {unit}, {name}or {leave_out}"
        if isinstance(error, NotTextError) and error.do is not None:
            # Where no record was good yet, all of them are likely to be of this kind.
            has_good = self.records is not None and self.records.has_good
            do = f"{error.do}, or {do}" if has_good else error.do
        raise DataError(explain(f"{self.path}, {what}", given=given, do=do)) from error


def read_text(source_file: SourceFile) -> Iterator[str]:
    """Yield the whole file as one text."""
    with open_file(source_file.path) as file:
        data = file.read()
    if (wide := wide_encoding(data[:1024])) is not None:
        raise ValueError(f"the text is in {wide}, not UTF-8")
    yield data.removeprefix(TEXT_BYTE_ORDER_MARK).decode()


def read_json_lines(source_file: SourceFile) -> Iterator[Any]:
    """Yield the text of each line, which is a JSON object with a text field or a JSON string."""
    with open_file(source_file.path) as file:
        yield from _json_lines(file, source_file)


def read_json(source_file: SourceFile) -> Iterator[Any]:
    """Yield the texts of a JSON array, of one object, or of JSON lines, often named .json too."""
    with open_file(source_file.path) as file:
        data = file.read().removeprefix(TEXT_BYTE_ORDER_MARK)
    try:
        value = _loads(data) if data.strip() else []
    except ValueError as error:
        if "Extra data" not in str(error):
            raise
        yield from _json_lines(io.BytesIO(data), source_file)
        return
    del data
    for number, record in enumerate(source_file.records_in(value), 1):
        try:
            document = source_file.document(record)
        except ValueError as error:
            source_file.bad("item", number, record, error)
            continue
        yield document


def read_csv(source_file: SourceFile) -> Iterator[Any]:
    """Yield the text column, or the record, of each row; the first row names the columns."""
    records = source_file.records
    records = None if records is None or records.reads_texts else records
    csv.field_size_limit(_LONGEST_FIELD)
    separator = "\t" if ".tsv" in (suffix.lower() for suffix in source_file.path.suffixes) else ","
    with (
        open_file(source_file.path) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines,
    ):
        taken = _LinesOfRow(lines)
        rows = csv.reader(taken, delimiter=separator, strict=True)
        names: list[str] | None = None
        columns: list[int] = []
        blank: int | None = None
        while True:
            taken.lines.clear()
            try:
                row = next(rows)
                if row and blank is not None and source_file.counts_each:
                    raise _blank_row(source_file, blank)
                if names is not None and not row and blank is None:
                    blank = rows.line_num
                if names is not None and row and len(row) != len(names):
                    raise NotTextError(f"{len(row)} fields; the names above are {len(names)}")
            except StopIteration:
                return
            except UnicodeDecodeError:  # nothing can be read after this
                raise
            except (csv.Error, NotTextError) as error:
                first = rows.line_num - len(taken.lines) + 1
                if str(error) == _UNCLOSED:
                    raise _unclosed_quote(source_file, taken.lines, first, separator) from error
                if names is None:
                    raise _bad_names(source_file, first, error) from error
                source_file.bad("row", first, "", error, num_lines=len(taken.lines))
                continue
            if names is None:
                names = row
                if records is not None:
                    columns = list(map(names.index, _columns_of(records, names, source_file)))
                    continue
                if source_file.text_field not in names:
                    given = ", ".join(name[:_SHOWN] for name in names[:50])
                    raise _no_column(source_file, given, names)
                columns = [names.index(source_file.text_field)]
                source_file.see_text(names)
            elif row and records is None:
                yield row[columns[0]]
            elif row and records is not None:
                try:
                    yield records.document({names[column]: row[column] for column in columns})
                except ValueError as error:
                    first = rows.line_num - len(taken.lines) + 1
                    source_file.bad("row", first, "", error, num_lines=len(taken.lines))


class _LinesOfRow:
    """Iterates over the lines of a table; keeps those of the current row, which can be many."""

    def __init__(self, source: Iterable[str]) -> None:
        self._source = iter(source)
        self.lines: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._source)
        self.lines.append(line)
        return line


def _unclosed_quote(
    source_file: SourceFile, lines: list[str], first: int, separator: str
) -> DataError:
    """The error for a table whose last field opens a quote that is never closed.

    It is raised even with skip_bad_lines, since the number of rows inside that field is unknown.

    Args:
      lines: the lines of the last row.
      first: line number of the first of them.
    """
    text = "".join(lines)
    field = re.compile(rf'"[^"]*+(?:""[^"]*+)*+"(?!")|[^"{separator}\r\n][^{separator}\r\n]*')
    start = 0
    while start < len(text):
        found = field.match(text, start)
        if found is None and text[start] == '"':
            break
        start = start + 1 if found is None else found.end()
    line = first + len(re.findall(r"\r\n|\r|\n", text[:start]))
    lost = first + len(lines) - line
    return DataError(
        explain(
            f"{source_file.path}, line {line}, opens a quote that is never closed",
            given=(
                f"{text[start : start + _SHOWN].splitlines()[0]!r}; "
                f"the field would hold the {lost:,} line(s) from there to the end of the file"
            ),
            do='close the quote, or write the character as "" inside of quotes',
        )
    )


def _blank_row(source_file: SourceFile, line: int) -> DataError:
    return DataError(
        explain(
            f"{source_file.path}, line {line}, is blank, and rows follow it",
            given="no field",
            do='write an empty text as "", or leave the line out',
        )
    )


def _bad_names(source_file: SourceFile, line: int, error: Exception) -> DataError:
    return DataError(
        explain(
            f"{source_file.path}, line {line}, is no row of names",
            given=error,
            do="fix the first row, which names the columns",
        )
    )


def read_parquet(source_file: SourceFile) -> Iterator[Any]:
    """Yield the text column, or the conversation, of each row of a Parquet file."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _needs_pyarrow("Parquet", source_file.path) from error
    with pyarrow.parquet.ParquetFile(source_file.path) as table:
        columns = _columns(table.schema_arrow, source_file)
        yield from _rows(table.iter_batches(columns=columns), columns, source_file)


def read_arrow(source_file: SourceFile) -> Iterator[Any]:
    """Yield the text column, or the conversation, of each row of an Arrow file or stream.

    Hugging Face's datasets library and Feather store such files.
    """
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise _needs_pyarrow("Arrow", source_file.path) from error
    with pyarrow.memory_map(str(source_file.path)) as source:
        found = arrow_batches(source)
        yield from _rows(found.batches, _columns(found.schema, source_file), source_file)
        if found.is_stream:
            _check_end_of_stream(source, source_file)


class ArrowBatches(NamedTuple):
    """The record batches of an Arrow file or stream."""

    batches: Iterable[Any]
    schema: Any
    is_stream: bool


def arrow_batches(source: Any) -> ArrowBatches:
    """The record batches of an open pyarrow file, which is at its beginning."""
    import pyarrow.ipc

    is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
    source.seek(0)
    if not is_file:
        stream = pyarrow.ipc.open_stream(source)
        return ArrowBatches(stream, stream.schema, is_stream=True)
    file = pyarrow.ipc.open_file(source)
    batches = map(file.get_batch, range(file.num_record_batches))
    return ArrowBatches(batches, file.schema, is_stream=False)


def _check_end_of_stream(source: Any, source_file: SourceFile) -> None:
    """Record an Arrow stream that has no end marker; raise ValueError if more data follows it.

    Args:
      source: the file, after all messages of the stream have been read.
    """
    end = source.tell()
    source.seek(0)
    marker = _END_OF_STREAM if source.read(4) == _END_OF_STREAM[:4] else _OLD_END_OF_STREAM
    source.seek(max(0, end - len(marker)))
    if source.read(len(marker)) != marker:
        source_file.skipped_input.without_end.append(source_file.path)
    while more := source.read(_READ_BYTES):
        if more.strip(b"\0"):
            raise ValueError("more data follows the end of its stream, which would not be read")


Reader = Callable[[SourceFile], Iterator[Any]]
READERS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_SUFFIXES, read_text),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), read_json_lines),
    ".json": read_json,
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".parquet": read_parquet,
    **dict.fromkeys((".arrow", ".feather"), read_arrow),
}
"""Readers by lower-case suffix."""
TOKEN_SUFFIX = ".bin"
HEADER_SUFFIX = ".json"
"""Suffix that a token file's name is extended by to name its header."""
SUFFIXES = (*READERS, TOKEN_SUFFIX)
_SEEKING = (read_parquet, read_arrow)
"""Readers that seek in a file; such a file can only be compressed internally."""


def has_format(path: Path) -> bool:
    """Whether a file's name indicates how to read it."""
    suffix, compression = suffixes_of(path)
    if not compression:
        return suffix in SUFFIXES
    return suffix in READERS and READERS[suffix] not in _SEEKING


def reads_text(path: Path) -> bool:
    """Whether a file is read as text, from front to end."""
    return READERS[suffixes_of(path)[0]] not in _SEEKING


def _decoded(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _loads(data: bytes) -> Any:
    """Parse JSON; an integer with more digits than Python converts becomes a float.

    Raises ValueError or RecursionError.
    """
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # an integer is longer than sys.get_int_max_str_digits allows
        return json.loads(data, parse_int=float)


def _json_lines(file: BinaryIO | io.BytesIO, source_file: SourceFile) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if number == 1:
            if (wide := wide_encoding(line)) is not None:
                raise ValueError(f"the text is in {wide}, not UTF-8")
            line = line.removeprefix(TEXT_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            document = source_file.document(_loads(line))
        except (ValueError, RecursionError) as error:
            source_file.bad("line", number, line[:_SHOWN], error)
            continue
        yield document


def _columns(schema: Any, source_file: SourceFile) -> list[str]:
    """The columns of an Arrow schema to read.

    Raises DataError for texts unless exactly one text column has the given name.
    """
    records = source_file.records
    if records is not None and records.decide(column_types(schema)) != "text":
        return _columns_of(records, schema.names, source_file)
    columns = [(field.name, field.type) for field in schema]
    kinds = [
        str(getattr(kind, "value_type", kind)) if str(kind).startswith("dictionary") else str(kind)
        for name, kind in columns
        if name == source_file.text_field
    ]
    if len(kinds) != 1 or kinds[0] not in _TEXT_TYPES:
        is_chat = any(kind.startswith(("list<", "large_list<")) for kind in kinds)
        raise _no_column(
            source_file,
            ", ".join(f"{name}: {kind}" for name, kind in columns),
            schema.names,
            is_chat=is_chat,
        )
    source_file.see_text(schema.names)
    return [source_file.text_field]


def _columns_of(records: RecordReader, names: Sequence[str], source_file: SourceFile) -> list[str]:
    """The columns to read of a table whose rows are records that are no texts. Raises DataError if
    there are none.
    """
    if found := records.columns(names):
        return found
    raise DataError(
        explain(
            f"{source_file.path} holds no {records.wanted}",
            given=f"columns {', '.join(name[:_SHOWN] for name in names[:50])}"
            # Other readers read one kind, whatever the setting is.
            + (f"; data.records={records.kind}" if type(records) is RecordReader else ""),
            do=f"{records.if_absent(names)}, or leave the file out",
        )
    )


def _rows(batches: Iterable[Any], columns: list[str], source_file: SourceFile) -> Iterator[Any]:
    """Yield the documents in the rows of Arrow batches."""
    records, number = source_file.records, 0
    for batch in batches:
        values = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in columns]
        if records is None or records.reads_texts:
            yield from map(_decoded, values[0])
            continue
        for row in zip(*values, strict=True):
            number += 1
            if all(value is None for value in row) and not source_file.counts_each:
                continue
            record = without_nulls(dict(zip(columns, row, strict=True)))
            try:
                document = records.document(record)
            except (ValueError, RecursionError) as error:
                source_file.bad("record", number, record, error)
                continue
            yield document


def _no_column(
    source_file: SourceFile, given: str, names: Collection[str], *, is_chat: bool = False
) -> DataError:
    """The error for a table without the column of texts.

    Args:
      given: the columns, for the message.
      names: of the columns.
      is_chat: whether the column holds lists.
    """
    chat = f"; {USE_TRAINING}" if is_chat else ""
    name = f"name the column: --set data.text_field=NAME{chat}"
    if has_pair(names):
        do = f"{LEARN_PREFERENCES}, or {name}"
    elif source_file.records is None:
        do = advice_to_train(names) or name
    elif READERS[suffixes_of(source_file.path)[0]] is not read_csv:
        do = advice_to_rename(names) or name
    elif None in prompt_and_completion(names):
        do = name
    else:
        do = f"write the rows as JSON lines with the fields {PROMPT!r} and {COMPLETION!r}"
    return DataError(
        explain(
            f"{source_file.path} has no column of text named {source_file.text_field!r}",
            given=given,
            do=do,
        )
    )


def _needs_pyarrow(kind: str, path: Path) -> DataError:
    return DataError(
        explain(
            f"{kind} files need pyarrow, which is not installed",
            given=path,
            do="pip install 'optimus-jax[parquet]'",
        )
    )
