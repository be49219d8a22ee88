"""The table of events agrees with the calls that write them."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from optimus_jax.config import Config
from optimus_jax.control.journal import Ending
from optimus_jax.control.policy import Decision
from optimus_jax.run.learning_rate_change import RateChange
from optimus_jax.run_directory.contents import COMMON, EVENTS, SWITCH_RECORDS, EventName

PACKAGE = Path(__file__).parents[2] / "optimus_jax"
DICTIONARIES = {
    "decision": set(Decision(step=1, action="stay", why="").as_json()),
    "resume": {
        "evaluation",
        "settings",
        *RateChange(before=Config(), now=Config(), num_params=1, step=1, checkpoints=()).rates,
    },
    "fault": set(),
}
"""Fields that a call passes as a dictionary: all fields of that name in the table."""


def written() -> Iterator[tuple[str, str]]:
    """Every event that the package writes, with each of its fields."""
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", None))
            if name == "write_fault":
                names = ["fault"]
            elif name == "log_event":
                names = [
                    each.value
                    for each in ast.walk(call.args[0])
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                ]
                assert names, f"{path}:{call.lineno}: the event's name is not in the call"
            else:
                continue
            for event in names:
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        yield event, keyword.arg
                    else:
                        assert event in ("start", *DICTIONARIES), f"{path}:{call.lineno}"
                        yield from ((event, field) for field in DICTIONARIES.get(event, ()))


def test_the_table_has_every_line_of_the_journal_of_switches():
    journal = ast.parse((PACKAGE / "control/journal.py").read_text(encoding="utf-8"))
    lines = [
        {key.value: value for key, value in zip(node.keys, node.values, strict=True)}
        for node in ast.walk(journal)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys)
    ]
    records = {line["record"].value: set(line) for line in lines if "record" in line}
    assert records == {name: {"record", *fields} for name, (_, fields) in SWITCH_RECORDS.items()}
    text = SWITCH_RECORDS["end"][1]["ending"]
    assert [ending for ending in get_args(Ending) if f"`{ending}`" not in text] == []


def test_the_table_has_every_event_and_field_that_is_written():
    fields: dict[str, set[str]] = defaultdict(set)
    for event, field in written():
        fields[event].add(field)
    fields["fault"] |= {"process", "seen_s"}  # in the processes' own files
    assert {event: set(kind.fields) for event, kind in EVENTS.items()} == fields


def test_event_names_and_common_fields_are_listed_once():
    assert set(EVENTS) == set(get_args(EventName))
    assert not any(set(COMMON) & set(kind.fields) for kind in EVENTS.values())
