"""Writes conversations out as text, and says which parts of it count in the loss.

The special tokens of a rendered conversation are those that its template wrote. A message may
contain the same text, `<|im_end|>` for example; that is ordinary text. To know the two apart, a
mark, a character that occurs nowhere else, is put into such a text in the message before rendering,
and taken out of the result again. A special token that covers the character after a mark is not the
template's. A mark also goes where a message begins or ends with a part of a special token, so that
message and template cannot make one together. Most conversations need no marks.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from optimus_jax.config.data import EVERY_ROLE
from optimus_jax.data.chat_template import TEMPLATE_FILE, ChatTemplate
from optimus_jax.data.record_names import ASSISTANT, USER
from optimus_jax.data.records import (
    Chat,
    Conversation,
    Message,
    NotConversationError,
    PromptCompletion,
    strings_in,
)
from optimus_jax.errors import DataError, explain

_OTHER_ROLES = frozenset({"system", "developer", USER, "tool", "function", "ipython"})
KNOWN_ROLES = _OTHER_ROLES | {ASSISTANT, "model"}
"""Roles that a template may make a special token of, such as `<|user|>`."""
SELDOM_LEARNT = _OTHER_ROLES | {"human"}
"""Roles whose messages usually only precede what is to be learnt."""
_KNOWN_TYPES = ("text", "function")
"""Values of `type` in parts of a content and in tools."""
_PRIVATE = range(0xE000, 0xF8FF)
"""Characters that Unicode leaves to private use; the marks are some that the data does not have."""
_NUM_MARKS = 3
CharacterSpan = tuple[int, int]
"""Characters of a text: the first, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation, or a prompt with its completion, as text."""

    text: str
    from_data: frozenset[int] = frozenset()
    """Places of characters that come from messages: a special token that covers one is ordinary
    text."""
    counted: tuple[CharacterSpan, ...] = ()
    """Spans, in order, whose tokens count as targets."""
    ends: bool = False
    """Whether the end of a document follows, because the text has no token that ends a turn."""

    stops: bool = True
    """Whether each part that counts ends with a token that ends a turn."""
    roles: frozenset[str] = field(default=frozenset(), compare=False)
    """Roles among which `loss_on` chooses what counts; none if it does not."""

    @property
    def end_counts(self) -> bool:
        """Whether the end of the document counts as a target: what comes before it does."""
        return bool(self.counted) and self.counted[-1][1] >= len(self.text.rstrip())


@dataclass(kw_only=True)
class ChatWriter:
    """Makes texts of conversations."""

    template: ChatTemplate | None
    """None: only prompts and completions that are texts can be written."""
    special_tokens: Collection[str]
    """Texts of the tokens that messages must not contain."""
    loss_on: tuple[str, ...] = (ASSISTANT,)
    """Roles whose messages count, or EVERY_ROLE alone."""
    has_end_of_turn: bool = True
    """Whether a template can write a token that ends a turn."""

    def __post_init__(self) -> None:
        tokens = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        either = "|".join(map(re.escape, tokens)) or "(?!)"  # (?!) never matches
        self._anywhere = re.compile(f"(?=({either}))")
        self._last = re.compile(rf"(?:{either})(\s*)\Z")
        self._beginnings = {token[:size] for token in tokens for size in range(1, len(token))}
        self._endings = {token[size:] for token in tokens for size in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        self._tokens = tuple(tokens)

    def __call__(self, chat: Chat) -> RenderedChat:
        """The text of a conversation.

        Raises:
          NotConversationError: the template cannot write it, or what counts cannot be told.
          DataError: there is no template, or it exceeds a limit.
        """
        if isinstance(chat, PromptCompletion):
            return self._completion(chat)
        if self.template is None:
            raise _no_template()
        return _Rendering(self, self.template, chat).result()

    def prompt(self, chat: Conversation) -> RenderedChat:
        """A conversation so far, and the beginning of the assistant's next message.

        Raises what a call raises.
        """
        if self.template is None:
            raise _no_template()
        return _Rendering(self, self.template, chat).prompt()

    def _completion(self, chat: PromptCompletion) -> RenderedChat:
        text, begin = chat.prompt + chat.completion, len(chat.prompt)
        return RenderedChat(
            text=text,
            from_data=frozenset(match.start() for match in self._anywhere.finditer(text)),
            counted=((0 if self.loss_on == (EVERY_ROLE,) else begin, len(text)),),
            ends=True,
        )

    def needs_marks(self, text: str) -> bool:
        """Whether a text could be taken for special tokens, or for a part of one."""
        return bool(self._places(text))

    def marked(self, text: str, mark: str) -> str:
        """A text of a message with marks where it could be taken for special tokens."""
        places = self._places(text)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _places(self, text: str) -> set[int]:
        """Places of the characters that need a mark before them."""
        places = set[int]()
        if any(token in text for token in self._tokens):
            places |= {match.start() for match in self._anywhere.finditer(text)}
        inner = text.strip()
        for each, offset in ((text, 0), (inner, len(text) - len(text.lstrip()))):
            if not each:
                continue
            sizes = range(1, min(len(each), self._longest) + 1)
            if any(each[:size] in self._endings for size in sizes):
                places.add(offset)
            if any(each[-size:] in self._beginnings for size in sizes):
                places.add(offset + len(each) - 1)
            if len(each) < self._longest and any(each in token for token in self._tokens):
                places.add(offset)
        return places

    def marked_all(self, value: Any, mark: str) -> Any:
        """A JSON value with marks in its texts, names of fields included."""
        match value:
            case str():
                return self.marked(value, mark)
            case dict():
                return {
                    self._marked_name(name, mark): item
                    if self._is_for_template(name, item)
                    else self.marked_all(item, mark)
                    for name, item in value.items()
                }
            case list():
                return [self.marked_all(item, mark) for item in value]
        return value

    def _is_for_template(self, name: str, item: object) -> bool:
        """Whether templates compare this field, and may make special tokens of it."""
        if not isinstance(item, str):
            return False
        return (name == "role" and (item in KNOWN_ROLES or item in self.loss_on)) or (
            name == "type" and item in _KNOWN_TYPES
        )

    def _marked_name(self, name: str, mark: str) -> str:
        """A field's name, which templates ask for, so that only whole special tokens matter."""
        if not isinstance(name, str) or not self._anywhere.search(name):
            return name
        return self.marked(name, mark)

    def has_end(self, text: str, span: CharacterSpan) -> bool:
        """Whether a span ends with a special token, and perhaps blanks."""
        return self._last.search(text, *span) is not None

    def end_of_turn(self, text: str, span: CharacterSpan) -> CharacterSpan:
        """A span of a message without the blanks after the special token that ends it."""
        found = self._last.search(text, *span)
        return span if found is None else (span[0], found.start(1))


