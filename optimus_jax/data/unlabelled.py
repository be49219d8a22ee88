"""Records whose labels are to be predicted: read without labels, and put into the examples that
records with labels become (labelled.py, images.py).

A text is a JSON text, or the field that the data's settings name; a list of words may be a text
with blanks between them. A question has SQuAD's fields, without `answers`.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.data import ExampleKind
from optimus_jax.data.given import NAME, RandomAccess, read_given
from optimus_jax.data.images import SUFFIXES, Images, StoredImage, check_reads_images, read_images
from optimus_jax.data.labelled import (
    AnswerReader,
    LabelledRecord,
    LabelledSpan,
    LabelledWords,
    LabelPlace,
    LabelReader,
    QuestionTokens,
    encode_labelled,
    encode_questions,
    frame_for,
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
    counts_each = True

    def _read(self, record: Any) -> LabelledRecord:
        if isinstance(record, str) and self.second_field is None:
            record = {self.text_field: record}
        try:
            return super()._read(self._with_numbers(record))
        except NotLabelledError as error:
            raise NotPredictableError(str(error), error.do) from error

    def _with_numbers(self, record: Any) -> Any:
        """A record with numbers as its labels: those of its words, or 0."""
        if not isinstance(record, dict) or not {*self._fields} <= record.keys():
            return record
        value = record[self.text_field]
        if not self.reads_words:
            return {**record, self.label_field: 0}
        words = value.split() if isinstance(value, str) else value
        numbers = list(range(len(words))) if isinstance(words, list) else None
        return {**record, self.text_field: words, self.label_field: numbers}

    @property
    def _named(self) -> list[tuple[str, str]]:
        return super()._named[:-1]  # without the label


@dataclass(kw_only=True)
class QuestionReader(AnswerReader):
    """Reads questions and texts that may answer them."""

    wanted = "questions"
    counts_each = True

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
    data: tuple[str, ...] | RandomAccess,
    kind: ExampleKind,
    config: DataConfig,
    say: Callable[[str], object],
) -> Iterator[LabelledRecord]:
    """The records of some sources, or those that a program gives, in order.

    Args:
      say: called at the end with what a user should know, such as files that are left out.
    Raises:
      DataError: there are none, or one cannot be read: none is skipped.
    """
    reader, skipped = _reader(kind, config), SkippedInput()
    how: dict[str, Any] = {"skip_bad_lines": False, "skipped_input": skipped, "records": reader}
    if isinstance(data, tuple):
        found, name = read_documents(data, config.text_field, **how), " ".join(data)
    else:
        found, name = read_given(data, config.text_field, **how), NAME
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
    for note in skipped.notes():
        say(note)


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


def unlabelled_images(
    sources: Sequence[str], model: ModelConfig, image_field: str, say: Callable[[str], object]
) -> Iterator["Unlabelled"]:
    """The images of files, folders and tables, in order, RECORDS_AT_ONCE at a time.

    Args:
      say: called with what a user should know, such as files that are left out.
    Raises:
      DataError: as `read_images`.
    """
    check_reads_images(sources, model)
    items: list[StoredImage] = []
    for source in sources:
        path = Path(source)
        if path.suffix.lower() in SUFFIXES and path.is_file():
            items.append(StoredImage(path.name, path, None))
            continue
        images, notes = read_images([source], model, image_field=image_field, label_field=None)
        # Names are relative to the folder that is the source, or has it.
        folder = path if path.is_dir() else path.parent
        items += [image._replace(name=str(folder / image.name)) for image in images.items]
        for note in notes:
            say(note)
    for begin in range(0, len(items), RECORDS_AT_ONCE):
        group = items[begin : begin + RECORDS_AT_ONCE]
        images = Images(name=" ".join(sources), items=group, labels=(), model=model)
        yield Unlabelled(records=group, examples=images)


def place_of(image: UnlabelledRecord) -> str:
    """The path of an image, or that of its table or tar file, and its row or name there."""
    assert isinstance(image, StoredImage)
    return str(image.place) if isinstance(image.place, Path) else image.name


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
    contexts: Sequence[np.ndarray] = ()
    """Of questions, the tokens of their texts: the number of each, its first character and the one
    after its last, int64 [tokens, 3]."""

    @property
    def digest(self) -> str:
        """What differs if the records differ."""
        if isinstance(self.examples, Images):
            return f"{len(self.records)} images, {self.examples.digest}"
        found = hashlib.blake2b(digest_size=8)
        for record in self.records:
            found.update(repr(record).encode(errors="surrogatepass"))
        return f"{len(self.records)} records, {found.hexdigest()}"

    @property
    def needs_all(self) -> bool:
        """Whether an answer is made of all tokens, not only of those with a label."""
        labels = None if isinstance(self.examples, Images) else self.examples.labels
        return labels is not None and labels.needs_all

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
    say: Callable[[str], object],
) -> Iterator[Unlabelled]:
    """Records and the examples that they are put into, RECORDS_AT_ONCE at a time.

    Args:
      place: where the label of a text counts.
      longest: tokens of an example. Longer texts are truncated.
      say: called with what a user should know about texts that were truncated.
    Raises:
      DataError: the model lacks a token.
    """
    records, frame, num_records = iter(records), frame_for(tokenizer, place), 0
    while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
        first, num_records = num_records + 1, num_records + len(group)
        words = [len(one.words) for one in group if isinstance(one, LabelledWords)]
        pieces, _, notes = encode_labelled(
            tokenizer,
            group,
            f"records {first:,} to {num_records:,}",
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
        for note in notes:
            say(note)
        questions = [one for one in group if isinstance(one, LabelledSpan)]
        contexts = [
            _context(tokens) for tokens in encode_questions(tokenizer, questions, frame, longest)
        ]
        yield Unlabelled(records=group, examples=pieces, contexts=contexts)
    for note in tokenizer.notes:
        say(note)


def _context(tokens: QuestionTokens) -> np.ndarray:
    """As `Unlabelled.contexts` has it."""
    numbers = tokens.offset + np.arange(tokens.num_kept)[:, None]
    return np.concatenate([numbers, tokens.spans[: tokens.num_kept]], axis=1)


def answer_text(text: str, start: int, end: int) -> tuple[str, int, int]:
    """A part of a text without blanks around it, where it begins, and where it ends."""
    found = text[start:end]
    if not (stripped := found.strip()):
        return found, start, end
    start += len(found) - len(found.lstrip())
    return stripped, start, start + len(stripped)
