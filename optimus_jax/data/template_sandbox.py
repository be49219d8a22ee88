"""The environment that chat templates run in: Jinja's sandbox, with limits.

A chat template is a program from whoever published the tokenizer. Jinja's sandbox keeps it from the
interpreter, from files and from changing its input. This module adds what transformers gives to
templates, and leaves out what would make data depend on more than the data: the clock
(`strftime_now`) and random choices.

Limits of one rendering: MAX_STEPS iterations and macro calls, MAX_CHARACTERS in the output and in
any text that `+`, `~`, `*`, `%`, `format`, `join`, `replace` or padding makes, and Jinja's own
100,000 items in a `range`. Not limited: the time of one filter on one long text.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_batch, do_format, do_indent, do_slice
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop iterations and macro calls in one rendering: about a second."""
MAX_CHARACTERS = 1 << 24
"""Characters of a rendered conversation, and of any text on the way to it."""
_MAX_EXPONENT = 1000
_LONG_NUMBER = re.compile(r"\d{6}")
"""A width or precision in a format that is too large."""
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
"""Methods of texts whose first argument is a width."""


class TemplateLimitError(Exception):
    """Raised when a template exceeds a limit. Not a TemplateError, so no template can cause it by
    `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant says. It is put between two
    marks, which the renderer takes out of the text again.
    """

    tags: ClassVar = {"generation"}
    environment: Any

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        begin, end = self.environment.generation_marks
        return f"{begin}{caller()}{end}"


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


class _Limits(NodeTransformer):
    """Puts a count into every loop and macro, and limits `~`."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[Any], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        call.set_lineno(line).set_environment(self._environment)
        return call

    def _counted(self, node: Any) -> Any:
        node = self.generic_visit(node)
        step = nodes.ExprStmt(self._call("count_step", [], node.lineno))
        node.body.insert(0, step.set_lineno(node.lineno).set_environment(self._environment))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [self.visit(part) for part in node.nodes]
        return self._call("concatenated", parts, node.lineno)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Renders chat templates. Not for several threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._steps = 0
        self.generation_marks = ("", "")
        for name in ("random", "urlize", "wordwrap"):  # no function of its input; unlimited
            del self.filters[name]
        del self.globals["lipsum"]  # random text
        self.filters |= {
            "tojson": _tojson,
            "replace": self._replace,
            "join": self._join,
            "center": self._center,
            "indent": self._indent,
            "format": self._format,
            "batch": functools.partial(_counted, do_batch),
            "slice": functools.partial(_counted, do_slice),
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "namespace": _SafeNamespace,
            "dict": _Dictionary(),
        }

    def rendered(
        self,
        template: jinja2.Template,
        values: Mapping[str, Any],
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of a template of this environment.

        Args:
          generation_marks: characters to put around what `{% generation %}` encloses.
        Raises:
          TemplateLimitError: the template exceeds a limit.
          Exception: whatever the template does wrong.
        """
        self._steps = 0
        self.generation_marks = generation_marks
        parts, length = [], 0
        for part in template.generate(**values):
            parts.append(part)
            length += len(part)
            _check_length(length)
        return "".join(parts)

    def count_step(self) -> None:
        """Count an iteration of a loop, or a call of a macro."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"more than {MAX_STEPS:,} iterations of its loops")

    def concatenated(self, *parts: object) -> str:
        """The value of `a ~ b`."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limits(self).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The value of an operator of `intercepted_binops`."""
        sized = str | list | tuple
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            _check_length(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(times, int):
                    _check_length(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_length(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(right, int) and abs(right) > _MAX_EXPONENT:
            raise TemplateLimitError(f"an exponent of {right:,}")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for a template."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                return __self._join(args[0], owner)
            if name == "replace":
                _check_replacement(owner, *args[:2])
            elif name in _PADDING:
                _check_widths(args, owner.count("\t") + 1)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandboxed `format` or `format_map` of a text; None: `value` is something else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return limited

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        _check_replacement(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        texts = [str(item) for item in items]
        _check_length(sum(map(len, texts)) + len(texts) * len(str(d)))
        return str(d).join(texts)

    def _center(self, value: Any, width: int = 80) -> str:
        _check_widths((width,), 1)
        return str(value).center(width)

    def _indent(
        self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        _check_widths((len(width) if isinstance(width, str) else width,), str(s).count("\n") + 1)
        return do_indent(str(s), width, first, blank)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        _check_format(str(value), (*args, *kwargs.values()))
        return do_format(str(value), *args, **kwargs)


class _Dictionary:
    """`dict(...)` and `dict.fromkeys(...)`, without the methods that could change an argument."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _counted(make: Callable[..., Any], value: Any, number: int, *args: Any, **kwargs: Any) -> Any:
    """The value of a filter that makes `number` lists, or lists of that length."""
    _check_widths((number,), 1)
    return make(value, number, *args, **kwargs)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateLimitError(f"a text of more than {MAX_CHARACTERS:,} characters")


def _check_widths(widths: Any, times: int) -> None:
    for width in widths:
        if isinstance(width, int):
            _check_length(width * times)


def _check_format(text: str, arguments: Any) -> None:
    """Refuse a format with a large width, also one that is an argument."""
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    if _LONG_NUMBER.search(text):
        raise TemplateLimitError("a width of more than 99,999 in a format")
    if "*" in text or text.count("{") > 1:
        _check_widths(arguments, 1)


def _check_replacement(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    _check_length(len(text) + text.count(str(old)) * len(str(new)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter adds."""
    _check_widths((indent,), 1000)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))
