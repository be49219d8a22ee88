"""The pictures of a run's report: loss, step time, predictions, memory, and what each switch was
busy with.

Colours tell plans apart, and so does a letter on each band. A run of many steps is drawn by groups
of steps: a line for their medians, in a shade from the least to the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimus_jax.report.formatting import format_bytes, format_duration, format_plural
from optimus_jax.report.run_events import is_finite_number, number, step_of
from optimus_jax.report.run_history import RunHistory, Span, Switch
from optimus_jax.training.numbers import short
from optimus_jax.viz.canvas import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]

BANDS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION)
"""Of plans, in the order in which they ran; the letter says which when they come round again."""
WIDTH, HEIGHT = 9.0, 2.8
"""Of a figure, inches."""
MOST_POINTS = 1200
"""Along a line; more could not be told apart."""
LETTER_SHARE = 0.015
"""Of the width, below which a band has no letter."""
WHILE_TRAINING = ("prepare", "canary")
"""Phases of a switch that training does not wait for."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with the words that belong to it."""

    figure: "Figure"
    label: str
    """What it shows, for who cannot see it."""
    caption: str
    titles: dict[str, str] = field(default_factory=dict)
    """gid of an artist -> what a pointer is told."""


@dataclass(frozen=True, kw_only=True)
class Downsampled:
    """A line of few enough points."""

    x: Numbers
    """[points]"""
    middle: Numbers
    """[points]: medians of what a point stands for; beside them the least and the most."""
    low: Numbers
    high: Numbers


def letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ...: what a plan is called on a page."""
    name = ""
    while place >= 0:
        place, rest = divmod(place, 26)
        name, place = chr(ord("A") + rest) + name, place - 1
    return name


def band(place: int) -> str:
    """Colour of a plan."""
    return BANDS[place % len(BANDS)]


def downsampled(points: Sequence[tuple[float, float]], per_point: int) -> Downsampled:
    """Medians, least and most of neighbouring values, in groups of `per_point` but for the last."""
    table = np.asarray(points, float)
    groups = [table[cut : cut + per_point] for cut in range(0, len(table), per_point)]
    x, middle = np.array([np.median(group, axis=0) for group in groups]).T
    return Downsampled(
        x=x,
        middle=middle,
        low=np.array([group[:, 1].min() for group in groups]),
        high=np.array([group[:, 1].max() for group in groups]),
    )


def draw_loss(history: RunHistory) -> Chart | None:
    """Training and held-out loss by step; None if no step has a loss."""
    points = [(one.step, one.loss) for one in history.steps if is_finite_number(one.loss)]
    if not points:
        return None
    figure, (axes,) = new_figure(WIDTH, HEIGHT)
    grouping = _draw_line(axes, [points], "training")
    held_out = [
        (step_of(event), loss)
        for event in history.named("eval")
        if (loss := number(event, "loss")) is not None
    ]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            "D--",
            color=VERMILLION,
            linewidth=1,
            markersize=4,
            label="held out",
        )
        _legend_above(axes)
    skipped = [one.step for one in history.steps if one.skipped]
    _mark_at(axes, skipped, 0.02, "x")
    axes.set(xlabel="step", ylabel="loss, nats per token", xlim=_limits(history))
    (first, start), (last, end) = points[0], points[-1]
    evaluated = (
        f" Held out: {short(held_out[-1][1], 4)} after step {held_out[-1][0]:,}."
        if held_out
        else ""
    )
    left_out = (
        f" Crosses: {format_plural(len(skipped), 'step')} without an update, as loss or gradient was not"
        " finite."
        if skipped
        else ""
    )
    return Chart(
        figure=figure,
        label=(
            f"Loss by step: from {short(start, 4)} at step {first:,} to {short(end, 4)} at step"
            f" {last:,}.{evaluated}"
        ),
        caption=f"Measured.{grouping}{left_out}",
    )


def draw_step_times(history: RunHistory) -> Chart | None:
    """Time of each step over bands of the plans that ran; None if no time is known."""
    times = [one.step_time_s for one in history.steps if is_finite_number(one.step_time_s)]
    if not times:
        return None
    figure, (axes,) = new_figure(WIDTH, HEIGHT + 0.3)
    top = _top(times)
    axes.set(xlabel="step", ylabel="seconds a step", ylim=(0, top), xlim=_limits(history))
    titles = _draw_bands(axes, history) | _mark_switches(axes, history)
    grouping = _draw_line(
        axes,
        [
            [
                (one.step, one.step_time_s)
                for one in history.within(span)
                if is_finite_number(one.step_time_s)
            ]
            for span in history.spans
        ],
        "step time",
    )
    above = [
        one.step
        for one in history.steps
        if is_finite_number(one.step_time_s) and one.step_time_s > top
    ]
    _mark_at(axes, above, 0.97, "^")
    medians = "; ".join(
        f"plan {letter(history.plans.index(span.plan))} from step {span.first:,}:"
        f" {format_duration(span.step_time_s)}"
        for span in history.spans[:12]
    )
    cut = (
        f" Triangles: {format_plural(len(above), 'step')} took longer than the chart is high, at most"
        f" {format_duration(max(times))}."
        if above
        else ""
    )
    return Chart(
        figure=figure,
        titles=titles,
        label=f"Time of each step, with bands of plans. Medians: {medians}.",
        caption=(
            "Measured. Bands and letters are plans, dashed lines their"
            f" medians{_switch_words(history)}.{grouping}{cut}"
        ),
    )


def draw_predictions(history: RunHistory) -> Chart | None:
    """Measured over predicted step time, a point for each comparison; None if there is none."""
    pairs = [(pair, pair.measured_s) for pair in history.comparisons if pair.measured_s]
    if not pairs:
        return None
    figure, (axes,) = new_figure(5.2, 3.6)
    ends = [value for pair, measured_s in pairs for value in (pair.predicted_s, measured_s)]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    axes.plot([low, high], [low, high], "--", color=INK, linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="predicted seconds a step",
        ylabel="measured seconds a step",
    )
    _plain_ticks(axes)
    titles = {}
    for place, (pair, measured_s) in enumerate(pairs):
        plan = history.plans.index(pair.plan) if pair.plan in history.plans else None
        colour, name = (BLUE, "") if plan is None else (band(plan), letter(plan))
        marks = axes.plot(
            pair.predicted_s,
            measured_s,
            "s" if pair.is_trial else "o",
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            markersize=7,
        )
        marks[0].set_gid(f"pair{place}")
        titles[f"pair{place}"] = (
            f"{pair.layout or 'layout unknown'}: predicted {format_duration(pair.predicted_s)}, measured"
            f" {format_duration(measured_s)}"
        )
        axes.annotate(
            name,
            (pair.predicted_s, measured_s),
            xytext=(6, -3),
            textcoords="offset points",
            fontsize=8,
        )
    return Chart(
        figure=figure,
        titles=titles,
        label=(
            f"Measured over predicted step time of {len(pairs)} plans; the table below has the"
            " numbers."
        ),
        caption=(
            "Below the dashed line a plan was faster than predicted, above it slower. Squares were"
            " trials before the first step, circles steps of the run."
        ),
    )


def draw_memory(history: RunHistory) -> Chart | None:
    """Most memory in use on a device, and what each compiled step needs; None if neither is
    known."""
    peaks = [
        (one.step, float(one.peak_bytes))
        for one in history.steps
        if one.peak_bytes is not None and is_finite_number(one.peak_bytes)
    ]
    compiled = [
        (step_of(event), size)
        for event in history.named("compile")
        if (size := number(event, "step_bytes_per_device")) is not None
    ]
    if not (peaks or compiled):
        return None
    most = max(size for _, size in [*peaks, *compiled])
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    figure, (axes,) = new_figure(WIDTH, HEIGHT - 0.4)
    if peaks:
        axes.plot(
            *_steps_of(peaks, history, scale),
            color=BLUE,
            drawstyle="steps-post",
            label="most in use until then (measured)",
        )
    if compiled:
        axes.plot(
            *_steps_of(compiled, history, scale),
            "--",
            color=VERMILLION,
            drawstyle="steps-post",
            label="compiled step needs (the compiler's figure)",
        )
    _legend_above(axes)
    axes.set(
        xlabel="step",
        ylabel=f"{unit} on a device",
        xlim=_limits(history),
        ylim=(0, 1.15 * most / scale),
    )
    titles = _mark_switches(axes, history)
    said = "; ".join(
        [
            (
                f"at most {format_bytes(max(size for _, size in peaks))} in use"
                if peaks
                else "how much was in use is unknown, as the backend does not say"
            ),
            *(
                [f"the last compiled step needs {format_bytes(compiled[-1][1])}"]
                if compiled
                else []
            ),
        ]
    )
    return Chart(
        figure=figure,
        titles=titles,
        label=f"Memory on a device by step: {said}.",
        caption=f"On one device: {said}.",
    )


def draw_switch(switch: Switch) -> Chart | None:
    """A timeline of a switch's phases, one after the other; None if no phase's time is known."""
    total, begin, titles = sum(seconds or 0.0 for _, seconds in switch.phases_s), 0.0, {}
    if not total:
        return None
    figure, (axes,) = new_figure(WIDTH, 0.6 + 0.25 * len(switch.phases_s))
    for row, (name, seconds) in enumerate(switch.phases_s):
        if seconds is None:
            continue
        waits = name not in WHILE_TRAINING
        bar = axes.barh(
            row,
            max(seconds, total / 800),
            left=begin,
            height=0.7,
            facecolor=ORANGE if waits else SKY,
            edgecolor=INK,
            linewidth=0.5,
            hatch=None if waits else "///",
        )
        bar[0].set_gid(f"phase{row}")
        titles[f"phase{row}"] = (
            f"{name}: {format_duration(seconds)}, {'training waits' if waits else 'training goes on'}"
        )
        begin += seconds
    said = [f"{name} {format_duration(seconds)}" for name, seconds in switch.phases_s]
    axes.set_yticks(range(len(said)), said)
    axes.set(
        xlabel="seconds, one phase after the other",
        xlim=(0, total * 1.02),
        ylim=(len(said) - 0.4, -0.6),
    )
    return Chart(
        figure=figure,
        titles=titles,
        label=f"Phases of the {switch.kind} after step {switch.step:,}: {', '.join(said)}.",
        caption="Measured. Training waits in plain bars and goes on in hatched ones.",
    )


def _draw_line(axes: "Axes", parts: Sequence[Sequence[tuple[float, float]]], name: str) -> str:
    """A line for each part, under one name; returns what a caption says of its points."""
    per_point = max(1, -(-sum(map(len, parts)) // MOST_POINTS))
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
        f" Each point is the median of {per_point:,} steps, in a shade from the least to the most."
        if per_point > 1
        else ""
    )


def _draw_bands(axes: "Axes", history: RunHistory) -> dict[str, str]:
    """A band behind the steps of each span, with the plan's letter and median; returns what a
    pointer is told.
    """
    left, right = _limits(history)
    titles = {}
    for place, span in enumerate(history.spans):
        plan = history.plans.index(span.plan)
        axes.axvspan(
            span.first - 0.5, span.last + 0.5, color=band(plan), alpha=0.22, linewidth=0
        ).set_gid(f"span{place}")
        titles[f"span{place}"] = _span_words(history, span)
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
                letter(plan),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontweight="bold",
            )
    return titles


def _mark_switches(axes: "Axes", history: RunHistory) -> dict[str, str]:
    titles = {}
    for place, switch in enumerate(history.switches):
        is_back = switch.kind == "rollback"
        axes.axvline(
            switch.step + 0.5,
            color=VERMILLION if is_back else INK,
            linestyle=":" if is_back else "-",
            linewidth=1,
        ).set_gid(f"switch{place}")
        titles[f"switch{place}"] = (
            f"{switch.kind} after step {switch.step:,} to"
            f" {switch.layout or 'a layout that is unknown'}"
        )
    return titles


def _switch_words(history: RunHistory) -> str:
    kinds = {switch.kind for switch in history.switches}
    words = [
        text
        for kind, text in (
            ("remesh", "upright lines re-meshes"),
            ("rollback", "dotted ones rollbacks"),
        )
        if kind in kinds
    ]
    return "".join(f", {text}" for text in words)


def _span_words(history: RunHistory, span: Span) -> str:
    return (
        f"plan {letter(history.plans.index(span.plan))}, steps {span.first:,} to {span.last:,},"
        f" median {format_duration(span.step_time_s)}: {history.layouts.get(span.plan, 'layout unknown')}"
    )


def _mark_at(axes: "Axes", steps: Sequence[int], height: float, marker: str) -> None:
    """A marker at each of these steps, at a share of the height."""
    if steps:  # an empty line would still take room
        axes.plot(
            steps,
            [height] * len(steps),
            marker,
            color=VERMILLION,
            transform=axes.get_xaxis_transform(),
            markersize=4,
            clip_on=False,
        )


def _legend_above(axes: "Axes") -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0, frameon=False)


def _steps_of(
    points: Sequence[tuple[int, float]], history: RunHistory, scale: float
) -> tuple[list[int], list[float]]:
    """x and y of a line that keeps its last value to the run's last step."""
    steps, sizes = [step for step, _ in points], [size / scale for _, size in points]
    last = max(steps[-1], history.steps[-1].step if history.steps else 1)
    return [*steps, last], [*sizes, sizes[-1]]


def _limits(history: RunHistory) -> tuple[float, float]:
    return (
        (history.steps[0].step - 0.5, history.steps[-1].step + 0.5) if history.steps else (0.5, 1.5)
    )


def _top(times: Sequence[float]) -> float:
    """End of the axis: all of them, unless a few are so long that the others would be a flat
    line."""
    usual = 3 * float(np.percentile(times, 95))
    return 1.08 * (max(times) if max(times) <= usual else usual / 1.5) or 1.0


def _plain_ticks(axes: "Axes") -> None:
    """0.2 instead of 2 x 10^-1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
