"""The section of a run's report about its profiles: where the time of steps went."""

from optimus_jax.planning.traces.step_profile import HEAD, part_rows
from optimus_jax.report.components import plan_name
from optimus_jax.report.formatting import UNKNOWN, format_duration
from optimus_jax.report.page import PageBlock, PageTable, Text
from optimus_jax.report.run_events import LoggedEvent, mapping, number, step_of, text
from optimus_jax.report.run_history import RunHistory


def profiles(history: RunHistory) -> list[PageBlock]:
    """A table for each profile."""
    return [
        block for event in history.events_named("profile") for block in _profile(history, event)
    ]


def _profile(history: RunHistory, event: LoggedEvent) -> list[PageBlock]:
    step_s = number(event, "step_time_s")
    parts_s, beside_s, predicted_s = (
        _times(event, name) for name in ("parts_s", "beside_s", "predicted_s")
    )
    rows = part_rows(step_s, parts_s, beside_s, predicted_s, format_duration)
    first = number(event, "first_step")
    steps = f"Steps {UNKNOWN if first is None else f'{first:,.0f}'} to {step_of(event):,}"
    caption = (
        f"{steps}: {format_duration(step_s)} a step, the mean of the devices of process 0."
        " Exchanges are measured where nothing is computed; beside compute they are in the time of"
        f" other parts. The trace is in {text(event, 'folder') or UNKNOWN}."
    )
    return [
        Text(cells=[f"{steps} on ", plan_name(history, text(event, "plan"))], style="heading"),
        PageTable(caption=caption, head=HEAD, rows=rows, numbers=HEAD[1:]),
    ]


def _times(event: LoggedEvent, name: str) -> dict[str, float]:
    """Seconds by part."""
    found = mapping(event, name)
    return {part: time_s for part in found if (time_s := number(found, part)) is not None}
