"""What an answer is of logits."""

import numpy as np
import pytest

from optimus_jax.data.labelled import LabelledSpan, LabelledText, LabelledWords
from optimus_jax.training.answers import (
    AnswerInputs,
    label_answer,
    probabilities,
    span_answer,
    words_answer,
)

TEXT = "It is in Bern, near Thun."
CONTEXT = np.array([[3, 0, 2], [4, 2, 5], [5, 5, 8], [6, 8, 13], [7, 13, 14], [8, 14, 24]])
"""Words with the blank before them, after three tokens of a question."""


def span(begin, end, *, most=30):
    """The answer where the tokens `begin` and `end` have the largest logits, and all others 0."""
    logits = np.zeros((10, 2), np.float32)
    for column, of_tokens in enumerate((begin, end)):
        for token, value in of_tokens.items():
            logits[token, column] = value
    record = LabelledSpan("where", TEXT, None)
    inputs = AnswerInputs(
        record=record,
        logits_LN=logits,
        numbers_L=np.full(10, -1),
        labels=(),
        context=CONTEXT,
        max_answer_tokens=most,
    )
    return logits, span_answer(inputs)


def test_an_answer_is_a_part_of_the_text_without_blanks_around_it():
    logits, found = span({6: 5.0}, {6: 4.0})
    assert TEXT[found["start"] : found["end"]] == found["answer"] == "Bern"
    chances = [probabilities(logits[:, column])[6] for column in (0, 1)]
    assert found["score"] == pytest.approx(chances[0] * chances[1])
    assert span({5: 5.0}, {8: 4.0})[1]["answer"] == "in Bern, near Thun"


def test_an_answer_does_not_end_before_it_begins_or_outside_of_the_text():
    _, found = span({6: 5.0, 9: 9.0, 1: 9.0}, {5: 6.0, 6: 5.0, 9: 9.0, 2: 9.0})
    assert found["answer"] == "Bern"


def test_an_answer_has_at_most_so_many_tokens():
    begin, end = {4: 5.5}, {6: 3.0, 8: 5.0}
    assert span(begin, end)[1]["answer"] == "is in Bern, near Thun"
    assert span(begin, end, most=3)[1]["answer"] == "is in Bern"
    assert span(begin, end, most=1)[1]["answer"] == "is"


def test_there_is_no_answer_where_that_is_likelier():
    logits, found = span({0: 4.0, 6: 3.0}, {0: 3.0, 6: 3.0})
    assert (found["answer"], found["start"], found["end"]) == (None, None, None)
    chances = [probabilities(logits[:, column])[0] for column in (0, 1)]
    assert found["score"] == pytest.approx(chances[0] * chances[1])
    assert span({0: 4.0, 6: 4.5}, {0: 3.0, 6: 3.0})[1]["answer"] == "Bern"


def test_labels_are_ranked():
    inputs = AnswerInputs(
        record=LabelledText("a", None, "0"),
        logits_LN=np.array([[0, 0, 9], [1, 3, 2]], np.float32),
        numbers_L=np.array([-1, 0]),
        labels=("x", "y", "z"),
        top=2,
    )
    found = label_answer(inputs)
    assert found["label"] == "y"
    assert list(found["scores"]) == ["y", "z"]
    powers = np.exp([1, 3, 2])
    assert list(found["scores"].values()) == pytest.approx(list(powers[[1, 2]] / powers.sum()))
    assert found["score"] == found["scores"]["y"]


def test_a_word_without_a_token_has_no_label():
    inputs = AnswerInputs(
        record=LabelledWords(["a", "b", "c"], ["0", "1", "2"]),
        logits_LN=np.array([[0, 9], [3, 0], [0, 0]], np.float32),
        numbers_L=np.array([-1, 2, 0]),
        labels=("x", "y"),
    )
    assert words_answer(inputs)["labels"] == ["x", None, "x"]
    assert words_answer(inputs)["scores"][1] is None
