"""Strict reading of untrusted or truncated JSON, with a single exception type.

Python's own reader accepts too much (duplicate names, of which only the last is kept; NaN) and
raises several exceptions (RecursionError; ValueError for an int with too many digits). Every file
of a run, a checkpoint or a profile that a person can edit is read through this module.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

DEEPEST = 64
"""Largest nesting depth. This project writes at most eight levels; deeper values could overflow
Python's stack in recursive code."""


class JSONInputError(ValueError):
    """The text is not JSON, or is JSON that this module refuses; the message gives the line where
    it is known.
    """


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text.

    A byte-order mark, which some editors write, is ignored.

    Args:
      text: bytes are UTF-8.
      finite: refuse NaN and infinities, also as 1e999; logs contain them when a loss was not
        finite.
    Raises:
      JSONInputError: not JSON, not UTF-8, a duplicate name in one object, or nested deeper than
        DEEPEST.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return _shallow(
            json.loads(
                text.removeprefix("\ufeff"),
                object_pairs_hook=_unique,
                parse_constant=_constant if finite else None,
                parse_float=_finite if finite else None,
            )
        )
    except UnicodeDecodeError as error:
        raise JSONInputError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise JSONInputError(f"nested deeper than {DEEPEST}") from error
    except JSONInputError:
        raise
    except ValueError as error:  # not JSON; or an int of more than 4,300 digits
        raise JSONInputError(str(error).partition(";")[0]) from error


def read_json(path: str | Path, *, finite: bool = True) -> Any:
    """`parse_json` of a file. Also raises OSError."""
    return parse_json(Path(path).read_bytes(), finite=finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise JSONInputError(f"{twice!r} appears twice in one object")
    return value


def _constant(text: str) -> Any:
    raise JSONInputError(f"{text} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JSONInputError(f"{text[:40]} is too large for a number")
    return number


def _shallow(value: Any) -> Any:
    """The value itself. Raises JSONInputError if it is nested deeper than DEEPEST."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise JSONInputError(f"nested deeper than {DEEPEST}")
        level = [
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        ]
    return value
