"""Preference pairs: two answers to the same prompt, of which one was preferred.

A record has `chosen` and `rejected`, and usually `prompt`: all texts, or all lists of messages.
Without `prompt`, the prompt is what both begin with: whole messages, or a text up to a blank. In
each of the two, the answer counts.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from optimus_jax.config.data import RecordChoice
from optimus_jax.data.records import (
    COMPLETION,
    PROMPT,
    TOOLS,
    Chat,
    NotConversationError,
    RecordReader,
    chat_in,
    messages_in,
)
from optimus_jax.data.rendered_chat import RenderedChat

CHOSEN, REJECTED = "chosen", "rejected"


class Preference(NamedTuple):
    """Two answers to one prompt."""

    chosen: Chat
    rejected: Chat


def preference_in(record: Any) -> Preference:
    """The pair in a record. Raises NotTextError if it has none, or is malformed."""
    if not isinstance(record, dict) or CHOSEN not in record or REJECTED not in record:
        names = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
        raise NotConversationError(f"it needs {CHOSEN!r} and {REJECTED!r}; there are {names}")
    answers = [record[CHOSEN], record[REJECTED]]
    prompt = record.get(PROMPT)
    if prompt is None:
        prompt = _common_beginning(record, *answers)
        answers = [answer[len(prompt) :] for answer in answers]
    if answers[0] == answers[1]:
        raise NotConversationError(f"{CHOSEN!r} and {REJECTED!r} are the same")
    chosen, rejected = (
        chat_in({PROMPT: prompt, COMPLETION: answer, TOOLS: record.get(TOOLS)}, "completion")
        for answer in answers
    )
    return Preference(chosen, rejected)


def _common_beginning(record: Mapping[str, Any], chosen: Any, rejected: Any) -> Any:
    """What both answers begin with, of the kind that they are."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        size = _num_equal(chosen, rejected)
        while size and not chosen[size - 1].isspace():  # back to the beginning of the word
            size -= 1
        return chosen[:size].rstrip()
    messages = messages_in(record, CHOSEN)
    return messages[: _num_equal(messages, messages_in(record, REJECTED))]


def _num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of leading items that are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class PreferenceReader(RecordReader):
    """Reads pairs, each as two rendered conversations: the chosen one and the rejected one."""

    def decide(self, fields: Mapping[str, object]) -> RecordChoice:
        return self.kind

    def document(self, record: Any) -> tuple[RenderedChat, RenderedChat]:
        pair = preference_in(record)
        return self.write_out(pair.chosen), self.write_out(pair.rejected)

    def columns(self, names: Collection[str]) -> list[str]:
        if not {CHOSEN, REJECTED} <= {*names}:
            return []
        return [name for name in (PROMPT, CHOSEN, REJECTED, TOOLS) if name in names]
