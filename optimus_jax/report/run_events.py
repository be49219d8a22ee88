"""Events of events.jsonl as typed values: fields of any event, and decisions with their
alternatives.

A field that is missing or has the wrong type is None: its value is unknown.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from optimus_jax.control.signals import OLD_SIGNAL_NAMES
from optimus_jax.planning.profiles.cluster import OLD_LINK_NAMES
from optimus_jax.report.formatting import shown_setting

LoggedEvent = Mapping[str, Any]
RecordedAction = Literal["stay", "switch", "tried"]
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Control characters, lone surrogates, and characters that XML 1.0 excludes."""


@dataclass(frozen=True, kw_only=True)
class AlternativeRecord:
    """A plan that a decision compared with the current one."""

    layout: str | None
    plan: str | None
    """Digest."""
    switch_method: str | None
    """How the state would get to the plan."""
    predicted_step_time_s: float | None
    gain_s: float | None
    """Expected gain over the rest of the run."""
    cost_s: float | None
    """Expected cost of the switch."""
    probability: float | None
    """Probability that the switch gains time."""
    why: str | None


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision, or the trial of a plan before the first step."""

    step: int
    time_s: float | None
    action: RecordedAction | None
    why: str | None
    switch_method: str | None
    plan: str | None
    """Digest of the chosen or tried plan."""
    layout: str | None
    trigger: str | None
    """The signal that caused the decision."""
    current_step_time_s: float | None
    """Prediction for the plan in use at the time."""
    inputs: LoggedEvent
    """Values that the decision used, by name."""
    alternatives: tuple[AlternativeRecord, ...]
    predicted_step_time_s: float | None
    """Prediction for `plan`."""
    measured_step_time_s: float | None
    """Measurement of a trial."""


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number. A log may hold any JSON value, and null for unknown."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def number(values: LoggedEvent, name: str) -> float | None:
    """A field's value if it is a finite number, else None."""
    value = values.get(name)
    return float(value) if is_finite_number(value) else None


def text(values: LoggedEvent, name: str) -> str | None:
    """A field's value if it is a non-empty string, else None."""
    value = values.get(name)
    return value if isinstance(value, str) and value else None


def switch_method_of(event: LoggedEvent) -> str | None:
    """The switch method of an event or alternative. Runs of older versions call it `rung`."""
    return text(event, "switch_method") or text(event, "rung")


def mapping(values: LoggedEvent, name: str) -> LoggedEvent:
    """A field's value if it is a mapping, else an empty mapping."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def changed_settings(resume: LoggedEvent) -> list[str]:
    """The settings that an event `resume` says are not as before, each with both values."""
    return [
        f"{name}: {shown_setting(values[0])}, then {shown_setting(values[1])}"
        for name, values in mapping(resume, "settings").items()
        if isinstance(values, list) and len(values) == 2 and not name.startswith("log.")
    ]


def step_of(event: LoggedEvent) -> int:
    """The last finished step when an event was logged, 0 before the first."""
    return int(number(event, "step") or 0)


def printable(value: Any) -> Any:
    """A value in whose strings all characters that HTML, SVG or UTF-8 cannot hold are replaced."""
    match value:
        case str():
            return _NOT_SHOWN.sub("\ufffd", value)
        case Mapping():
            return {printable(name): printable(item) for name, item in value.items()}
        case list():
            return [printable(item) for item in value]
    return value


def parse_decision(event: LoggedEvent) -> DecisionRecord:
    """Parse a `decision` event of the controller (control/policy.py) or of a trial before the first
    step (run/first_plan.py).
    """
    action, measured = event.get("action"), number(event, "measured_step_time_s")
    plan, others = text(event, "plan"), event.get("alternatives")
    alternatives = tuple(
        _alternative(other)
        for other in (others if isinstance(others, list) else ())
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
        switch_method=switch_method_of(event),
        plan=plan,
        layout=layout or (chosen.layout if chosen else None),
        trigger=text(event, "trigger"),
        current_step_time_s=number(event, "step_time_s"),
        inputs=_inputs(mapping(event, "inputs")),
        alternatives=alternatives,
        measured_step_time_s=measured,
        predicted_step_time_s=predicted
        if predicted is not None or chosen is None
        else chosen.predicted_step_time_s,
    )


def _inputs(values: LoggedEvent) -> LoggedEvent:
    """The inputs of a decision, under their present names."""
    renamed = {OLD_SIGNAL_NAMES.get(name, name): value for name, value in values.items()}
    if conditions := mapping(values, "conditions"):
        renamed["conditions"] = {
            OLD_LINK_NAMES.get(name, name): factor for name, factor in conditions.items()
        }
    return renamed


def _alternative(other: LoggedEvent) -> AlternativeRecord:
    predicted = number(other, "predicted_step_time_s")
    return AlternativeRecord(
        layout=text(other, "layout") or text(other, "flags"),
        plan=text(other, "plan"),
        switch_method=switch_method_of(other),
        predicted_step_time_s=number(other, "step_time_s") if predicted is None else predicted,
        gain_s=number(other, "gain_s"),
        cost_s=number(other, "cost_s"),
        probability=number(other, "probability"),
        why=text(other, "why") or text(other, "verdict"),
    )
