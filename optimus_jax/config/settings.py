"""Builds frozen dataclasses from plain values, checking every name and type.

This module does not know what the settings mean. Text from the command line is converted to the
type of its field.
"""

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from optimus_jax.errors import ConfigError, explain, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_SHOWN = 300
"""Characters of a value in an error."""
LARGEST_INT = 2**63 - 1
"""Largest integer setting: an int64."""
UNIONS = (types.UnionType, typing.Union)
"""Origins of `X | None`: Python's own and, for a Literal, typing's."""
SEPARATOR = "separator"
"""Key of a field's metadata: the separator between items in its text, if it is not a comma."""

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


def changed(value: D, changes: Mapping[str, Any]) -> D:
    """A copy of a dataclass with some fields changed.

    Args:
      changes: dotted names (`optimizer.lr`, `steps`) to values.
    Raises:
      ConfigError: a name is unknown (the closest known one is suggested) or a value does not fit.
    """
    cls = type(value)
    tree = dataclasses.asdict(value)
    for name, item in changes.items():
        *parents, leaf = name.split(".")
        section, fields = tree, field_types(cls)
        for parent in parents:
            inner = section_type(fields.get(parent))
            if inner is None:
                raise ConfigError(
                    explain(
                        f"unknown setting {name!r}",
                        given=parent,
                        do=nearest(name, setting_names(cls)),
                    )
                )
            if section[parent] is None:
                section[parent] = {}
            section, fields = section[parent], field_types(inner)
        inner = section_type(fields.get(leaf))
        if inner is not None and str(item).lower() == "none" and _is_optional(fields[leaf]):
            item = None
        if leaf not in fields or (inner is not None and not isinstance(item, Mapping | None)):
            raise ConfigError(
                explain(
                    f"unknown setting {name!r}",
                    given=f"{name}={shown(item)}",
                    do=nearest(name, setting_names(cls))
                    if inner is None
                    else "choose one of: " + ", ".join(setting_names(inner, f"{name}.")),
                )
            )
        section[leaf] = item
    return build(cls, tree)


def value_of(value: Any, name: str) -> Any:
    """The value of a setting, by its dotted name."""
    for part in name.split("."):
        value = getattr(value, part)
    return value


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field names of a dataclass with their types."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def setting_names(cls: type, prefix: str = "") -> list[str]:
    """Every dotted name that `--set` takes."""
    names = []
    for name, kind in field_types(cls).items():
        inner = section_type(kind)
        names += setting_names(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return names


def compared_settings(cls: type, prefix: str = "") -> list[str]:
    """`setting_names`, in which a section that may be missing stands for its settings."""
    names = []
    for name, kind in field_types(cls).items():
        inner = section_type(kind)
        if inner is None or _is_optional(kind):
            names.append(prefix + name)
        else:
            names += compared_settings(inner, f"{prefix}{name}.")
    return names


def _is_optional(kind: Any) -> bool:
    """Whether a field's type is of values and None."""
    return typing.get_origin(kind) in UNIONS and types.NoneType in typing.get_args(kind)


def section_type(kind: Any) -> type | None:
    """The dataclass type of a field (also if it is optional); None: the field is a plain value."""
    options = typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)
    return next(
        (
            option
            for option in options
            if isinstance(option, type) and dataclasses.is_dataclass(option)
        ),
        None,
    )


def build(cls: type[T], value: Any, path: str = "") -> T:
    """`cls` from plain JSON values; every name and type is checked."""
    kinds = field_types(cls)
    if not isinstance(value, Mapping):
        raise ConfigError(
            explain(
                f"{path or 'a config'} is an object with fields",
                given=shown(value),
                do="give " + ", ".join(kinds),
            )
        )
    for name in value:
        if name not in kinds:
            raise ConfigError(
                explain(
                    f"unknown setting {path + name!r}",
                    given=f"{path}{name}={shown(value[name])}",
                    do=nearest(name, kinds),
                )
            )
    separators = {
        field.name: field.metadata[SEPARATOR]
        for field in dataclasses.fields(typing.cast(Any, cls))
        if SEPARATOR in field.metadata
    }
    value = {
        name: _split(item, separators[name])
        if name in separators and isinstance(item, str)
        else item
        for name, item in value.items()
    }
    missing = [
        field.name
        for field in dataclasses.fields(typing.cast(Any, cls))
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(
            explain(
                f"{path.rstrip('.') or 'a config'} is not complete",
                given=shown(dict(value)),
                do="give " + ", ".join(missing),
            )
        )
    return cls(**{name: _convert(kinds[name], item, path + name) for name, item in value.items()})


def _split(text: str, separator: str) -> list[str]:
    return [item for item in text.split(separator) if item]


def with_right_types(value: D) -> D:
    """The dataclass itself, after checking the types of its fields, which came from JSON.

    Raises TypeError that names the first field of the wrong type.
    """
    for name, kind in field_types(type(value)).items():
        if not _is_a(kind, given := getattr(value, name)):
            raise TypeError(f"{name}={shown(given, quoted=True)}")
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            with_right_types(given)
    return value


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value matches a field's type. An int counts as a float, a bool not as an int."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return True
    if origin in UNIONS:
        return any(_is_a(option, value) for option in options)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if origin is tuple and len(options) == 2 and options[1] is Ellipsis:
        return isinstance(value, tuple) and all(_is_a(options[0], item) for item in value)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) == len(options)
            and all(map(_is_a, options, value))
        )
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _is_a(options[0], name) and _is_a(options[1], item) for name, item in value.items()
        )
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(
            value, int if kind is int else int | float
        )
    return isinstance(value, kind)


