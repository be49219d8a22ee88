"""Conversations as prompts: their tokens, and those that end an answer."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from optimus_jax.data.chat_template import OTHER_TEMPLATE
from optimus_jax.data.record_names import ASSISTANT, MESSAGES, ROLE, USER
from optimus_jax.data.records import Conversation, Message, NotConversationError, chat_in
from optimus_jax.data.rendered_chat import ChatWriter
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.errors import DataError, argument, explain

GivenPrompt = str | list[Message] | Mapping[str, Any]
"""A prompt: a text; the messages of a conversation so far, oldest first, each a dict with `role`
and `content`; or a dict with these `messages` and the `tools` that the assistant may call, as a
line of training data has them."""


def is_one_prompt(value: object) -> TypeGuard[GivenPrompt]:
    """Whether a value is one prompt, or meant as one: a text, a message, or some in a sequence."""
    if isinstance(value, str | Mapping):
        return True
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and isinstance(value[0], Mapping)
        and MESSAGES not in value[0]
    )


def chat_ids(tokenizer: Tokenizer, prompt: GivenPrompt) -> np.ndarray:
    """Token ids of a conversation, as the chat template writes it, and of the beginning of the
    assistant's next message: int [L]. A text is a user's message.

    Raises DataError if it is no conversation, or the template cannot write it out.
    """
    try:
        chat = _conversation(prompt)
    except NotConversationError as error:
        raise DataError(
            explain(
                "the prompt is no conversation",
                given=error,
                do='give a text, or messages such as [{"role": "user", "content": "Hello"}]',
            )
        ) from error
    try:
        rendered = _writer(tokenizer).prompt(chat)
    except NotConversationError as error:
        raise DataError(
            explain("the chat template cannot write out the prompt", given=error, do=OTHER_TEMPLATE)
        ) from error
    return tokenizer.encode_chats([rendered])[0].ids


def ends_of_turns(tokenizer: Tokenizer, warn: Callable[[str], object]) -> tuple[int, ...]:
    """The token that ends the assistant's turns, if the chat template has one."""
    messages = [{ROLE: USER, "content": "a"}, {ROLE: ASSISTANT, "content": "a"}]
    try:
        rendered = _writer(tokenizer)(Conversation(messages=messages))
    except NotConversationError:
        warn(
            "the chat template does not say where an answer ends, so it ends like a document, or"
            f" before a text that is given with {argument('stop')}"
        )
        return ()
    (chat,) = tokenizer.encode_chats([rendered])
    return (int(chat.ids[chat.counts][-1]),) if rendered.stops else ()


def _conversation(prompt: GivenPrompt) -> Conversation:
    if isinstance(prompt, str):
        return Conversation(messages=[{ROLE: USER, "content": prompt}])
    record = dict(prompt) if isinstance(prompt, Mapping) else {MESSAGES: prompt}
    if isinstance(record.get(MESSAGES), tuple):
        record[MESSAGES] = [*record[MESSAGES]]
    chat = chat_in(record, "messages", MESSAGES)
    assert isinstance(chat, Conversation)
    return chat


def _writer(tokenizer: Tokenizer) -> ChatWriter:
    return ChatWriter(template=tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
