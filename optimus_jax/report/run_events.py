"""Lines of events.jsonl as values: fields that may be missing or hold anything, and decisions with
what they weighed.

A field that is not there, or is not what it should be, is None: it was not recorded.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

Event = Mapping[str, Any]
Action = Literal["stay", "switch", "tried"]
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Control characters, halves of a character, and what XML 1.0 leaves out."""


@dataclass(frozen=True, kw_only=True)
class AlternativeRecord:
    """A layout that a decision weighed."""

    layout: str | None
    plan: str | None
    rung: str | None
    predicted_step_time_s: float | None
    gain_s: float | None
    """Expected over the rest of the run."""
    cost_s: float | None
    """Expected, of switching to it."""
    probability: float | None
    """That it gains time at all."""
    why: str | None


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision, or a plan that was tried before the first step."""

    step: int
    time_s: float | None
    action: Action | None
    why: str | None
    rung: str | None
    plan: str | None
    """Digest of what was decided for."""
    layout: str | None
    trigger: str | None
    """What put it up for decision."""
    present_step_time_s: float | None
    """Predicted, under the plan that the run had."""
    inputs: Event
    """What was known, by name."""
    alternatives: tuple[AlternativeRecord, ...]
    predicted_step_time_s: float | None
    """Of `plan`."""
    measured_step_time_s: float | None
    """Of a trial."""


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; a log may hold anything, and null for what was not."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def number(values: Event, name: str) -> float | None:
    """A field that is a finite number."""
    value = values.get(name)
    return float(value) if is_finite_number(value) else None


def text(values: Event, name: str) -> str | None:
    """A field that is a text with something in it."""
    value = values.get(name)
    return value if isinstance(value, str) and value else None


def mapping(values: Event, name: str) -> Event:
    """A field that has fields, else an empty one."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def step_of(event: Event) -> int:
    """Last finished step at an event, 0 before the first."""
    return int(number(event, "step") or 0)


def printable(value: Any) -> Any:
    """A value with all its texts fit for a page: characters that no HTML, SVG or UTF-8 may hold are
    replaced.
    """
    match value:
        case str():
            return _NOT_SHOWN.sub("\ufffd", value)
        case Mapping():
            return {printable(name): printable(item) for name, item in value.items()}
        case list():
            return [printable(item) for item in value]
    return value


def decision_of(event: Event) -> DecisionRecord:
    """A `decision` event: of the controller (control/policy.py), or of a trial before the first
    step (run/first_plan.py).
    """
    action, measured = event.get("action"), number(event, "measured_step_time_s")
    plan, found = text(event, "plan"), event.get("alternatives")
    alternatives = tuple(
        _alternative(other)
        for other in (found if isinstance(found, list) else ())
        if isinstance(other, Mapping)
    )
    predicted, layout = number(event, "predicted_step_time_s"), text(event, "layout")
    chosen = next(
        (
            other
            for other in alternatives
            if (plan and other.plan == plan) or (layout and other.layout == layout)
        ),
        None,
    )
    return DecisionRecord(
        step=step_of(event),
        time_s=number(event, "time_s"),
        action="tried"
        if action is None and measured is not None
        else action
        if action in ("stay", "switch")
        else None,
        why=text(event, "why"),
        rung=text(event, "rung"),
        plan=plan,
        layout=layout or (chosen.layout if chosen else None),
        trigger=text(event, "trigger"),
        present_step_time_s=number(event, "step_time_s"),
        inputs=mapping(event, "inputs"),
        alternatives=alternatives,
        measured_step_time_s=measured,
        predicted_step_time_s=predicted
        if predicted is not None or chosen is None
        else chosen.predicted_step_time_s,
    )


def _alternative(other: Event) -> AlternativeRecord:
    predicted = number(other, "predicted_step_time_s")
    return AlternativeRecord(
        layout=text(other, "layout") or text(other, "flags"),
        plan=text(other, "plan"),
        rung=text(other, "rung"),
        predicted_step_time_s=number(other, "step_time_s") if predicted is None else predicted,
        gain_s=number(other, "gain_s"),
        cost_s=number(other, "cost_s"),
        probability=number(other, "probability"),
        why=text(other, "why") or text(other, "verdict"),
    )
