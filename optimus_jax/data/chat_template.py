"""A chat template: where it is found, what it is given, and the text that it makes of messages.

The template is the first of these that exists: the file that `data.chat_template` names;
`chat_template.jinja` beside the tokenizer.json; `chat_template` in tokenizer_config.json, a text or
a list of named ones, of which the one named `default` counts. For conversations with tools the one
named `tool_use` counts, if there is one; beside chat_template.jinja it is a file of
`additional_chat_templates/`. These are transformers' rules. A template sees what transformers
gives it: messages, tools, `add_generation_prompt`, and the tokenizer's special tokens by name
(`bos_token` and so on).
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimus_jax.data.records import Message, NotConversationError
from optimus_jax.errors import DataError, explain

TEMPLATE_FILE = "chat_template.jinja"
"""Name of the file in which transformers saves a template."""
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""Where transformers saves the template for conversations with tools."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Names of templates."""
_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name special tokens; the later one counts."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that templates read the assistant's reasoning from, the usual one first."""
OTHER_TEMPLATE = "give another template: --set data.chat_template=FILE"
"""What to do where a template cannot write out a conversation."""
_OWN_TEMPLATE = "write the template to a file, change it there, and --set data.chat_template=FILE"


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it is given.

    It is compiled when the first conversation comes: texts need no jinja2.
    """

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Values of `bos_token` and so on, by name."""
    source: str = "a chat template"
    """Where it was found, for messages."""
    tool_use: str | None = None
    """The text for conversations with tools; None: there is no other one for these."""

    def chosen(self, tools: Sequence[Any] | None) -> "ChatTemplate":
        """The template for a conversation with these tools; None: without."""
        return self if tools is None or self.tool_use is None else self._of_tools

    @functools.cached_property
    def _of_tools(self) -> "ChatTemplate":
        assert self.tool_use is not None
        return replace(self, text=self.tool_use, tool_use=None)

    @property
    def digest(self) -> str:
        """Sixteen hex digits; templates with the same digest make the same texts."""
        texts = [self.text] if self.tool_use is None else [self.text, self.tool_use]
        content = json.dumps([*texts, dict(sorted(self.special_tokens.items()))])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    @property
    def marks_generation(self) -> bool:
        """Whether the template says itself, by `{% generation %}`, what the assistant says."""
        return _GENERATION.search(self.text) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of a conversation, by this template's `text` (`chosen`).

        Args:
          add_generation_prompt: whether the beginning of an assistant's message follows.
          generation_marks: characters to put around what `{% generation %}` encloses.
        Raises:
          NotConversationError: the template refuses the messages, or fails.
          DataError: jinja2 is missing, the text is not a template, exceeds a limit, or asks for
            the date.
        """
        environment, template = self._compiled
        from optimus_jax.data.template_sandbox import TemplateLimitError

        values = dict(self.special_tokens) | {
            "messages": list(map(_with_reasoning, messages)),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return environment.rendered(template, values, generation_marks)
        except TemplateLimitError as error:
            raise DataError(
                explain(
                    f"{self.source} does not end, or makes too much text",
                    given=error,
                    do=_OWN_TEMPLATE,
                )
            ) from error
        except Exception as error:  # whatever the template does
            if "strftime_now" in str(error):
                raise DataError(
                    explain(
                        f"{self.source} asks for the date, so that data would change every day",
                        given="a call of strftime_now",
                        do=f"put a date there instead: {_OWN_TEMPLATE}",
                    )
                ) from error
            raise NotConversationError(
                f"the chat template says: {str(error) or type(error).__name__}",
                f"{OTHER_TEMPLATE}, or messages that it takes",
            ) from error

    @functools.cached_property
    def _compiled(self) -> tuple[Any, Any]:
        try:
            from optimus_jax.data.template_sandbox import ChatSandbox
        except ImportError as error:
            raise DataError(
                explain(
                    "a chat template needs jinja2, which is not installed",
                    given=self.source,
                    do="pip install 'optimus-jax[chat]'",
                )
            ) from error
        environment = ChatSandbox()
        try:
            return environment, environment.from_string(self.text)
        except Exception as error:  # syntax errors, and whatever Python says of the compiled code
            raise DataError(
                explain(
                    f"{self.source} is not a chat template",
                    given=f"{error} (line {getattr(error, 'lineno', 'unknown')})",
                    do="give the template of the tokenizer: --set data.chat_template=FILE",
                )
            ) from error


def template_file(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template in a file. Raises DataError if it cannot be read."""
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise DataError(
            explain(
                "a chat template cannot be read",
                given=f"{path}: {error}",
                do="give a file of UTF-8 text: --set data.chat_template=FILE",
            )
        ) from error
    return ChatTemplate(text, special_tokens, str(path))


def special_tokens_beside(folder: Path) -> dict[str, str]:
    """The special tokens that the files of a tokenizer's folder name, such as `bos_token`."""
    found = {}
    for name in _CONFIGS:
        for key, token in _json_object(folder / name).items():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def template_beside(folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template in a tokenizer's folder; None: there is none."""
    if (path := folder / TEMPLATE_FILE).is_file():
        found, beside = template_file(path, special_tokens), folder / TOOL_TEMPLATE_FILE
        if beside.is_file():
            found = replace(found, tool_use=template_file(beside, special_tokens).text)
        return found
    path = folder / _CONFIGS[-1]
    value, tool_use = _json_object(path).get("chat_template"), None
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, Mapping)}
        value, tool_use = named.get(_DEFAULT), named.get(_TOOL_USE)
    if not isinstance(value, str):
        return None
    tool_use = tool_use if isinstance(tool_use, str) else None
    return ChatTemplate(value, special_tokens, str(path), tool_use)


def template_files(template: ChatTemplate | None) -> dict[str, bytes]:
    """The file, by name, that keeps a template beside a tokenizer; none if there is none, or if
    tokenizer_config.json keeps it (`named_templates`).
    """
    if template is None or template.tool_use is not None:
        return {}
    return {TEMPLATE_FILE: template.text.encode()}


def named_templates(template: ChatTemplate | None) -> dict[str, list[dict[str, str]]]:
    """What tokenizer_config.json says of a template with another text for tools."""
    if template is None or template.tool_use is None:
        return {}
    texts = {_DEFAULT: template.text, _TOOL_USE: template.tool_use}
    return {"chat_template": [{"name": name, "template": text} for name, text in texts.items()]}


def _json_object(path: Path) -> Mapping[str, Any]:
    """A JSON object in a file; empty if there is none (eos.py reports files that it needs)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _with_reasoning(message: Message) -> Message:
    """A message whose reasoning has the names that templates read, as transformers gives it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}
