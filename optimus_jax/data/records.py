"""What a record holds: a text, a conversation, or a prompt with its completion.

A *record* is a JSON value or a row of a table. Which of them it is, record_reader.py decides.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_jax.config.data import RecordChoice
from optimus_jax.data.other_names import advice_to_rename, usual_message
from optimus_jax.data.record_names import (
    CHOSEN,
    COMPLETION,
    CONVERSATIONS,
    MESSAGES,
    PROMPT,
    REJECTED,
    ROLE,
    TOOLS,
)

USE_TRAINING = (
    "a conversation becomes tokens when training starts, by the tokenizer's chat template: give"
    " the file to --data"
)
LEARN_PREFERENCES = "learn from preference pairs with --set task=dpo"
Message = dict[str, Any]
"""A message: `role`, and usually `content`; other fields are for the template."""


class NotTextError(ValueError):
    """Raised when a record does not hold text where it should.

    Args:
      do: what to do about all such records; None: nothing is known.
    """

    def __init__(self, text: str, do: str | None = None) -> None:
        super().__init__(text)
        self.do = do


class NotConversationError(NotTextError):
    """Raised when a record does not hold a conversation that can be written out."""

    wanted = "conversation that can be written out"


class NotPairError(NotConversationError):
    """Raised when a record does not hold a preference pair that can be written out."""

    wanted = "preference pair that can be written out"


class NotLabelledError(NotConversationError):
    """Raised when a record does not hold a text with a label, or words with labels."""

    wanted = "text with its label"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and what a template may know besides."""

    messages: list[Message]
    """At least one."""
    tools: list[Any] | None = None
    """Descriptions of the tools that the assistant may call."""
    num_prompt: int | None = None
    """Of a prompt with its completion: number of leading messages that are the prompt."""


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """A prompt and its completion, as texts."""

    prompt: str
    completion: str


Chat = Conversation | PromptCompletion
"""What is written out by a template, or at least has a part that counts in the loss."""


def names_of_messages(text_field: str) -> tuple[str, ...]:
    """Names of a list of messages; the first that a record has counts."""
    return MESSAGES, text_field, CONVERSATIONS


def chat_in(
    record: Any, kind: RecordChoice, text_field: str = "text", *, completion: str = COMPLETION
) -> Chat:
    """The conversation, or prompt with its completion, in a record.

    Args:
      kind: `messages` or `completion`.
      text_field: another name of the list of messages.
      completion: name of the field with the completion.
    Raises:
      NotTextError: it has none, or it is malformed.
    """
    if not isinstance(record, dict):
        raise NotConversationError(f"it is {kind_of_value(record)}, not an object")
    check_characters(record)
    tools = _tools(record.get(TOOLS))
    if kind == MESSAGES:
        names = names_of_messages(text_field)
        name = next((name for name in names if name in record), text_field)
        return Conversation(messages=messages_in(record, name), tools=tools)
    prompt, answer = record.get(PROMPT), record.get(completion)
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise NotConversationError(f"{completion!r} is empty")
        return PromptCompletion(prompt=prompt, completion=answer)
    if not (isinstance(prompt, list) and isinstance(answer, list)):
        for name in (PROMPT, completion):
            if name not in record:
                do = advice_to_rename(record) if completion == COMPLETION else None
                raise _no_field(name, record, do)
        raise NotConversationError(
            f"{PROMPT!r} is {kind_of_value(prompt)} and {completion!r} {kind_of_value(answer)};"
            " both must be texts, or both lists of messages"
        )
    before, after = messages_in(record, PROMPT), messages_in(record, completion)
    return Conversation(messages=before + after, tools=tools, num_prompt=len(before))


def messages_in(record: Mapping[str, Any], name: str) -> list[Message]:
    """The messages in a field by their usual names, without fields that are null.

    Raises NotTextError.
    """
    if name not in record:
        raise _no_field(name, record)
    value = record[name]
    if not isinstance(value, list) or not value:
        raise NotConversationError(f"{name!r} is {kind_of_value(value)}, not a list of messages")
    found = [usual_message(one) if isinstance(one, dict) else one for one in value]
    for number, message in enumerate(found, 1):
        if not isinstance(message, dict) or not isinstance(message.get(ROLE), str):
            raise NotConversationError(
                f"message {number} is {kind_of_value(message)}, not an object with a role"
            )
    # As transformers does: many templates write null out as the text "None".
    return [
        {field: each for field, each in message.items() if each is not None} for message in found
    ]


def _no_field(name: str, record: Mapping[str, Any], do: str | None = None) -> NotConversationError:
    return NotConversationError(
        f"no field {name!r}; there are {', '.join(map(repr, record)) or 'none'}", do
    )


def _tools(value: Any) -> list[Any] | None:
    """Tools, which data sets often store as the text of a JSON list."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise NotConversationError(f"{TOOLS!r} is a text that is not JSON: {error}") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise NotConversationError(f"{TOOLS!r} is {kind_of_value(value)}, not a list of objects")
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):  # in JSON it is; an example from Python may have others
                yield name
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def check_characters(value: Any) -> None:
    """Raise ValueError for half a surrogate pair, which is legal in JSON but is not text."""
    for text in strings_in(value):
        text.encode()


def text_in(
    record: Any, field: str, advice: Callable[[Collection[str]], str | None] | None = None
) -> str:
    """The text of a JSON value.

    Args:
      advice: what to do about a record with these fields and no text; None: nothing is known.
    Raises:
      ValueError: it has none.
    """
    text = record
    if isinstance(record, dict):
        if field not in record:
            lists = (record.get(MESSAGES), record.get(CONVERSATIONS))
            hint = f"; {USE_TRAINING}" if any(isinstance(one, list) for one in lists) else ""
            do = LEARN_PREFERENCES if has_pair(record) else advice and advice(record)
            raise NotTextError(
                f"no field {field!r}; there are {', '.join(map(repr, record)) or 'none'}{hint}", do
            )
        text = record[field]
    if not isinstance(text, str):
        where = f"{field!r} holds" if isinstance(record, dict) else "it is"
        kind = kind_of_value(text)
        raise NotTextError(
            f"{where} {kind}"
            + (f", not a text; {USE_TRAINING}" if kind.startswith("a list of objects") else "")
        )
    check_characters(text)
    return text


def has_pair(fields: Collection[str]) -> bool:
    """Whether a record with these fields, or a table with these columns, has preference pairs."""
    return {CHOSEN, REJECTED} <= {*fields}


def without_nulls(value: Any) -> Any:
    """A row's value without the nulls of its objects: Arrow gives all of a list the same fields."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def kind_of_value(value: object) -> str:
    """The kind of a JSON value, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case dict():
            return f"an object with {', '.join(map(repr, value)) or 'nothing'}"
        case list() if value and all(isinstance(item, dict) for item in value):
            names = ", ".join(map(repr, value[0])) or "nothing"
            return f"a list of objects with {names}"
        case list():
            return "a list" if value else "an empty list"
    return type(value).__name__
