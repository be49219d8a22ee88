"""The section of a run's report about its profiles: where the time of steps went."""

from optimus_jax.report.components import plan_name
from optimus_jax.report.formatting import UNKNOWN, format_duration, format_percent
from optimus_jax.report.page import Html, concatenated, element, table
from optimus_jax.report.run_events import LoggedEvent, mapping, number, step_of, text
from optimus_jax.report.run_history import RunHistory

NOTHING = "-"
HEAD = ("part of the step", "measured", "of the step", "beside compute", "predicted")


def profiles(history: RunHistory) -> Html | None:
    """A table for each profile; None: there is none."""
    found = history.events_named("profile")
    return concatenated(*(_profile(history, event) for event in found)) if found else None


def _profile(history: RunHistory, event: LoggedEvent) -> Html:
    parts, beside, predicted = (
        mapping(event, name) for name in ("parts_s", "beside_s", "predicted_s")
    )
    step_s = number(event, "step_time_s")
    rows = []
    for name in dict.fromkeys((*parts, *predicted)):
        time_s = number(parts, name)
        share = time_s / step_s if time_s is not None and step_s else None
        rows.append(
            [
                name,
                _or_dash(time_s),
                format_percent(share) if share is not None else NOTHING,
                _or_dash(number(beside, name)),
                _or_dash(number(predicted, name)),
            ]
        )
    total = sum(number(predicted, name) or 0.0 for name in predicted)
    rows.append(["step", _or_dash(step_s), "100.0%", NOTHING, _or_dash(total or None)])
    first = number(event, "first_step")
    steps = f"Steps {UNKNOWN if first is None else f'{first:,.0f}'} to {step_of(event):,}"
    caption = (
        f"{steps}: {format_duration(step_s)} a step, the mean of the devices of process 0."
        " Exchanges are measured where nothing is computed; beside compute they are in the time of"
        f" other parts. The trace is in {text(event, 'folder') or UNKNOWN}."
    )
    heading = element("h3", f"{steps} on ", plan_name(history, text(event, "plan")))
    return concatenated(heading, table(caption, HEAD, rows, numbers=HEAD[1:]))


def _or_dash(time_s: float | None) -> str:
    """A time; a dash for what a part does not have."""
    return NOTHING if time_s is None else format_duration(time_s)
