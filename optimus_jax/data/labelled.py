"""Texts with labels: what a record holds, and the tokens that are made of it.

A record has a text and its label, or two texts and a label for both, such as a question and a
sentence; or a list of words and a list of as many labels; or a question, a text that answers it,
and where. A label is a text or a whole number. The tokens of one or two texts stand in a frame of
special tokens, as the tokenizer says (`TextFrame`). The label of texts counts at the first token if
the model sees all tokens, at the last one if it sees earlier tokens only; the label of a word
counts at its first token. An answer is told by its first and its last token; where there is none,
both are the first token of all. Texts that are too long are truncated inside their frame. A
question whose answers are behind the cut is left out: it would teach that there is none.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from optimus_jax.config.data import TooLong
from optimus_jax.config.model import SPAN_LABELS
from optimus_jax.data.pieces import Labels, Pieces, too_long_note
from optimus_jax.data.record_names import (
    ANSWERS,
    ARTICLES,
    CONTEXT,
    PARAGRAPHS,
    QUESTION,
    QUESTIONS,
)
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import NotLabelledError, check_characters, kind_of_value
from optimus_jax.data.token_ids import TextFrame, token_dtype
from optimus_jax.data.tokenizers import Tokenizer, groups
from optimus_jax.errors import DataError, explain

NO_LABEL = -1
"""The label of tokens that have none."""
LabelPlace = Literal["first", "last"]
"""The token at which the label of a text counts."""


class LabelledText(NamedTuple):
    """A text, or two, and the label."""

    text: str
    second: str | None
    label: str


class LabelledWords(NamedTuple):
    """Words, and the label of each."""

    words: list[str]
    labels: list[str]


class LabelledSpan(NamedTuple):
    """A question, a text, and the part of it that answers the question."""

    question: str
    text: str
    answers: tuple[tuple[int, int], ...]
    """The first character of each, and the one after its last; empty: the text does not answer
    it."""


LabelledRecord = LabelledText | LabelledWords | LabelledSpan
BEGINS, ENDS = 1, 2
"""What the label of a token says of an answer, added up. Other answers to the same question have
the next bits: BEGINS and ENDS times 4 of the second, times 16 of the third."""
MOST_ANSWERS = 8
"""Answers to a question that count; the label of a token is an int32."""
_SHOWN, _MOST_NAMES, _MOST_LABELS = 80, 50, 5
"""Most characters of a field's name in a message, and most names of fields and of labels."""
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""A whole number, as it is usually written."""
MOST_NUMBERS = 10_000
"""Labels that are whole numbers below this are all there; larger ones are names."""


@dataclass(kw_only=True)
class LabelReader(RecordReader):
    """Reads texts with a label each, or lists of words with as many labels."""

    wanted = "texts with labels"

    label_field: str
    second_field: str | None = None
    """Name of the second text, which is empty where it is null; None: there is one text."""
    reads_words: bool = False
    """Whether records are lists of words."""

    def _read(self, record: Any) -> LabelledRecord:
        if not isinstance(record, dict):
            raise NotLabelledError(
                f"it is {kind_of_value(record)}, not an object", self.if_absent(())
            )
        for name in self._fields:
            if name not in record:
                raise NotLabelledError(
                    f"no field {name!r}; there are {', '.join(map(repr, record)) or 'none'}",
                    self.if_absent(record),
                )
        check_characters(record)
        value, label = record[self.text_field], record[self.label_field]
        if not self.reads_words:
            second = None if self.second_field is None else record[self.second_field]
            if self.second_field is not None and second is None:
                second = ""  # so that all texts of the data have one
            for name, text in ((self.text_field, value), (self.second_field, second)):
                if name is not None and not isinstance(text, str):
                    raise NotLabelledError(f"{name!r} is {kind_of_value(text)}, not a text")
            return LabelledText(value, second, self._label(label))
        for name, each in ((self.text_field, value), (self.label_field, label)):
            if not isinstance(each, list) or not each:
                raise NotLabelledError(f"{name!r} is {kind_of_value(each)}, not a list")
        if not all(isinstance(word, str) and word for word in value):
            raise NotLabelledError(f"{self.text_field!r} is not a list of words")
        if len(value) != len(label):
            raise NotLabelledError(f"{len(value)} words have {len(label)} labels")
        return LabelledWords(value, [self._label(each) for each in label])

    def columns(self, names: Collection[str]) -> list[str]:
        return self._fields if {*self._fields} <= {*names} else []

    def if_absent(self, names: Collection[str]) -> str:
        missing = [(setting, field) for setting, field in self._named if field not in names]
        others = [name[:_SHOWN] for name in names if name not in self._fields][:_MOST_NAMES]
        if names and not others:
            return f"give each text its {' and its '.join(repr(field) for _, field in missing)}"
        how = " ".join(f"--set data.{setting}=NAME" for setting, _ in missing)
        each = "each one" if len(missing) > 1 else "one"
        return f"name the fields: {how}" + (f", {each} of {', '.join(others)}" if others else "")

    @property
    def _named(self) -> list[tuple[str, str]]:
        """The settings that name the fields of a record, and what they name."""
        fields = (
            ("text_field", self.text_field),
            ("second_text_field", self.second_field),
            ("label_field", self.label_field),
        )
        return [(setting, field) for setting, field in fields if field is not None]

    @property
    def _fields(self) -> list[str]:
        return [field for _, field in self._named]

    def _label(self, value: object) -> str:
        if isinstance(value, float) and value.is_integer():  # of a column with missing ones
            value = int(value)
        if isinstance(value, int) and value < 0:
            if self.reads_words:
                return ""
            raise NotLabelledError(
                f"the label in {self.label_field!r} is {value}; negative numbers stand for none",
                "leave out what has no label, or write the numbers as texts",
            )
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise NotLabelledError(
                f"a label in {self.label_field!r} is {kind_of_value(value)}, not a text or a whole"
                " number"
            )
        return str(value)


@dataclass(kw_only=True)
class AnswerReader(RecordReader):
    """Reads questions and the texts that answer them, as SQuAD has them (arXiv:1606.05250): fields
    `question`, `context`, and `answers` with lists `text` and `answer_start`, which may be empty,
    or a list of objects with these two. A JSON file may be SQuAD's own: `data`, of articles with
    `paragraphs`, of which each has a `context` and its questions, `qas`.
    """

    wanted = "questions with answers"

    def _read(self, record: Any) -> LabelledSpan:
        fields = (QUESTION, CONTEXT, ANSWERS)
        missing = [name for name in fields if not isinstance(record, dict) or name not in record]
        if missing:
            raise NotLabelledError(f"no field {missing[0]!r}", self.if_absent(()))
        check_characters(record)
        question, text, answers = (record[name] for name in fields)
        if not isinstance(question, str) or not isinstance(text, str):
            raise NotLabelledError(f"{QUESTION!r} or {CONTEXT!r} is not a text")
        spans = [_span_in(text, answer, start) for answer, start in _answers_in(answers)]
        return LabelledSpan(question, text, tuple(dict.fromkeys(spans)))

    def records_in(self, value: Any) -> Iterable[Any]:
        articles = value.get(ARTICLES) if isinstance(value, dict) else None
        return _questions_in(articles) if isinstance(articles, list) else super().records_in(value)

    def columns(self, names: Collection[str]) -> list[str]:
        fields = [QUESTION, CONTEXT, ANSWERS]
        return fields if {*fields} <= {*names} else []

    def if_absent(self, names: Collection[str]) -> str:
        return f"give records with {QUESTION!r}, {CONTEXT!r} and {ANSWERS!r}, as SQuAD has them"


def _answers_in(answers: Any) -> list[tuple[Any, Any]]:
    """Answers, with the characters at which they are to begin. Raises NotLabelledError."""
    if answers is None:
        return []
    if isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
        return [(each.get("text"), each.get("answer_start")) for each in answers]
    found, starts = (
        (answers.get("text"), answers.get("answer_start"))
        if isinstance(answers, dict)
        else (None, None)
    )
    if not isinstance(found, list) or not isinstance(starts, list) or len(found) != len(starts):
        raise NotLabelledError(
            f"{ANSWERS!r} is {kind_of_value(answers)}, not lists `text` and `answer_start`"
        )
    return list(zip(found, starts, strict=True))


def _span_in(text: str, answer: Any, start: Any) -> tuple[int, int]:
    """Where an answer is in its text. Raises NotLabelledError if it is not at `start`."""
    is_there = (
        isinstance(answer, str)
        and type(start) is int
        and start >= 0
        and bool(answer)
        and text[start : start + len(answer)] == answer
    )
    if not is_there:
        raise NotLabelledError(f"the answer {answer!r:.80} is not at character {start!r:.20}")
    return start, start + len(answer)


def _questions_in(articles: list[Any]) -> Iterator[Any]:
    """Records with the fields of `AnswerReader`, of SQuAD's articles. What has no parts is a record
    itself, which may be malformed.
    """
    for article in articles:
        for paragraph in _parts_of(article, PARAGRAPHS):
            for question in _parts_of(paragraph, QUESTIONS):
                if question is not paragraph and isinstance(question, dict):
                    question = {CONTEXT: paragraph.get(CONTEXT)} | question
                yield question


def _parts_of(value: Any, name: str) -> list[Any]:
    """The list in this field of a value; the value alone if it has none."""
    parts = value.get(name) if isinstance(value, dict) else None
    return parts if isinstance(parts, list) else [value]


def names_of_labels(found: Iterable[str]) -> tuple[str, ...]:
    """Names of labels in order: whole numbers by value, all numbers from 0 on included if none is
    negative; texts, also such as 007, by their letters.
    """
    names = {*found}
    if all(map(_WHOLE.fullmatch, names)) and any(name[0] == "-" for name in names):
        return tuple(sorted(names, key=int))
    digits = len(str(MOST_NUMBERS))
    are_numbers = all(
        name.isascii() and name.isdigit() and len(name) <= digits and name == str(int(name))
        for name in names
    )
    if are_numbers and max(map(int, names)) < MOST_NUMBERS:
        return tuple(map(str, range(max(map(int, names)) + 1)))
    return tuple(sorted(names))


def frame_for(tokenizer: Tokenizer, place: LabelPlace) -> TextFrame:
    """The special tokens around texts whose label counts at `place`."""
    return tokenizer.frame.led_by(tokenizer.eos) if place == "first" else tokenizer.frame


class QuestionTokens(NamedTuple):
    """The tokens of a question and of the text that may answer it."""

    both: list[np.ndarray]
    """Token ids of the question, and of the text."""
    offset: int
    """Tokens before those of the text, in their frame."""
    spans: np.ndarray
    """The characters that each token of the text stands for, int64 [N, 2]."""
    num_kept: int
    """Tokens of the text that fit."""


def encode_questions(
    tokenizer: Tokenizer, questions: Sequence[LabelledSpan], frame: TextFrame, most: int
) -> Iterator[QuestionTokens]:
    """The tokens of questions and their texts, cut to `most` tokens in their frame."""
    asked = tokenizer.encode_batch([one.question for one in questions])
    encoded = tokenizer.encode_with_spans([one.text for one in questions])
    for question_ids, (text_ids, spans) in zip(asked, encoded, strict=True):
        both = [question_ids, text_ids]
        num_asked, num_kept = frame.fitting(both, most)
        offset = len(frame.first) + num_asked + len(frame.middle)
        yield QuestionTokens(both, offset, spans, num_kept)


def encode_labelled(
    tokenizer: Tokenizer,
    documents: Iterable[LabelledRecord],
    name: str,
    *,
    place: LabelPlace,
    labels: tuple[str, ...],
    longest: int,
    too_long: TooLong,
) -> tuple[Pieces, tuple[str, ...], list[str]]:
    """All texts as tokens with their labels, the names of these, and what a user should know about
    texts that were truncated and answers that were lost by it.

    Shows progress while stderr is a terminal.

    Args:
      name: where they come from, for messages.
      labels: names of the labels, in order; empty: those of the texts.
      longest: most tokens of an example. Longer texts are truncated inside their frame, if
        `too_long` says so.
    Raises:
      DataError: a text has another label, or all have the same; or no answer remains.
    """
    most = longest if too_long == "truncate" else 1 << 62
    frame = frame_for(tokenizer, place)
    found: list[_Tokens] = []
    finds_answers = finds_words = False
    for group in groups(documents, _num_characters):
        words = [one for one in group if isinstance(one, LabelledWords)]
        texts = [one for one in group if isinstance(one, LabelledText)]
        spans = [one for one in group if isinstance(one, LabelledSpan)]
        finds_answers |= bool(spans)
        finds_words |= bool(words)
        found += _of_words(tokenizer, words, frame, most)
        found += _of_texts(tokenizer, texts, frame, place, most)
        found += _of_spans(tokenizer, spans, frame, most)
    if finds_answers:
        whole, found = found, [tokens for tokens in found if any(tokens.labels)]
        notes = _notes_on_cut(found, name, "question", longest)
        if num_lost := len(whole) - len(found):
            remain = f"that remain at seq_len={longest:,}" if most == longest else "of their text"
            why = f"no answer of theirs is among the tokens {remain}"
            if not found:
                what = f"all questions of {name} are left out"
                raise DataError(explain(what, given=why, do="use a larger --seq-len"))
            notes.append(f"{num_lost:,} question(s) of {name} are left out: {why}")
        labels = SPAN_LABELS
        number = {label: int(label) for tokens in found for label in tokens.labels if label}
    else:
        notes = _notes_on_cut(found, name, "text", longest)
        labels = _labels_of(found, labels, name)
        number = {label: index for index, label in enumerate(labels)}
    number[""] = NO_LABEL
    targets = np.array([number[label] for tokens in found for label in tokens.labels], np.int32)
    is_last = place == "last" and not finds_answers and not finds_words
    pieces = Pieces(
        name=name,
        tokens=np.concatenate(
            [tokens.ids for tokens in found], dtype=token_dtype(tokenizer.vocab_size)
        ),
        # Of several answers, the first one is learnt.
        counts=(targets & (BEGINS | ENDS) > 0) & (targets > 0)
        if finds_answers
        else targets != NO_LABEL,
        starts=np.concatenate([[0], np.cumsum([len(tokens.ids) for tokens in found])]),
        labels=Labels(
            targets=targets,
            types=np.concatenate([tokens.types for tokens in found]),
            frame=frame,
            num_parts=found[0].num_parts,
            first_sizes=np.array([tokens.first_size for tokens in found]),
            at_last=is_last,
            needs_all=finds_answers,
        ),
        vocab_size=tokenizer.vocab_size,
        too_long=too_long,
        noun="question" if finds_answers else "text",
    )
    return pieces, labels, notes


def _notes_on_cut(found: Sequence["_Tokens"], name: str, unit: str, longest: int) -> list[str]:
    """What a user should know about texts that have been truncated."""
    num_cut = sum(tokens.is_cut for tokens in found)
    done = f"{num_cut:,} truncated"
    return [too_long_note(num_cut, unit, name, longest, "truncate", done)] if num_cut else []


def _labels_of(found: Sequence["_Tokens"], labels: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The names of labels: those that are given, or those that are found. Raises DataError as
    `encode_labelled`.
    """
    used = {label for tokens in found for label in tokens.labels if label}
    if len(labels or used) < 2:
        raise DataError(
            explain(
                f"all of {name} has the same label, so there is nothing to learn",
                given=f"label {', '.join(labels or used)}",
                do="give texts with different labels",
            )
        )
    labels = labels or names_of_labels(used)
    check_known(f"{name} has", used, labels)
    return labels


