"""How the logits of a model with labels become an answer: what `Task.answer` is of each task.

Probabilities are those of the task's loss (training/label_loss.py).

Shapes: L tokens of a record, N labels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from optimus_jax.data.labelled import NO_LABEL, LabelledSpan, LabelledWords
from optimus_jax.data.unlabelled import UnlabelledRecord, answer_text, place_of

Answer = dict[str, Any]
"""A JSON object."""
TOP = 5
"""Default number of labels that are ranked."""
MAX_ANSWER_TOKENS = 30
"""Default of the longest answer to a question."""


@dataclass(frozen=True, kw_only=True)
class AnswerInputs:
    """What an answer is made of."""

    record: UnlabelledRecord
    logits_LN: np.ndarray
    """Of the record's tokens that have a label, float32; of a question, of all its tokens."""
    numbers_L: np.ndarray
    """What has its label at each of these: the number of a word, or 0; NO_LABEL: nothing."""
    labels: tuple[str, ...]
    """Their names, in the order of the logits."""
    context: np.ndarray | None = None
    """The tokens in which an answer may be: number, first character and the one after the last,
    int64 [tokens, 3]; None: the record is no question."""
    top: int = TOP
    """Number of labels that are ranked."""
    max_answer_tokens: int = MAX_ANSWER_TOKENS
    """Most tokens of the answer to a question."""


def label_answer(inputs: AnswerInputs) -> Answer:
    """The likeliest label, its probability, and those of the `top` likeliest, in order."""
    (place,) = np.flatnonzero(inputs.numbers_L != NO_LABEL)
    chances_N = probabilities(inputs.logits_LN[place])
    order = np.argsort(-chances_N, kind="stable")
    ranked = {inputs.labels[n]: float(chances_N[n]) for n in order[: inputs.top].tolist()}
    label = inputs.labels[order[0]]
    return {"label": label, "score": float(chances_N[order[0]]), "scores": ranked}


def image_answer(inputs: AnswerInputs) -> Answer:
    """`label_answer`, after the name of the file."""
    return {"file": place_of(inputs.record), **label_answer(inputs)}


def words_answer(inputs: AnswerInputs) -> Answer:
    """The likeliest label of each word, and its probability; None for a word that has no token, or
    none that fits into the model."""
    assert isinstance(inputs.record, LabelledWords)
    words = inputs.record.words
    labels: list[str | None] = [None] * len(words)
    scores: list[float | None] = [None] * len(words)
    for place in np.flatnonzero(inputs.numbers_L != NO_LABEL).tolist():
        word, chances_N = int(inputs.numbers_L[place]), probabilities(inputs.logits_LN[place])
        labels[word] = inputs.labels[int(chances_N.argmax())]
        scores[word] = float(chances_N.max())
    return {"words": words, "labels": labels, "scores": scores}


def span_answer(inputs: AnswerInputs) -> Answer:
    """The likeliest part of the text, of at most `max_answer_tokens`, the characters where it
    begins and ends, and its probability; None for these if it is likelier that there is none.
    """
    assert isinstance(inputs.record, LabelledSpan)
    assert inputs.context is not None, "a record with a question has a context"
    begins_L, ends_L = (probabilities(inputs.logits_LN[:, of]) for of in (0, 1))
    tokens, most = inputs.context[:, 0], inputs.max_answer_tokens
    best, place = float(begins_L[0] * ends_L[0]), None
    for first in range(len(tokens)):
        chances = begins_L[tokens[first]] * ends_L[tokens[first : first + most]]
        if (chance := float(chances.max())) > best:
            best, place = chance, (first, first + int(chances.argmax()))
    if place is None:
        return {"answer": None, "start": None, "end": None, "score": best}
    start, end = int(inputs.context[place[0], 1]), int(inputs.context[place[1], 2])
    answer, start, end = answer_text(inputs.record.text, start, end)
    return {"answer": answer, "start": start, "end": end, "score": best}


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of logits along the only dimension."""
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()
