"""Schedules as JSON. Users can write their own schedules by hand in this format.

A schedule is an object with `name`, the counts `stages`, `microbatches`, `repeats` (1 if left out)
and `latency` (1 if left out), and the tables `forward` and `backward`. A table has a row for each
tick with an entry for each stage: a task (microbatch * repeats + repeat), or -1 for none.
`backward` is null in a forward-only schedule. `head` may be left out; it follows from `forward`.
"""

import json
from typing import Any

from optimus_jax.errors import PlanError, explain, nearest
from optimus_jax.system.json_input import parse_json

COUNTS = ("stages", "microbatches", "repeats", "latency")
TABLES = ("forward", "backward")
KEYS = ("name", *COUNTS, *TABLES, "head")
DEFAULTS = {"repeats": 1, "latency": 1}
LARGEST = 2**31 - 1
"""Largest absolute value in a table, which is int32."""


def write_schedule(value: dict[str, Any]) -> str:
    """The object as JSON, with a line for each tick of a table."""
    return (
        "{\n"
        + ",\n".join(f"  {json.dumps(key)}: {_write(entry)}" for key, entry in value.items())
        + "\n}\n"
    )


def _write(entry: Any) -> str:
    is_table = isinstance(entry, list) and entry and isinstance(entry[0], list)
    return (
        "[\n    " + ",\n    ".join(map(json.dumps, entry)) + "\n  ]"
        if is_table
        else json.dumps(entry)
    )


def read_schedule(text: str | bytes) -> dict[str, Any]:
    """The inverse of `write_schedule`, with defaults filled in. Types and shapes are checked; the
    meaning of the numbers is not.

    Raises:
      PlanError: the text is not JSON, a key is unknown or missing, or a value has the wrong type or
        shape.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise PlanError(
            explain(
                "this schedule is not JSON",
                given=error,
                do="see optimus_jax/pipeline/schedule_json.py",
            )
        ) from error
    if not isinstance(value, dict):
        raise PlanError(
            explain(
                "a schedule is a JSON object",
                given=type(value).__name__,
                do="write {" + ", ".join(KEYS) + "}",
            )
        )
    for key in value:
        if key not in KEYS:
            raise PlanError(
                explain(
                    f"a schedule has no key {key!r}", given=", ".join(value), do=nearest(key, KEYS)
                )
            )
    value = DEFAULTS | value
    for key in KEYS:
        if key not in value and key != "head":
            raise PlanError(
                explain(f"the schedule has no {key!r}", given=", ".join(value), do=f"add {key!r}")
            )
    if not isinstance(value["name"], str):
        raise PlanError(
            explain("'name' is no text", given=repr(value["name"]), do='write "name": "..."')
        )
    for key in COUNTS:
        if not _is_int(value[key]) or value[key] < 1:
            raise PlanError(
                explain(
                    f"{key!r} is no whole number above 0",
                    given=repr(value[key]),
                    do=f'write "{key}": 1 or more',
                )
            )
    if value["backward"] is None:
        del value["backward"]
    for key in TABLES:
        if key in value:
            _check_table(key, value[key], width=value["stages"])
    _check_row("head", value.get("head", []))
    return {"backward": None} | value


def _check_table(key: str, table: Any, *, width: int) -> None:
    if not isinstance(table, list) or not table:
        raise PlanError(
            explain(
                f"{key!r} is no list of ticks",
                given=_shown(table),
                do=f"write {key!r} as a row of {width} tasks for each tick",
            )
        )
    for tick, row in enumerate(table):
        _check_row(f"{key}[{tick}]", row)
        if len(row) != width:
            raise PlanError(
                explain(
                    f"{key}[{tick}] has {len(row)} entries",
                    given=f"stages={width}",
                    do="give every tick one entry for each stage",
                )
            )


def _check_row(name: str, row: Any) -> None:
    if not isinstance(row, list) or not all(map(_is_int, row)):
        raise PlanError(
            explain(
                f"{name} is no list of whole numbers",
                given=_shown(row),
                do="use task numbers, and -1 for nothing",
            )
        )


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