def check_known(what: str, used: Collection[str], labels: Sequence[str]) -> None:
    """Raise DataError if data uses labels that are not among those of the model.

    Args:
      what: the data and a verb, such as `images have`.
    """
    if other := sorted({*used} - {*labels}):
        more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
        raise DataError(
            explain(
                f"{what} labels that the model does not know",
                given=f"{', '.join(other[:_MOST_LABELS])}; it knows"
                f" {', '.join(labels[:_MOST_LABELS])}{more}",
                do="give data with its labels alone; or train a new head, with all labels by name"
                " (--set model.labels=FIRST,SECOND), or those of the training data (--set"
                " model.labels=)",
            )
        )


class _Tokens(NamedTuple):
    """A text, or two, in their frame."""

    ids: np.ndarray
    types: np.ndarray
    labels: list[str]
    """Label of every token; an empty text where there is none."""
    num_parts: int
    """Texts: 1, or 2."""
    first_size: int
    """Number of tokens of the first one."""
    is_cut: bool
    """Whether some of their tokens were left out."""

    @classmethod
    def of(
        cls, frame: TextFrame, texts: Sequence[np.ndarray], most: int, labels: dict[int, str]
    ) -> "_Tokens":
        """Texts as `TextFrame.around` has them.

        Args:
          labels: those of tokens, by their places; of the last one, by -1.
        """
        ids, types = frame.around(texts, most)
        sizes = frame.fitting(texts, most)
        all_labels = [""] * len(ids)
        for place, label in labels.items():
            all_labels[place] = label
        is_cut = sum(sizes) < sum(map(len, texts))
        return cls(ids, types, all_labels, len(texts), sizes[0], is_cut)