def shown(value: object, *, quoted: bool = False) -> str:
    """A value as text for an error message, shortened; never raises."""
    try:
        text = (
            value if isinstance(value, str) and value.isprintable() and not quoted else repr(value)
        )
    # an int of more digits than Python converts; a self-referential list
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def _convert(kind: Any, value: Any, name: str) -> Any:
    """`value`, from JSON or the command line, as a `kind`."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        # the type has a short text form
        if isinstance(value, str) and (parse := getattr(kind, "parse", None)):
            return parse(value)
        return value if isinstance(value, kind) else build(kind, value, name + ".")
    if isinstance(value, os.PathLike):
        value = (os.fspath(value),) if typing.get_origin(kind) is tuple else os.fspath(value)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        option = next(option for option in options if option is not types.NoneType)
        # "none" may be a choice of its own, such as no positions
        if not (isinstance(value, str) and value in typing.get_args(option)) and (
            value is None or (isinstance(value, str) and value.lower() == "none")
        ):
            return None
        return _convert(option, value, name)
    if origin is Literal:
        if value in options:
            return value
        raise ConfigError(
            explain(
                f"unknown value for {name}",
                given=shown(value),
                do=nearest(str(value)[:MOST_SHOWN], map(str, options)),
            )
        )
    if origin is tuple and isinstance(value, str | tuple | list):
        choices = typing.get_args(options[0]) if typing.get_origin(options[0]) is Literal else ()
        if value == "none" and choices and "none" not in choices:
            return ()
        items = _split(value, ",") if isinstance(value, str) else value
        return tuple(_convert(options[0], item, name) for item in items)
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    try:
        if kind in (int, float):
            if isinstance(value, bool):
                raise TypeError
            number = float(value)
            if not math.isfinite(number):
                raise _not_finite(name, value)
            if kind is float:
                return number
            if kind is int and isinstance(value, int) and abs(value) <= LARGEST_INT:
                return value  # not by way of a float, which has 53 bits
            if kind is int and number.is_integer() and abs(number) < LARGEST_INT:
                return int(number)
        elif kind is str and isinstance(value, str):
            return _text(value)
        elif origin is None and isinstance(value, kind):
            return value
    except OverflowError:  # an int that no float holds
        raise _not_finite(name, value) from None
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        explain(
            f"{name} has the wrong type",
            given=f"{shown(value, quoted=True)} ({type(value).__name__})",
            do=f"give a value of type {kind.__name__}",
        )
    )


def check_finite(value: Any, path: str = "") -> None:
    """Raise ConfigError if a number anywhere in a dataclass is NaN or infinite.

    A dataclass can be built without `build`, and NaN passes every range check."""
    for name in field_types(type(value)):
        item = getattr(value, name)
        if isinstance(item, float) and not math.isfinite(item):
            raise _not_finite(path + name, item)
        if dataclasses.is_dataclass(item):
            check_finite(item, f"{path}{name}.")


def _not_finite(name: str, value: object) -> ConfigError:
    return ConfigError(
        explain(
            f"{name} must be finite",
            given=f"{name}={shown(value)}",
            do="give a number that is neither nan nor infinite, nor too large for a float",
        )
    )


def _text(value: str) -> str:
    """The text itself. Raises ValueError if it cannot be a file name or be printed."""
    # raises for half a surrogate pair; Python's escapes of undecodable argument bytes pass
    os.fsencode(value)
    if "\0" in value:
        raise ValueError
    return value