class _Rendering:
    """One conversation that is being written out."""

    def __init__(self, writer: ChatWriter, template: ChatTemplate, chat: Conversation) -> None:
        template = template.chosen(chat.tools)
        self._writer, self._template, self._chat = writer, template, chat
        self._messages: list[Message] = chat.messages
        self._tools = chat.tools
        texts = [*strings_in([chat.messages, chat.tools or []])]
        self._has_marks = any(map(writer.needs_marks, texts))
        if self._has_marks or template.marks_generation:
            self._mark, *self._around = _unused([template.text, *texts])
            self._messages = writer.marked_all(chat.messages, self._mark)
            self._tools = chat.tools and writer.marked_all(chat.tools, self._mark)

    def prompt(self) -> RenderedChat:
        text, from_data, _ = self._rendered(len(self._messages), prompts=True)
        return RenderedChat(text=text, from_data=from_data)

    def result(self) -> RenderedChat:
        writer = self._writer
        text, from_data, generated = self._rendered(len(self._messages))
        if self._has_marks and text != self._template.render(self._chat.messages, self._chat.tools):
            raise NotConversationError(
                "the chat template compares a message that has the text of a special token, or a"
                " part of it"
            )
        counted, ends = self._counted(text, generated), not writer.has_end_of_turn
        return RenderedChat(
            text=text,
            from_data=from_data,
            counted=counted,
            ends=ends,
            stops=ends or all(writer.has_end(text, span) for span in counted),
            roles=frozenset(map(self._role, range(len(self._messages))))
            if self._chat.num_prompt is None
            else frozenset(),
        )

    def _counted(
        self, text: str, generated: tuple[CharacterSpan, ...]
    ) -> tuple[CharacterSpan, ...]:
        loss_on, first = self._writer.loss_on, self._chat.num_prompt
        if loss_on == (EVERY_ROLE,):
            return ((0, len(text)),)
        if first is not None:
            begin = self._length(text, first, prompts=self._role(first) == ASSISTANT)
            return (self._writer.end_of_turn(text, (begin, len(text))),)
        if loss_on == (ASSISTANT,) and self._template.marks_generation:
            return generated
        spans = []
        for index in range(len(self._messages)):
            if self._role(index) in loss_on:
                begin = self._length(text, index, prompts=self._role(index) == ASSISTANT)
                end = self._length(text, index + 1, prompts=False)
                spans.append(self._writer.end_of_turn(text, (begin, end)))
        return tuple(spans)

    def _role(self, index: int) -> str:
        return self._chat.messages[index]["role"]

    def _length(self, text: str, num_messages: int, *, prompts: bool) -> int:
        """Characters of `text` that the first messages take up.

        Args:
          prompts: whether the beginning of the next message, the assistant's, is among them.
        """
        if num_messages == len(self._messages):
            return len(text)
        try:
            beginning, *_ = self._rendered(num_messages, prompts=prompts)
        except NotConversationError:
            if num_messages:
                raise
            return 0  # many templates need a message
        if not text.startswith(beginning):
            number = num_messages + prompts
            raise NotConversationError(
                "the chat template writes earlier messages differently when later ones follow, so"
                f" that it is unknown what counts of message {number}"
                f" ({self._role(number - 1)}); mark what counts in the template by"
                " {% generation %}, or --set data.loss_on=all"
            )
        return len(beginning)

    def _rendered(
        self, num_messages: int, *, prompts: bool = False
    ) -> tuple[str, frozenset[int], tuple[CharacterSpan, ...]]:
        """The text of the first messages without marks, what the marks said, and the spans that
        the template says are the assistant's."""
        if not (self._has_marks or self._template.marks_generation):
            messages = self._messages[:num_messages]
            text = self._template.render(messages, self._tools, add_generation_prompt=prompts)
            return text, frozenset(), ()
        begin, end = self._around
        raw = self._template.render(
            self._messages[:num_messages],
            self._tools,
            add_generation_prompt=prompts,
            generation_marks=(begin, end) if self._template.marks_generation else ("", ""),
        )
        # A template may write the messages as JSON of ASCII characters.
        escaped = json_escape(self._mark)
        parts, places, spans, length, began = [], set(), [], 0, 0
        for part in re.split(f"({self._mark}|{re.escape(escaped)}|{begin}|{end})", raw):
            if part in (self._mark, escaped):
                places.add(length)
            elif part == begin:
                began = length
            elif part == end:
                spans.append((began, length))
            else:
                parts.append(part)
                length += len(part)
        return "".join(parts), frozenset(places), tuple(spans)


def json_escape(character: str) -> str:
    """A character of the private use area in JSON of ASCII characters."""
    return f"\\u{ord(character):04x}"


def _unused(texts: Sequence[str]) -> list[str]:
    """Characters that no text has, plain or escaped."""
    found = []
    for code in _PRIVATE:
        character = chr(code)
        if not any(character in text or json_escape(character) in text for text in texts):
            found.append(character)
            if len(found) == _NUM_MARKS:
                return found
    raise NotConversationError("it has nearly all characters of Unicode's private use area")


def _no_template() -> DataError:
    return DataError(
        explain(
            "conversations need a chat template, and the tokenizer has none",
            given=f"neither {TEMPLATE_FILE} nor chat_template in tokenizer_config.json beside it",
            do="name one: --set data.chat_template=FILE",
        )
    )