def _of_texts(
    tokenizer: Tokenizer,
    texts: Sequence[LabelledText],
    frame: TextFrame,
    place: LabelPlace,
    most: int,
) -> Iterator[_Tokens]:
    parts = [part for one in texts for part in (one.text, one.second) if part is not None]
    encoded = iter(tokenizer.encode_batch(parts))
    for one in texts:
        both = [next(encoded) for _ in range(1 if one.second is None else 2)]
        yield _Tokens.of(frame, both, most, {0 if place == "first" else -1: one.label})


def _of_words(
    tokenizer: Tokenizer, lists: Sequence[LabelledWords], frame: TextFrame, most: int
) -> Iterator[_Tokens]:
    encoded = tokenizer.encode_with_spans([" ".join(one.words) for one in lists])
    for one, (word_ids, spans) in zip(lists, encoded, strict=True):
        begins = np.cumsum([0, *(len(word) + 1 for word in one.words[:-1])])
        # The first token that goes on after the beginning of the word; before it may be a blank.
        tokens = np.searchsorted(spans[:, 1], begins, side="right")
        labels: dict[int, str] = {}
        first, (end,) = len(frame.before), frame.fitting([word_ids], most)
        for token, begin, word, label in zip(
            tokens.tolist(), begins.tolist(), one.words, one.labels, strict=True
        ):
            # A word may have no token of its own, such as one of characters that are left out.
            is_own = token < len(spans) and spans[token, 0] < begin + len(word)
            if is_own and token < end and token + first not in labels:
                labels[token + first] = label
        yield _Tokens.of(frame, [word_ids], most, labels)


def _of_spans(
    tokenizer: Tokenizer, questions: Sequence[LabelledSpan], frame: TextFrame, most: int
) -> Iterator[_Tokens]:
    encoded = encode_questions(tokenizer, questions, frame, most)
    for one, (both, offset, spans, num_kept) in zip(questions, encoded, strict=True):
        places = [] if one.answers else [(0, 0)]
        for begin, end in one.answers:
            found = np.flatnonzero((spans[:, 1] > begin) & (spans[:, 0] < end))
            if len(found) and found[-1] < num_kept:
                places.append((int(found[0]) + offset, int(found[-1]) + offset))
        bits: dict[int, int] = {}
        for number, (first, last) in enumerate([*dict.fromkeys(places)][:MOST_ANSWERS]):
            bits[first] = bits.get(first, 0) | BEGINS << 2 * number
            bits[last] = bits.get(last, 0) | ENDS << 2 * number
        yield _Tokens.of(frame, both, most, {place: str(each) for place, each in bits.items()})


def _num_characters(document: LabelledRecord) -> int:
    if isinstance(document, LabelledWords):
        return sum(map(len, document.words))
    if isinstance(document, LabelledSpan):
        return len(document.question) + len(document.text)
    return len(document.text) + len(document.second or "")
