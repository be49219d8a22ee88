"""Data that a program gives as an object: records, or token ids, by number or in turn."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.settings import shown
from optimus_jax.data.formats import SourceFile
from optimus_jax.data.iterated import has_state
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import without_nulls
from optimus_jax.data.refused import TEXTS_AS_RECORDS
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.token_ids import token_dtype
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.data.tokens import TokenStream
from optimus_jax.errors import DataError, explain
from optimus_jax.system.paths import UserPath

NAME = "the data given in Python"
"""Of such data, in messages."""
INPUT_IDS = "input_ids"
"""Field of a record with its token ids, as tokenizers of transformers name it."""
MAX_NAME_CHARS = 255
"""Most characters of a name in a path."""
GIVE_RECORDS = (
    "give a list of records such as {'text': '...'} or of lists of token ids, or an object with"
    " len() and [number] that has these, such as a datasets.Dataset; or an iterator of them with a"
    " state (get_state, set_state), such as grain's; or write them to a JSON Lines file, and name"
    " that"
)


@runtime_checkable
class RandomAccess(Protocol):
    """Items by number, such as a list or a datasets.Dataset: records, as a line of a JSON Lines
    file holds them, or the token ids of a document each.
    """

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Item `index`, counted from 0."""
        ...


def is_paths(data: object) -> bool:
    """Whether data is named by paths: one, or a list of them."""
    if isinstance(data, str | os.PathLike):
        return True
    return isinstance(data, list | tuple) and all(
        isinstance(item, str | os.PathLike) for item in data
    )


def check_paths(data: UserPath | Sequence[UserPath], name: str = "data") -> None:
    """Raise DataError if there is none, or one is a text itself: it has several lines, or no name
    is that long.

    Args:
      name: of the argument.
    """
    if not data:
        raise DataError(explain(f"{name}= is empty", given=repr(data), do=GIVE_RECORDS))
    for item in [data] if isinstance(data, str | os.PathLike) else data:
        path = str(item)
        if "\n" in path or max(map(len, path.split("/"))) > MAX_NAME_CHARS:
            raise DataError(
                explain(
                    f"{name}= names paths, and a text is none",
                    given=shown(path[:100], quoted=True),
                    do=TEXTS_AS_RECORDS,
                )
            )


def check_records(data: object, name: str = "data") -> RandomAccess | Iterable[Any]:
    """Data that is no paths. Raises DataError unless it has items by number, and the first of them
    can be read; or is an iterator with a state.

    Args:
      name: of the argument.
    """
    wrong = None
    if has_state(data):
        assert isinstance(data, Iterable)
        return data
    if isinstance(data, Iterator):
        wrong = "gives its items once, and has no state from which a run could go on"
    elif isinstance(data, Mapping | set | frozenset) or not isinstance(data, RandomAccess):
        wrong = "has no items by number"
    else:
        try:
            if len(data):
                data[0]
        except Exception as error:
            wrong = f"has no item 0: {type(error).__name__}: {error}"
    if wrong is not None:
        raise DataError(
            explain(
                f"{name} must be paths, items by number, or an iterator with a state",
                given=f"a {type(data).__name__}, which {wrong}",
                do=_advice(data) or GIVE_RECORDS,
            )
        )
    assert isinstance(data, RandomAccess)
    if not len(data):
        raise DataError(
            explain(
                f"{NAME} is empty", given=f"an empty {type(data).__name__}", do="give some records"
            )
        )
    return data


def check_ends(data: RandomAccess | Iterable[Any], name: str) -> None:
    """Raise DataError if data is an iterator, which may have no end.

    Args:
      name: of the argument.
    """
    if has_state(data):
        raise DataError(
            explain(
                "what is measured has to have an end",
                given=f"{name}, a {type(data).__name__}",
                do="give records by number, such as a list, or paths",
            )
        )


def read_given(
    data: RandomAccess,
    text_field: str,
    *,
    skip_bad_lines: bool,
    skipped_input: SkippedInput,
    records: RecordReader,
) -> Iterator[Any]:
    """Yield what `records` makes of every item, as of the items of a JSON file. Arguments as in
    `read_documents`.

    Raises DataError for a bad item that is not to be skipped, or if none holds text.
    """
    source = _source(text_field, skip_bad_lines, skipped_input, records)
    for number in range(len(data)):
        if document := _document(source, _item(data, number), number + 1):
            yield document


def _item(data: RandomAccess, number: int) -> Any:
    """Item `number`, from 0. Raises DataError if there is none."""
    try:
        return data[number]
    except LookupError as error:
        raise DataError(
            explain(
                f"{NAME} has no item {number}, counted from 0",
                given=f"a {type(data).__name__} of {len(data):,} items:"
                f" {type(error).__name__}: {error}",
                do=_advice(data) or GIVE_RECORDS,
            )
        ) from error


def _advice(data: object) -> str | None:
    """What to give in place of an object of pandas, whose numbers are labels; None: it is none."""
    if not hasattr(data, "reset_index"):
        return None
    if hasattr(data, "tolist"):
        return "give data.tolist(), or data.reset_index(drop=True): its index has gaps"
    return "give its rows: data.to_dict('records')"


