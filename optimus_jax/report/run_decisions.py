"""Sections of a run's report about decisions: the last one in full, and every one of them, folded
under its sentence.
"""

from optimus_jax.report.components import MAX_ROWS, newest_rows, plan_name
from optimus_jax.report.formatting import (
    UNKNOWN,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_time,
    format_value,
)
from optimus_jax.report.page import Cell, Fold, PageBlock, PageTable, PlanName, Text, note
from optimus_jax.report.run_events import AlternativeRecord, DecisionRecord, number, text
from optimus_jax.report.run_history import RunHistory

ACTIONS = {"stay": "stay", "switch": "switch", "tried": "trial before step 1", None: UNKNOWN}


def last_decision(history: RunHistory) -> list[PageBlock]:
    """The newest decision with its alternatives and inputs."""
    if not history.decisions:
        return []
    decision = history.decisions[-1]
    return [
        Text(cells=_heading(history, decision)),
        Text(cells=[_why(decision)], style="why"),
        *_details(history, decision),
    ]


def all_decisions(history: RunHistory) -> list[PageBlock]:
    """Every decision to switch, and the newest of the others, each folded under its sentence."""
    shown, cut = newest_rows(
        history.decisions, MAX_ROWS, "decisions", lambda decision: decision.action == "switch"
    )
    folds = [
        Fold(
            summary=[*_heading(history, one), f": {_why(one)}"],
            blocks=[
                note(
                    f"At {format_time(one.time_s)} UTC"
                    + (f"; switch method: {one.switch_method}." if one.switch_method else ".")
                ),
                *_details(history, one),
            ],
        )
        for one in shown
    ]
    return [*folds, *cut]


def _heading(history: RunHistory, decision: DecisionRecord) -> list[Cell]:
    """When a decision was made, what it was, and for which plan."""
    words = f"After step {decision.step:,}: {ACTIONS[decision.action]}"
    if not (decision.plan or decision.layout):
        return [words]
    return [f"{words} ", plan_name(history, decision.plan, decision.layout)]


def _why(decision: DecisionRecord) -> str:
    if decision.why is None and decision.action == "tried":
        return (
            f"Predicted {format_duration(decision.predicted_step_time_s)} a step, measured"
            f" {format_duration(decision.measured_step_time_s)}."
        )
    return decision.why or "The reason is unknown."


def _details(history: RunHistory, decision: DecisionRecord) -> list[PageBlock]:
    """A decision's trigger, alternatives and inputs."""
    parts: list[PageBlock] = []
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
        caption = "Alternatives (predictions)"
        parts.append(PageTable(caption=caption, head=head, rows=rows, numbers=head[1:5]))
    if decision.inputs:
        parts.append(
            PageTable(
                caption="Inputs of the decision",
                head=("signal", "value"),
                rows=[[str(name), _input(value)] for name, value in decision.inputs.items()],
            )
        )
    return parts


def _layout(history: RunHistory, other: AlternativeRecord) -> PlanName:
    return plan_name(history, other.plan, other.layout, whole=True)


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
