"""Settings in words, read from the dataclasses that hold them: type, unit, default and meaning."""

import ast
import builtins
import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optimus_jax.config.settings import section_type
from optimus_jax.config.whole import Config

UNITS = {
    "_s": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "seq_len": "tokens",
    "length": "tokens",
    "window": "tokens",
    "batch": "examples",
    "examples": "examples",
    "steps": "steps",
    "every": "steps",
    "after_step": "steps",
    "resume_step": "steps",
    "devices": "devices",
}
"""Unit of a number, by the end of its name."""


@dataclass(frozen=True, kw_only=True)
class SettingText:
    """A setting in words."""

    name: str
    """Dotted name, as `--set` takes it."""
    kind: str
    """Its type."""
    unit: str
    """Empty: it is no quantity, or a plain number."""
    default: str
    """As `--set` takes it; empty: it has none."""
    meaning: str

    def __str__(self) -> str:
        notes = [self.kind, self.unit, self.default and f"default: {self.default}"]
        return f"{self.name} ({', '.join(note for note in notes if note)})"


def described_settings(section: type = Config, prefix: str = "") -> Iterator[SettingText]:
    """All settings, in the order of their sections."""
    hints = typing.get_type_hints(section)
    for name, kind, default, meaning in fields_of(section):
        if (inner := section_type(hints[name])) is not None:
            yield from described_settings(inner, f"{prefix}{name}.")
            continue
        yield SettingText(
            name=prefix + name,
            kind=kind,
            unit=unit_of(name, kind),
            default=default,
            meaning=meaning,
        )


def fields_of(section: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every field of a dataclass."""
    (body,) = ast.parse(inspect.cleandoc(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    meanings = {
        node.target.id: " ".join(str(after.value.value).split())
        for node, after in itertools.pairwise(body.body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    hints = typing.get_type_hints(section)
    for each in dataclasses.fields(section):
        if not each.name.startswith("_"):
            meaning = meanings.get(each.name, "")
            yield each.name, type_text(hints[each.name]), default_text(each), meaning


def type_text(kind: Any) -> str:
    """A field's type in words: the values of a choice, `list of`, `or none`."""
    options = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            return ", ".join(map(str, options))
        case typing.Union | types.UnionType:
            texts = [type_text(each) for each in options if each is not types.NoneType]
            return " or ".join([*texts, "none"] if types.NoneType in options else texts)
        case builtins.tuple if options[1:] == (...,):
            return f"list of {type_text(options[0])}"
        case None:
            return getattr(kind, "__name__", str(kind))
    return str(kind).replace("typing.", "").replace("collections.abc.", "")


def default_text(field: dataclasses.Field) -> str:
    """A field's default as `--set` takes it; empty: it has none."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parts_of(section: type) -> Iterator[type]:
    """The dataclasses that a section's fields hold, but for those that are sections."""
    todo = list(typing.get_type_hints(section).values())
    while todo:
        kind = todo.pop(0)
        todo += typing.get_args(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield kind


def unit_of(name: str, kind: str) -> str:
    """Unit of a setting; empty: it is no quantity, or a plain number."""
    if not re.search(r"\b(int|float)\b", kind):
        return ""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
