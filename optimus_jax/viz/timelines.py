"""Timelines of pipeline schedules, with bubbles and memory, for comparison.

The horizontal axis is time, not ticks: a tick lasts as long as the kinds of work (forward,
backward) that any stage does in it, because all stages advance together (pipeline/schedule.py,
`critical_path`). The unit of time is the forward of one microbatch through all layers of one
device; the head is left out. Times are computed from schedule tables; nothing is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.chart import label
from optimus_jax.pipeline.schedule import IDLE as NO_TASK
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.viz.canvas import (
    BLUE,
    IDLE,
    INK,
    LINES,
    MARKERS,
    ORANGE,
    SKY,
    STRONG,
    YELLOW,
    ink_on,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD_COLOURS, BACKWARD_COLOURS = (BLUE, SKY), (ORANGE, YELLOW)
"""Colours of even and of odd repeats."""
BACKWARD_TIME = 2.0
"""Time of a microbatch's backward, in forwards: a matmul has two gradients. With recomputation it
is 3."""
BUBBLE_LABEL = "bubble, % of the time without idle slots"
WIDTH = 13.0
"""Width of a figure in inches, as wide as a notebook."""
CHARACTER = 0.065
"""Width in inches of a digit of a task's number. A number wider than its box is left out."""


@dataclass(frozen=True, kw_only=True)
class TimedTask:
    """A task of a schedule with its time."""

    stage: int
    start: float
    """Start, in units of one forward pass."""
    duration: float
    is_forward: bool
    task: int
    """microbatch * num_repeats + repeat"""


def timed_tasks(schedule: Schedule, backward_time: float = BACKWARD_TIME) -> list[TimedTask]:
    """All tasks with their times; within a tick, forward runs before backward on all stages."""
    begins, forward_time = _tick_begins(schedule, backward_time), 1 / schedule.num_repeats
    has_forward = (schedule.forward != NO_TASK).any(axis=1)
    tasks = []
    for table, is_forward in ((schedule.forward, True), (schedule.backward, False)):
        for tick, stage in np.argwhere(table != NO_TASK).tolist():
            wait = 0.0 if is_forward or not has_forward[tick] else forward_time
            tasks.append(
                TimedTask(
                    stage=stage,
                    start=float(begins[tick]) + wait,
                    is_forward=is_forward,
                    task=int(table[tick, stage]),
                    duration=forward_time * (1.0 if is_forward else backward_time),
                )
            )
    return tasks


def _tick_begins(schedule: Schedule, backward_time: float) -> NDArray[np.float64]:
    """[ticks + 1]: start of each tick, and end of the last."""
    kinds = [(table != NO_TASK).any(axis=1) for table in (schedule.forward, schedule.backward)]
    return (
        np.concatenate([[0.0], np.cumsum(kinds[0] + backward_time * kinds[1])])
        / schedule.num_repeats
    )


def in_flight_over_time(schedule: Schedule) -> NDArray[np.float64]:
    """[ticks, stages]: microbatches whose activations a stage holds during each tick; a repeat
    counts as its share of the layers.
    """
    change = (schedule.forward != NO_TASK).astype(float)
    change[1:] -= (schedule.backward != NO_TASK)[:-1]
    return change.cumsum(axis=0) / schedule.num_repeats


def _times(schedule: Schedule, backward_time: float) -> tuple[float, float]:
    """Forward and backward time of one task, in the unit of this module."""
    return 1 / schedule.num_repeats, backward_time / schedule.num_repeats