def _source(
    text_field: str, skip_bad_lines: bool, skipped_input: SkippedInput, records: RecordReader
) -> SourceFile:
    """The given data as what items are read from. Arguments as in `read_documents`."""
    return SourceFile(
        path=Path(NAME),
        text_field=text_field,
        skip_bad_lines=skip_bad_lines,
        skipped_input=skipped_input,
        records=records,
    )


def _document(source: SourceFile, item: Any, number: int) -> Any:
    """What an item holds; None: nothing, or it is bad and was counted.

    Args:
      number: of the item, from 1.
    """
    try:
        return source.document(without_nulls(item))
    except ValueError as error:
        source.bad("item", number, item, error)
        return None


def tokens_given(data: RandomAccess, text_field: str, tokenizer: Tokenizer) -> TokenStream | None:
    """The token ids of all items, each ended by eos; None: the items are records. An array of ids
    [N] is one item, in which eos may end several documents.

    Raises DataError for an item without token ids, or with ids that are not the tokenizer's.
    """
    if hasattr(data, "__array__") and getattr(data, "ndim", None) == 1:
        data = [np.asarray(data)]
    if _ids_of(data[0], text_field) is None:
        return None
    dtype, end = token_dtype(tokenizer.vocab_size), [tokenizer.eos]
    parts = []
    for number in range(len(data)):
        ids = _ids_of(_item(data, number), text_field)
        if ids is None:
            raise _bad_ids(number, "no token ids, as the first item has", tokenizer)
        wrong = (ids < 0) | (ids >= tokenizer.vocab_size)
        if wrong.any():
            raise _bad_ids(number, f"token {ids[wrong][0]}", tokenizer)
        parts.append(ids.astype(dtype))
        if not len(ids) or ids[-1] != tokenizer.eos:
            parts.append(np.array(end, dtype))
    return TokenStream(
        name=NAME,
        tokens=np.concatenate(parts),
        eos=tokenizer.eos,
        vocab_size=tokenizer.vocab_size,
    )


def document_reader(
    text_field: str,
    tokenizer: Tokenizer,
    *,
    skip_bad_lines: bool,
    skipped_input: SkippedInput,
    records: RecordReader,
) -> Callable[[Any, int], np.ndarray]:
    """What makes tokens of an iterator's items, as `IteratedExamples.tokens_of` has it. Arguments
    as in `read_documents`. It raises DataError for a bad item that is not to be skipped.
    """
    source = _source(text_field, skip_bad_lines, skipped_input, records)
    dtype = token_dtype(tokenizer.vocab_size)
    end, nothing = np.array([tokenizer.eos], dtype), np.array([], dtype)

    def tokens_of(item: Any, number: int) -> np.ndarray:
        ids = _ids_of(item, text_field)
        if ids is None:
            if not (document := _document(source, item, number)):
                return nothing
            if not isinstance(document, str):
                raise DataError(
                    explain(
                        "an iterator gives texts, or token ids",
                        given=f"{NAME}, item {number}: a conversation",
                        do="give conversations by number, or write them to a JSON Lines file",
                    )
                )
            ids = tokenizer.encode(document)
        elif ((ids < 0) | (ids >= tokenizer.vocab_size)).any():
            raise _bad_ids(number - 1, "an id that the tokenizer does not have", tokenizer)
        if not len(ids):
            return nothing
        ids = ids.astype(dtype)
        return ids if ids[-1] == tokenizer.eos else np.concatenate([ids, end])

    return tokens_of


def _bad_ids(number: int, what: str, tokenizer: Tokenizer) -> DataError:
    return DataError(
        explain(
            f"{NAME}, item {number + 1}, is not the token ids of a document",
            given=f"{what}; the tokenizer has {tokenizer.vocab_size} ids, from 0",
            do="name the tokenizer that made them with tokenizer=, and give its ids alone",
        )
    )


def _ids_of(item: Any, text_field: str) -> np.ndarray | None:
    """Token ids [N] of an item; None: it is a record."""
    if isinstance(item, Mapping):
        if text_field in item or INPUT_IDS not in item:
            return None
        _check_all_count(item)
        item = item[INPUT_IDS]
    if isinstance(item, str | bytes) or not (
        isinstance(item, list | tuple) or hasattr(item, "__array__")
    ):
        return None
    try:
        ids = np.asarray(item)
    except ValueError:  # lists of several lengths
        return None
    if not ids.size:
        return np.array([], np.int64)
    return ids if ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer) else None


def _check_all_count(record: Mapping[str, Any]) -> None:
    """Raise DataError if a record with token ids says that some of them do not count."""
    ids = np.asarray(record[INPUT_IDS])
    mask, labels = record.get("attention_mask"), record.get("labels")
    for name, counts in (
        ("attention_mask", True if mask is None else np.asarray(mask).astype(bool)),
        ("labels", True if labels is None else np.asarray(labels) == ids),
    ):
        if not np.all(counts):
            raise DataError(
                explain(
                    f"some of a record's {INPUT_IDS} do not count, and {name} is not read",
                    given=f"a record with {np.size(counts) - np.sum(counts):,} such ids",
                    do="give ids without padding; to learn parts of a text alone, give"
                    " conversations, or prompts with completions",
                )
            )


def given_in_python(sources: tuple[str, ...]) -> bool:
    """Whether these sources stand for data that a program gives."""
    return sources == (IN_PYTHON,)
