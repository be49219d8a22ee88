"""Sections of a run's report about decisions: the last one in full, and a table of all of them with
their alternatives and inputs.
"""

from optimus_jax.report.components import (
    AT,
    MAX_ROWS,
    newest_rows,
    plan_badge,
    plan_name,
    time_cell,
)
from optimus_jax.report.formatting import (
    UNKNOWN,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_value,
)
from optimus_jax.report.page import Html, collapsible, concatenated, element, note, table
from optimus_jax.report.run_events import AlternativeRecord, DecisionRecord, number, text
from optimus_jax.report.run_history import RunHistory

NONE = "none"
ACTIONS = {"stay": "stay", "switch": "switch", "tried": "trial before step 1", None: UNKNOWN}


def last_decision(history: RunHistory) -> Html:
    """The newest decision with its alternatives and inputs."""
    if not history.decisions:
        return note(
            "No decision is recorded. The controller is"
            f" {text(history.config, 'control') or UNKNOWN}."
        )
    decision = history.decisions[-1]
    summary = [
        element(
            "p", element("strong", f"{ACTIONS[decision.action]}, after step {decision.step:,}")
        ),
        element("p", _why(decision), class_="why"),
    ]
    if decision.plan or decision.layout:
        summary.append(element("p", "Plan: ", plan_name(history, decision.plan, decision.layout)))
    return concatenated(
        element("div", *summary, class_="decision", id="last"), *_details(history, decision)
    )


def all_decisions(history: RunHistory) -> Html | None:
    """Every decision to switch, and the newest of the others; None: there are none."""
    shown, cut = newest_rows(
        history.decisions, MAX_ROWS, "decisions", lambda decision: decision.action == "switch"
    )
    if not shown:
        return None
    rows = [
        [
            f"{one.step:,}",
            time_cell(one.time_s),
            ACTIONS[one.action],
            plan_name(history, one.plan, one.layout) if one.plan or one.layout else NONE,
            one.switch_method or NONE,
            _why(one),
        ]
        for one in shown
    ]
    details = [
        collapsible(f"after step {one.step:,}: {_why(one)}", *parts)
        for one in shown
        if (parts := _details(history, one))
    ]
    head = ("after step", AT, "action", "plan", "switch method", "why")
    return concatenated(
        table("Decisions, oldest first", head, rows),
        cut,
        collapsible("Alternatives and inputs of each decision", *details) if details else "",
    )


def _why(decision: DecisionRecord) -> str:
    if decision.why is None and decision.action == "tried":
        return (
            f"Predicted {format_duration(decision.predicted_step_time_s)} a step, measured"
            f" {format_duration(decision.measured_step_time_s)}."
        )
    return decision.why or "The reason is unknown."


def _details(history: RunHistory, decision: DecisionRecord) -> list[Html]:
    """A decision's trigger, alternatives and inputs."""
    parts = []
    if decision.trigger:
        parts.append(note(f"Trigger: {decision.trigger}."))
    if decision.current_step_time_s is not None:
        parts.append(
            note(
                "Prediction for the plan in use then:"
                f" {format_duration(decision.current_step_time_s)} a step."
            )
        )
    if decision.alternatives:
        head = (
            "layout",
            "predicted step",
            "expected gain",
            "expected cost",
            "probability of a gain",
            "switch method",
            "verdict",
        )
        rows = [
            [
                _layout(history, other),
                format_duration(other.predicted_step_time_s),
                format_duration(other.gain_s),
                format_duration(other.cost_s),
                format_percent(other.probability),
                other.switch_method or UNKNOWN,
                other.why or UNKNOWN,
            ]
            for other in decision.alternatives
        ]
        parts.append(table("Alternatives (predictions)", head, rows, numbers=head[1:5]))
    if decision.inputs:
        parts.append(
            table(
                "Inputs of the decision",
                ("signal", "value"),
                [[str(name), _input(value)] for name, value in decision.inputs.items()],
            )
        )
    return parts


def _layout(history: RunHistory, other: AlternativeRecord) -> Html:
    letters = [plan_badge(history.plans.index(other.plan))] if other.plan in history.plans else []
    return element("span", *letters, other.layout or other.plan or UNKNOWN, class_="layout")


def _input(value: object) -> str:
    """A signal's estimate with spread, sample count and quality; any other value as it is."""
    if not isinstance(value, dict) or "value" not in value:
        return format_value(value)
    if (estimate := number(value, "value")) is None:
        return UNKNOWN
    spread = number(value, "spread")
    return (
        f"{format_number(estimate)}{'' if spread is None else f' ± {format_number(spread, 2)}'}"
        f" ({format_count(number(value, 'count'))} samples,"
        f" {text(value, 'quality') or 'quality ' + UNKNOWN})"
    )