def summary(schedules: Sequence[Schedule], backward_time: float = BACKWARD_TIME) -> str:
    """Time and memory of each schedule as a Markdown table."""
    lines = [
        (
            "| schedule | stages | microbatches | repeats | step time, in forwards | bubble | peak"
            " microbatches in flight, by stage | slots for residuals, inputs, cotangents |"
        ),
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for schedule in schedules:
        times = _times(schedule, backward_time)
        peaks, slots = (
            in_flight_over_time(schedule).max(axis=0),
            Buffers.of(schedule, keep_residuals=True),
        )
        lines.append(
            f"| {schedule_name(schedule)} | {schedule.num_stages} | {schedule.num_microbatches} |"
            f" {schedule.num_repeats} | {schedule.critical_path(*times):.4g} |"
            f" {schedule.bubble(*times):.1%} | {', '.join(f'{n:.3g}' for n in peaks)} |"
            f" {slots.num_residuals}, {slots.num_inputs}, {slots.num_cotangents} |"
        )
    return "\n".join(lines) + "\n"


def schedule_name(schedule: Schedule) -> str:
    """Name of a schedule with its number of repeats and whether it has slack."""
    return (
        schedule.name
        + (f", {schedule.num_repeats} repeats" if schedule.num_repeats > 1 else "")
        + (", slack" if schedule.latency > 1 else "")
    )


def draw_timelines(schedules: Sequence[Schedule], backward_time: float = BACKWARD_TIME) -> "Figure":
    """A timeline for each schedule, one below the other with a common time axis."""
    heights = [schedule.num_stages for schedule in schedules]
    figure, panels = new_figure(
        WIDTH,
        0.9 + sum(0.75 + 0.32 * height for height in heights),
        rows=len(schedules),
        sharex=True,
    )
    last = max(_tick_begins(schedule, backward_time)[-1] for schedule in schedules)
    for axes, schedule in zip(panels, schedules, strict=True):
        _draw_timeline(axes, schedule, backward_time, last)
    panels[-1].set_xlabel(
        f"time (1 = forward of a microbatch on one device; its backward takes {backward_time:g})"
    )
    _legend(figure, any(schedule.num_repeats > 1 for schedule in schedules))
    return figure


def _draw_timeline(axes: "Axes", schedule: Schedule, backward_time: float, last: float) -> None:
    end = _tick_begins(schedule, backward_time)[-1]
    for stage in range(schedule.num_stages):
        axes.broken_barh([(0, end)], (stage + 0.06, 0.88), color=IDLE, linewidth=0)
    for task in timed_tasks(schedule, backward_time):
        repeat = task.task % schedule.num_repeats
        colour = (FORWARD_COLOURS if task.is_forward else BACKWARD_COLOURS)[repeat % 2]
        axes.broken_barh(
            [(task.start, task.duration)],
            (task.stage + 0.06, 0.88),
            facecolor=colour,
            edgecolor="white",
            linewidth=0.6,
        )
        number = label(schedule, task.task)
        if task.duration / last * WIDTH >= CHARACTER * (len(number) + 1):
            axes.text(
                task.start + task.duration / 2,
                task.stage + 0.52,
                number,
                ha="center",
                va="center",
                fontsize=6.5,
                color=ink_on(colour),
            )
    bubble, in_flight = (
        schedule.bubble(*_times(schedule, backward_time)),
        in_flight_over_time(schedule).max(),
    )
    axes.set_title(
        f"{schedule_name(schedule)}: time {end:.4g}, bubble {bubble:.1%}, at most {in_flight:.3g}"
        " microbatches in flight on a stage",
        loc="left",
        fontsize=10,
        color=INK,
    )
    axes.set(
        xlim=(0, last), ylim=(schedule.num_stages, 0), yticks=np.arange(schedule.num_stages) + 0.5
    )
    axes.set_yticklabels([f"stage {stage}" for stage in range(schedule.num_stages)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _legend(figure: "Figure", has_repeats: bool) -> None:
    from matplotlib.patches import Patch

    names = {"forward": FORWARD_COLOURS, "backward": BACKWARD_COLOURS}
    entries = [
        Patch(
            color=colour,
            label=name
            + (f", {repeats} visits (a, c)" if repeats == "even" else f", {repeats} visits (b, d)")
            * has_repeats,
        )
        for name, colours in names.items()
        for colour, repeats in zip(colours[: 1 + has_repeats], ("even", "odd"), strict=False)
    ]
    figure.legend(
        handles=[*entries, Patch(color=IDLE, label="idle")],
        loc="outside upper right",
        ncols=len(entries) + 1,
        fontsize=8,
        frameon=False,
    )


def draw_memory(schedules: Sequence[Schedule], backward_time: float = BACKWARD_TIME) -> "Figure":
    """Activations on the most loaded stage over time, and each schedule's bubble against its
    memory."""
    figure, (over_time, compared) = new_figure(WIDTH, 4.2, columns=2)
    for number, schedule in enumerate(schedules):
        colour, line, marker = _line_style(number)
        in_flight, begins = in_flight_over_time(schedule), _tick_begins(schedule, backward_time)
        stage = int(in_flight.max(axis=0).argmax())
        over_time.stairs(
            in_flight[:, stage],
            begins,
            color=colour,
            linestyle=line,
            linewidth=1.8,
            label=f"{schedule_name(schedule)} (stage {stage})",
        )
        bubble = schedule.bubble(*_times(schedule, backward_time))
        compared.plot(
            100 * bubble,
            in_flight.max(),
            marker=marker,
            color=colour,
            markersize=9,
            linestyle="none",
        )
        compared.annotate(
            schedule_name(schedule),
            (100 * bubble, in_flight.max()),
            textcoords="offset points",
            xytext=(8, 4),
            fontsize=8,
        )
    over_time.set(
        title="activations on the most loaded stage",
        xlabel="time (1 = forward of a microbatch on one device)",
        ylabel="microbatches through all layers of the device",
    )
    compared.set(
        title="bubble and memory of each schedule: lower is better on both axes",
        xlabel=BUBBLE_LABEL,
        ylabel="peak microbatches in flight on a stage",
    )
    compared.margins(x=0.25, y=0.15)
    compared.set_xlim(left=0)
    compared.set_ylim(bottom=0)
    # room for the legend
    over_time.set_ylim(0, (1.1 + 0.06 * len(schedules)) * over_time.get_ylim()[1])
    over_time.legend(fontsize=8, frameon=False, ncols=2, loc="upper center")
    return figure


def draw_by_microbatches(schedules: Mapping[int, Sequence[Schedule]]) -> "Figure":
    """Bubble and memory against the number of microbatches.

    Args:
      schedules: number of microbatches -> the same schedules in the same order.
    """
    figure, (bubbles, in_flight) = new_figure(WIDTH, 4, columns=2)
    for number, column in enumerate(zip(*schedules.values(), strict=True)):
        colour, line, marker = _line_style(number)
        for axes, values in (
            (bubbles, [100 * schedule.bubble() for schedule in column]),
            (in_flight, [in_flight_over_time(schedule).max() for schedule in column]),
        ):
            axes.plot(
                values, label=schedule_name(column[0]), color=colour, linestyle=line, marker=marker
            )
    for axes, title, unit in (
        (bubbles, "bubble", BUBBLE_LABEL),
        (in_flight, "activations on the most loaded stage", "microbatches in flight"),
    ):
        axes.set(title=title, xlabel="microbatches of a step", ylabel=unit)
        axes.set_xticks(range(len(schedules)), [str(count) for count in schedules])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    return figure


def _line_style(number: int) -> tuple[str, str, str]:
    """Colour, line style and marker of the schedule with this index."""
    return STRONG[number % len(STRONG)], LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
