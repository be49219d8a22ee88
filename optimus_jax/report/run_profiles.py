"""The section of a run's report about its profiles: where the time of steps went, and what was in
memory.
"""

from optimus_jax.planning.traces.peak_memory import HEAD as MEMORY_HEAD
from optimus_jax.planning.traces.peak_memory import held_rows
from optimus_jax.planning.traces.step_profile import HEAD, part_rows
from optimus_jax.report.components import plan_name
from optimus_jax.report.formatting import UNKNOWN, format_bytes, format_duration
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
        _numbers(event, name) for name in ("parts_s", "beside_s", "predicted_s")
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
        *_memory(event),
    ]


def _memory(event: LoggedEvent) -> list[PageBlock]:
    """A table of what is in memory; none of a profile of an earlier version."""
    counted, predicted = (_numbers(event, name) for name in ("memory_bytes", "predicted_bytes"))
    if not counted:
        return []
    caption = (
        "A device's memory when a step needs most, counted in the compiled step, of"
        f" {format_bytes(number(event, 'allocated_bytes'))} that XLA allocates for it."
    )
    rows = held_rows(counted, predicted, format_bytes)
    return [PageTable(caption=caption, head=MEMORY_HEAD, rows=rows, numbers=MEMORY_HEAD[1:])]


def _numbers(event: LoggedEvent, name: str) -> dict[str, float]:
    """Seconds or bytes by part."""
    found = mapping(event, name)
    return {part: value for part in found if (value := number(found, part)) is not None}
