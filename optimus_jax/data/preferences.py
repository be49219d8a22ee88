"""Preference pairs: two answers to the same prompt, of which one was preferred.

A record has `chosen` and `rejected`, and usually `prompt`: all texts, or all lists of messages. A
`prompt` that is a text beside two lists is the first message of the user, which the lists may hold
too. Without `prompt`, the prompt is what both begin with: whole messages, or a text up to a blank.
In each of the two, the answer counts.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from optimus_jax.config.data import RecordChoice
from optimus_jax.data.other_names import other_prompt
from optimus_jax.data.record_names import ASSISTANT, CHOSEN, PROMPT, REJECTED, TOOLS, USER
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.records import (
    Chat,
    NotConversationError,
    NotPairError,
    chat_in,
    has_pair,
    messages_in,
    strings_in,
)
from optimus_jax.data.rendered_chat import RenderedChat

PAIRS_OR_OTHER_TASK = (
    f"leave task=dpo out, or give records with {PROMPT!r}, {CHOSEN!r} and {REJECTED!r}"
)
"""What to do where records hold no pairs."""


class Preference(NamedTuple):
    """Two answers to one prompt."""

    chosen: Chat
    rejected: Chat


def preference_in(record: Any) -> Preference:
    """The pair in a record. Raises NotTextError if it has none, or is malformed."""
    if not isinstance(record, dict) or not has_pair(record):
        names = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
        raise NotConversationError(
            f"it needs {CHOSEN!r} and {REJECTED!r}; there are {names}", PAIRS_OR_OTHER_TASK
        )
    record = _with_prompt_as_message(record)
    if record.get(PROMPT) is None:
        prompt = _common_beginning(record)
        _check_other_prompt(record, prompt)
        begins = len(prompt)
        record = record | {PROMPT: prompt} | {n: record[n][begins:] for n in (CHOSEN, REJECTED)}
    if record[CHOSEN] == record[REJECTED]:
        raise NotConversationError(f"{CHOSEN!r} and {REJECTED!r} are the same")
    return Preference(
        chat_in(record, "completion", completion=CHOSEN),
        chat_in(record, "completion", completion=REJECTED),
    )


def _with_prompt_as_message(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record; if its prompt is a text beside lists of messages, then with the prompt as a
    message, or without it if both lists are whole conversations that have it.
    """
    prompt, answers = record.get(PROMPT), (record[CHOSEN], record[REJECTED])
    if not isinstance(prompt, str) or not all(isinstance(answer, list) for answer in answers):
        return {**record}
    whole = [messages_in(record, name) for name in (CHOSEN, REJECTED)]
    if all(messages[0]["role"] == ASSISTANT for messages in whole):
        return {**record, PROMPT: [{"role": USER, "content": prompt}]}
    for name, messages in zip((CHOSEN, REJECTED), whole, strict=True):
        first = next((one.get("content") for one in messages if one["role"] == USER), None)
        if not isinstance(first, str) or first.strip() != prompt.strip():
            raise NotConversationError(
                f"{name!r} begins with a message of the role {messages[0]['role']!r}, but its first"
                f" message of the user is not the text of {PROMPT!r}",
                f"let {CHOSEN!r} and {REJECTED!r} hold the answer alone, or leave {PROMPT!r} out",
            )
    return {**record, PROMPT: None}


def _check_other_prompt(record: Mapping[str, Any], prompt: Any) -> None:
    """Raise NotConversationError if a field with another tool's name of a prompt holds more than
    the answers begin with. Without it, the answers would be learnt without their prompt.
    """
    name = other_prompt(record)
    text = None if name is None else record[name]
    if isinstance(text, str) and not any(text.strip() in part for part in strings_in(prompt)):
        raise NotConversationError(
            f"no field {PROMPT!r}, and neither {CHOSEN!r} nor {REJECTED!r} begins with the text"
            f" of {name!r}",
            f"rename {name!r} to {PROMPT!r}, or leave the field {name!r} out",
        )


def _common_beginning(record: Mapping[str, Any]) -> Any:
    """What both answers begin with, of the kind that they are."""
    chosen, rejected = record[CHOSEN], record[REJECTED]
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

    wanted = "preference pairs"

    def decide(self, fields: Mapping[str, object]) -> RecordChoice:
        return self.kind

    def _read(self, record: Any) -> tuple[RenderedChat, RenderedChat]:
        try:
            pair = preference_in(record)
            return self.write_out(pair.chosen), self.write_out(pair.rejected)
        except NotConversationError as error:
            raise NotPairError(str(error), error.do) from error

    def columns(self, names: Collection[str]) -> list[str]:
        if not has_pair(names):
            return []
        other = None if PROMPT in names else other_prompt(names)
        return [name for name in (PROMPT, other, CHOSEN, REJECTED, TOOLS) if name in names and name]

    def if_absent(self, names: Collection[str]) -> str:
        return PAIRS_OR_OTHER_TASK
