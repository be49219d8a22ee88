"""Records whose labels are to be predicted: read without labels, and put into the examples that
records with labels become (labelled.py, images.py).

A text is a JSON text, or the field that the data's settings name; a list of words may be a text
with blanks between them. A question has SQuAD's fields, without `answers`.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.data import ExampleKind
from optimus_jax.data.given import NAME, RandomAccess, read_given
from optimus_jax.data.images import SUFFIXES, Images, StoredImage, read_images
from optimus_jax.data.labelled import (
    AnswerReader,
    LabelledRecord,
    LabelledSpan,
    LabelledWords,
    LabelPlace,
    LabelReader,
    encode_labelled,
)
from optimus_jax.data.pieces import Pieces
from optimus_jax.data.record_names import ANSWERS, CONTEXT, QUESTION
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import NotLabelledError
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.sources import read_documents
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.data.tokens import TokenStream, check_vocab
from optimus_jax.errors import DataError, explain

UnlabelledRecord = LabelledRecord | StoredImage
"""A record; what it says of its label has no meaning."""
RECORDS_AT_ONCE = 4096
"""Records that are put into examples together."""


class NotPredictableError(NotLabelledError):
    """Raised when a record does not hold what labels are predicted of."""

    wanted = "record that the model reads"


@dataclass(kw_only=True)
class TextReader(LabelReader):
    """Reads texts, or lists of words."""

    wanted = "texts"

    def _read(self, record: Any) -> LabelledRecord:
        if isinstance(record, str) and self.second_field is None:
            record = {self.text_field: record}
        try:
            return super()._read(self._with_numbers(record))
        except NotLabelledError as error:
            raise NotPredictableError(str(error), error.do) from error

    def _with_numbers(self, record: Any) -> Any:
        """A record with numbers as its labels: those of its words, or 0."""
        if not isinstance(record, dict) or self.text_field not in record:
            return record
        value = record[self.text_field]
        if not self.reads_words:
            return {**record, self.label_field: 0}
        words = value.split() if isinstance(value, str) else value
        numbers = list(range(len(words))) if isinstance(words, list) else None
        return {**record, self.text_field: words, self.label_field: numbers}

    def if_absent(self, names: Collection[str]) -> str:
        return f"name the field: --set data.text_field={self.text_field}"

    @property
    def _fields(self) -> list[str]:
        return [self.text_field, *([] if self.second_field is None else [self.second_field])]


@dataclass(kw_only=True)
class QuestionReader(AnswerReader):
    """Reads questions and texts that may answer them."""

    wanted = "questions"

    def _read(self, record: Any) -> LabelledSpan:
        without = {**record, ANSWERS: None} if isinstance(record, dict) else record
        try:
            return super()._read(without)
        except NotLabelledError as error:
            raise NotPredictableError(str(error), error.do) from error

    def columns(self, names: Collection[str]) -> list[str]:
        fields = [QUESTION, CONTEXT]
        return fields if {*fields} <= {*names} else []

    def if_absent(self, names: Collection[str]) -> str:
        return f"give records with {QUESTION!r} and {CONTEXT!r}"


def unlabelled_records(
    data: tuple[str, ...] | RandomAccess, kind: ExampleKind, config: DataConfig
) -> Iterator[LabelledRecord]:
    """The records of some sources, or those that a program gives, in order.

    Raises:
      DataError: there are none, or one cannot be read: none is skipped.
    """
    reader = _reader(kind, config)
    if isinstance(data, tuple):
        found, name = read_documents(data, config.text_field, records=reader), " ".join(data)
    else:
        how: dict[str, Any] = {"skip_bad_lines": False, "skipped_input": SkippedInput()}
        found, name = read_given(data, config.text_field, **how, records=reader), NAME
    is_empty = True
    for record in found:
        is_empty = False
        try:
            # The whole of a text file is a text.
            yield reader.document(record) if isinstance(record, str) else record
        except NotPredictableError as error:
            do = error.do or reader.if_absent(())
            raise DataError(
                explain(f"{name} holds no {reader.wanted}", given=error, do=do)
            ) from error
    if is_empty:
        raise DataError(explain("the data holds no record", given=name, do="give some"))


def _reader(kind: ExampleKind, config: DataConfig) -> RecordReader:
    shared: dict[str, Any] = {
        "text_field": config.text_field,
        "write_out": str,  # never: no record is a conversation
        "kind": "completion",
    }
    if kind == "answers":
        return QuestionReader(**shared)
    words = kind == "word_labels"
    return TextReader(
        label_field=config.label_field or ("labels" if words else "label"),
        second_field=config.second_text_field,
        reads_words=words,
        **shared,
    )


def unlabelled_images(sources: Sequence[str], model: ModelConfig, image_field: str) -> Images:
    """The images of files, folders and tables, in order. Raises DataError as `read_images`."""
    found = [
        Images(
            name=source,
            items=[StoredImage(Path(source).name, Path(source), None)],
            labels=(),
            model=model,
        )
        if Path(source).suffix.lower() in SUFFIXES and Path(source).is_file()
        else read_images([source], model, image_field=image_field, label_field=None)[0]
        for source in sources
    ]
    items = [image for images in found for image in images.items]
    return Images(name=" ".join(sources), items=items, labels=(), model=model)


def place_of(image: UnlabelledRecord) -> str:
    """The path of an image, or its place in a table or tar file."""
    assert isinstance(image, StoredImage)
    return image.name if isinstance(image.place, bytes) else str(image.place)


class Part(NamedTuple):
    """A record's part of an example."""

    record: int
    """Number of the record."""
    tokens: slice
    """Its tokens in the example."""
    numbers: np.ndarray
    """What has its label at each of them: the number of a word, or 0; -1: nothing; int32 [L]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unlabelled:
    """Some records, and the examples that they are put into."""

    records: Sequence[UnlabelledRecord]
    examples: Pieces | Images

    def parts(self, example: int, seq_len: int) -> Iterator[Part]:
        """What an example of `seq_len` tokens holds."""
        if isinstance(self.examples, Images):
            yield Part(example, slice(0, 1), np.zeros(1, np.int32))
            return
        used, packing = self.examples.packing(seq_len)
        sizes, begin = self.examples.sizes_in(seq_len), 0
        assert self.examples.labels is not None
        for record in used[packing[example]].tolist():
            start, size = int(self.examples.starts[record]), int(sizes[record])
            numbers = self.examples.labels.targets[start : start + size]
            yield Part(record, slice(begin, begin + size), numbers)
            begin += size


def in_groups(
    records: Iterable[LabelledRecord],
    tokenizer: Tokenizer,
    model: ModelConfig,
    *,
    place: LabelPlace,
    longest: int,
) -> Iterator[Unlabelled]:
    """Records and the examples that they are put into, RECORDS_AT_ONCE at a time.

    Args:
      place: where the label of a text counts.
      longest: tokens of an example. Longer texts are truncated.
    Raises:
      DataError: the model lacks a token.
    """
    records = iter(records)
    while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
        words = [len(one.words) for one in group if isinstance(one, LabelledWords)]
        pieces, *_ = encode_labelled(
            tokenizer,
            group,
            "the data",
            place=place,
            labels=tuple(map(str, range(max([2, *words])))),
            longest=longest,
            too_long="truncate",
        )
        stream = TokenStream(
            name=pieces.name,
            tokens=pieces.tokens,
            eos=tokenizer.eos,
            vocab_size=tokenizer.vocab_size,
        )
        check_vocab(stream, model.vocab_size, model.name)
        yield Unlabelled(records=group, examples=pieces)


def context_of(
    record: UnlabelledRecord, tokenizer: Tokenizer, *, place: LabelPlace, longest: int
) -> np.ndarray | None:
    """The tokens of a question's text: the number of each, its first character and the one after
    its last, int64 [tokens, 3]; None: the record is no question.

    Args:
      place, longest: as of `in_groups`.
    """
    if not isinstance(record, LabelledSpan):
        return None
    frame = tokenizer.frame.led_by(tokenizer.eos) if place == "first" else tokenizer.frame
    (asked,) = tokenizer.encode_batch([record.question])
    ((ids, spans),) = tokenizer.encode_with_spans([record.text])
    num_asked, num_kept = frame.fitting([asked, ids], longest)
    first = len(frame.first) + num_asked + len(frame.middle)
    return np.concatenate([first + np.arange(num_kept)[:, None], spans[:num_kept]], axis=1)


def answer_text(text: str, start: int, end: int) -> tuple[str, int, int]:
    """A part of a text without blanks around it, where it begins, and where it ends."""
    found = text[start:end]
    if not (stripped := found.strip()):
        return found, start, end
    start += len(found) - len(found.lstrip())
    return stripped, start, start + len(stripped)
