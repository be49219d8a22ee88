"""What a run's report says of decisions: the last one in full, all of them as a table, with what
each rested on.
"""

from optimus_jax.report.components import AT, MOST_ROWS, badge, newest_rows, plan_name, time_cell
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
ACTIONS = {"stay": "stay", "switch": "switch", "tried": "tried at the start", None: UNKNOWN}


def last_decision(history: RunHistory) -> Html:
    """The newest decision, with what it weighed and what it rested on."""
    if not history.decisions:
        return note(
            "No decision is recorded. The controller is"
            f" {text(history.config, 'control') or UNKNOWN}."
        )
    decision = history.decisions[-1]
    said = [
        element(
            "p", element("strong", f"{ACTIONS[decision.action]}, after step {decision.step:,}")
        ),
        element("p", _why(decision), class_="why"),
    ]
    if decision.plan or decision.layout:
        said.append(element("p", "Plan: ", plan_name(history, decision.plan, decision.layout)))
    return concatenated(
        element("div", *said, class_="said", id="last"), *_grounds(history, decision)
    )


def all_decisions(history: RunHistory) -> Html:
    """Every switch that was decided on, and the newest of the others."""
    shown, cut = newest_rows(
        history.decisions, MOST_ROWS, "decisions", lambda decision: decision.action == "switch"
    )
    if not shown:
        return note("None is recorded.")
    rows = [
        [
            f"{one.step:,}",
            time_cell(one.time_s),
            ACTIONS[one.action],
            plan_name(history, one.plan, one.layout) if one.plan or one.layout else NONE,
            one.rung or NONE,
            _why(one),
        ]
        for one in shown
    ]
    rested = [
        collapsible(f"after step {one.step:,}: {_why(one)}", *grounds)
        for one in shown
        if (grounds := _grounds(history, one))
    ]
    return concatenated(
        table("Decisions, oldest first", ("after step", AT, "action", "plan", "rung", "why"), rows),
        cut,
        collapsible("What each of them rested on", *rested) if rested else "",
    )


def _why(decision: DecisionRecord) -> str:
    if decision.why is None and decision.action == "tried":
        return (
            f"Predicted {format_duration(decision.predicted_step_time_s)} a step, measured"
            f" {format_duration(decision.measured_step_time_s)}."
        )
    return decision.why or f"Why: {UNKNOWN}."


def _grounds(history: RunHistory, decision: DecisionRecord) -> list[Html]:
    """What a decision rested on."""
    parts = []
    if decision.trigger:
        parts.append(note(f"Put up for decision by: {decision.trigger}."))
    if decision.present_step_time_s is not None:
        parts.append(
            note(
                "Predicted under the plan that the run had:"
                f" {format_duration(decision.present_step_time_s)} a step."
            )
        )
    if decision.alternatives:
        head = (
            "layout",
            "predicted step",
            "expected gain",
            "expected cost",
            "probability of a gain",
            "rung",
            "verdict",
        )
        rows = [
            [
                _layout(history, other),
                format_duration(other.predicted_step_time_s),
                format_duration(other.gain_s),
                format_duration(other.cost_s),
                format_percent(other.probability),
                other.rung or UNKNOWN,
                other.why or UNKNOWN,
            ]
            for other in decision.alternatives
        ]
        parts.append(
            table("Alternatives that were weighed (predictions)", head, rows, numbers=head[1:5])
        )
    if decision.inputs:
        parts.append(
            table(
                "What was known",
                ("signal", "value"),
                [[str(name), _input(value)] for name, value in decision.inputs.items()],
            )
        )
    return parts


def _layout(history: RunHistory, other: AlternativeRecord) -> Html:
    letters = [badge(history.plans.index(other.plan))] if other.plan in history.plans else []
    return element("span", *letters, other.layout or other.plan or UNKNOWN, class_="layout")


def _input(value: object) -> str:
    """A reading in words; anything else as it is."""
    if not isinstance(value, dict) or "value" not in value:
        return format_value(value)
    if (middle := number(value, "value")) is None:
        return UNKNOWN
    spread = number(value, "spread")
    return (
        f"{format_number(middle)}{'' if spread is None else f' ± {format_number(spread, 2)}'}"
        f" ({format_count(number(value, 'count'))} samples,"
        f" {text(value, 'quality') or 'quality ' + UNKNOWN})"
    )
