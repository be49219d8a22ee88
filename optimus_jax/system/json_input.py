"""JSON that somebody else wrote, or that a crash left half of: a value, or one kind of error.

Python's own reader takes more than it should (a name twice, of which the first is lost; NaN) and
fails in more ways than one (RecursionError; an int of more digits than Python converts). Whoever
reads a file that a person can touch reads it here.
"""

import json
import math
from pathlib import Path
from typing import Any

DEEPEST = 64
"""Lists and objects inside one another. What we write has eight at most; every walk over a deeper
value would have to fear Python's stack."""


class JSONInputError(ValueError):
    """The text is not JSON, or not JSON that is taken here; says what and, where it is known, in
    which line.
    """


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """The value that a text is the JSON of.

    A byte-order mark, which some editors write, is passed over.

    Args:
      text: bytes are UTF-8.
      finite: refuse NaN and infinities, written out or as 1e999; logs have them, where a loss was
        one.
    Raises:
      JSONInputError: it is not JSON, not text, has a name twice in one object, or is nested deeper
        than DEEPEST.
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
    """`parse_json` of a file. Raises OSError besides."""
    return parse_json(Path(path).read_bytes(), finite=finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JSONInputError(f"{twice!r} stands twice in one object")
    return value


def _constant(text: str) -> Any:
    raise JSONInputError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JSONInputError(f"{text[:40]} is too large for a number")
    return number


def _shallow(value: Any) -> Any:
    """The value, unless it is nested deeper than DEEPEST."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise JSONInputError(f"nested deeper than {DEEPEST}")
        level = [
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        ]
    return value
