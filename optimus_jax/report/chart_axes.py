"""Parts of a report's charts that plot against steps: downsampled lines, bands of plans, marks.

A plan has a letter and a colour. A run of many steps is drawn in groups of steps: a line of
medians, in a shade from the minimum to the maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimus_jax.report.formatting import format_duration
from optimus_jax.report.run_events import step_of
from optimus_jax.report.run_history import RunHistory, Span
from optimus_jax.viz.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]

BANDS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION)
"""Colours of plans by index; they repeat, letters do not."""
MAX_POINTS = 1200
"""Maximum number of points along a line; more cannot be told apart."""
LETTER_SHARE = 0.015
"""A band narrower than this share of the width gets no letter."""


@dataclass(frozen=True, kw_only=True)
class Downsampled:
    """A line of medians of groups of points; each array is [groups]."""

    x: Numbers
    """Median x of each group."""
    middle: Numbers
    """Median y of each group."""
    low: Numbers
    """Minimum y of each group."""
    high: Numbers
    """Maximum y of each group."""


def plan_letter(index: int) -> str:
    """Letter of a plan on the page: A, B, ... Z, AA, AB, ..."""
    name = ""
    while index >= 0:
        index, rest = divmod(index, 26)
        name, index = chr(ord("A") + rest) + name, index - 1
    return name


def plan_colour(index: int) -> str:
    """Colour of a plan on the page."""
    return BANDS[index % len(BANDS)]


def downsampled(points: Sequence[tuple[float, float]], per_point: int) -> Downsampled:
    """Median, minimum and maximum of each group of `per_point` neighbours; the last may be
    smaller."""
    table = np.asarray(points, float)
    groups = [table[start : start + per_point] for start in range(0, len(table), per_point)]
    x, middle = np.array([np.median(group, axis=0) for group in groups]).T
    return Downsampled(
        x=x,
        middle=middle,
        low=np.array([group[:, 1].min() for group in groups]),
        high=np.array([group[:, 1].max() for group in groups]),
    )


def draw_line(axes: "Axes", parts: Sequence[Sequence[tuple[float, float]]], name: str) -> str:
    """Draw a line for each part, with one legend entry `name`; return a sentence for the caption if
    the points were grouped.
    """
    per_point = max(1, -(-sum(map(len, parts)) // MAX_POINTS))
    for part in filter(None, parts):
        line = downsampled(part, per_point)
        if per_point > 1:
            axes.fill_between(line.x, line.low, line.high, color=BLUE, alpha=0.25, linewidth=0)
        axes.plot(
            line.x,
            line.middle,
            color=BLUE,
            linewidth=1.2,
            label=name,
            marker="o" if len(line.x) == 1 else None,
            markersize=3,
        )
        name = "_"  # one entry of a legend is enough
    return (
        f" Each point is the median of {per_point:,} steps; the shade spans minimum to maximum."
        if per_point > 1
        else ""
    )


def draw_bands(axes: "Axes", history: RunHistory) -> dict[str, str]:
    """Draw a band behind each span, with the plan's letter and median; return tooltips by gid."""
    left, right = step_limits(history)
    titles = {}
    for index, span in enumerate(history.spans):
        plan = history.plans.index(span.plan)
        axes.axvspan(
            span.first - 0.5, span.last + 0.5, color=plan_colour(plan), alpha=0.22, linewidth=0
        ).set_gid(f"span{index}")
        titles[f"span{index}"] = _span_title(history, span)
        if span.step_time_s is not None:
            axes.hlines(
                span.step_time_s,
                span.first - 0.5,
                span.last + 0.5,
                color=INK,
                linewidth=1,
                linestyle="--",
                zorder=3,
            )
        if span.last + 1 - span.first > LETTER_SHARE * (right - left):
            axes.text(
                (span.first + span.last) / 2,
                1.01,
                plan_letter(plan),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontweight="bold",
            )
    return titles


def mark_switches(axes: "Axes", history: RunHistory, panel: str = "") -> dict[str, str]:
    """Draw a vertical line at each switch and each resume; return tooltips by gid.

    Args:
      panel: prefix of the gids, unique in a figure.
    """
    titles = {}
    for index, switch in enumerate(history.switches):
        is_rollback = switch.kind == "rollback"
        axes.axvline(
            switch.step + 0.5,
            color=VERMILLION if is_rollback else INK,
            linestyle=":" if is_rollback else "-",
            linewidth=1,
        ).set_gid(f"{panel}switch{index}")
        titles[f"{panel}switch{index}"] = (
            f"{switch.kind} after step {switch.step:,} to {switch.layout or 'an unknown layout'}"
        )
    for index, event in enumerate(history.events_named("resume")):
        axes.axvline(step_of(event) + 0.5, color=INK, linestyle=(0, (1, 3)), linewidth=1).set_gid(
            f"{panel}resume{index}"
        )
        titles[f"{panel}resume{index}"] = f"resumed after step {step_of(event):,}"
    return titles


def switch_legend(history: RunHistory) -> str:
    """What a caption says about the lines of `mark_switches`."""
    kinds = {switch.kind for switch in history.switches}
    words = [
        text
        for kind, text in (
            ("remesh", "vertical lines: re-meshes"),
            ("rollback", "dotted vertical lines: rollbacks"),
        )
        if kind in kinds
    ]
    if history.events_named("resume"):
        words.append("sparsely dotted vertical lines: resumes")
    return "".join(f"; {text}" for text in words)


def _span_title(history: RunHistory, span: Span) -> str:
    return (
        f"plan {plan_letter(history.plans.index(span.plan))},"
        f" steps {span.first:,} to {span.last:,}, median {format_duration(span.step_time_s)}:"
        f" {history.layouts.get(span.plan, 'layout unknown')}"
    )


def mark_steps(axes: "Axes", steps: Sequence[int], height: float, marker: str) -> None:
    """Draw a marker at each of these steps; `height` is a fraction of the axes."""
    if steps:  # an empty line would still enlarge the layout
        axes.plot(
            steps,
            [height] * len(steps),
            marker,
            color=VERMILLION,
            transform=axes.get_xaxis_transform(),
            markersize=4,
            clip_on=False,
        )


def legend_above(axes: "Axes") -> None:
    """Put the legend above the axes, on the left."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0, frameon=False)


def step_line(
    points: Sequence[tuple[int, float]], history: RunHistory, scale: float
) -> tuple[list[int], list[float]]:
    """x and y of a line that is extended to the run's last step; y is divided by `scale`."""
    steps, sizes = [step for step, _ in points], [size / scale for _, size in points]
    last = max(steps[-1], history.steps[-1].step if history.steps else 1)
    return [*steps, last], [*sizes, sizes[-1]]


def step_limits(history: RunHistory) -> tuple[float, float]:
    return (
        (history.steps[0].step - 0.5, history.steps[-1].step + 0.5) if history.steps else (0.5, 1.5)
    )


def label_steps(axes: "Axes", history: RunHistory) -> None:
    """Make the axes' x those of the run's steps, with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step", xlim=step_limits(history))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def upper_limit(times: Sequence[float]) -> float:
    """Upper limit of an axis of times, below outliers that would make the rest look flat."""
    threshold = 3 * float(np.percentile(times, 95))
    return 1.08 * (max(times) if max(times) <= threshold else threshold / 1.5) or 1.0


def plain_ticks(axes: "Axes") -> None:
    """Label logarithmic axes with plain numbers: 0.2 instead of 2 x 10^-1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
