"""Names that other tools give to the fields of records: what is read, and what is to be renamed.

Messages in ShareGPT's form are read: a list named `conversations`, `from` for the role, `value` for
the content. Prompts and completions under other names are not, because a text prompt is joined with
its completion as it is, and only the user knows what belongs between the parts.
"""

from collections.abc import Collection, Mapping
from typing import Any

from optimus_jax.data.record_names import (
    ASSISTANT,
    COMPLETION,
    CONTENT,
    PROMPT,
    ROLE,
    TOOL,
    USER,
)

MESSAGE_FIELDS = {"from": ROLE, "value": CONTENT}
"""Fields of a message in ShareGPT's form, and ours."""
ROLES = {"human": USER, "gpt": ASSISTANT, "observation": TOOL}
"""Roles in ShareGPT's form, and the usual ones; others stay as they are."""
_PROMPTS = (PROMPT, "instruction", "question", "query", "input")
_COMPLETIONS = (COMPLETION, "response", "output", "answer")
_MORE_OF_PROMPT = ("input", "context")
"""Fields that Alpaca and Dolly have beside an instruction, often empty."""


def usual_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the usual names; itself, unless it is in ShareGPT's form."""
    if ROLE in message or not isinstance(message.get("from"), str):
        return message
    renamed = {MESSAGE_FIELDS.get(name, name): value for name, value in message.items()}
    return renamed | {ROLE: ROLES.get(renamed[ROLE], renamed[ROLE])}


def prompt_and_completion(fields: Collection[str]) -> tuple[str | None, str | None]:
    """The names of fields that hold a prompt and its completion, by any tool's names."""
    return (
        next((name for name in _PROMPTS if name in fields), None),
        next((name for name in _COMPLETIONS if name in fields), None),
    )


def other_prompt(fields: Collection[str]) -> str | None:
    """The name of a field that holds a prompt by another tool's name."""
    return prompt_and_completion({*fields} - {PROMPT})[0]


def advice_to_rename(fields: Collection[str]) -> str | None:
    """What to do for a prompt with its completion to be read; None: these fields hold none, or
    need no change.
    """
    prompt, completion = prompt_and_completion(fields)
    if prompt == PROMPT and completion is None:
        return (
            f"give each record its {COMPLETION!r}, or learn the prompts as plain text:"
            f" --set data.text_field={PROMPT}"
        )
    if prompt is None or completion is None or (prompt, completion) == (PROMPT, COMPLETION):
        return None
    more = [name for name in _MORE_OF_PROMPT if name in fields and name != prompt]
    after = f" (with the text of {more[0]!r} after it)" if more else ""
    renames = [f"{prompt!r} to {PROMPT!r}{after}"] if prompt != PROMPT or more else []
    renames += [f"{completion!r} to {COMPLETION!r}"] if completion != COMPLETION else []
    return f"rename {' and '.join(renames)}"


def advice_to_train(fields: Collection[str]) -> str | None:
    """What to do with a prompt and its completion where texts alone become tokens; None: these
    fields hold none.
    """
    if None in prompt_and_completion(fields):
        return None
    rename = advice_to_rename(fields)
    return (
        "a prompt with its completion becomes tokens when training starts: "
        + (f"{rename}, and " if rename else "")
        + "give the file to --data"
    )
