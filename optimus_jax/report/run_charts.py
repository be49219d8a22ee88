"""Charts of a run's report: loss, step time, predictions, memory, and the phases of a switch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimus_jax.errors import counted
from optimus_jax.report.chart_axes import (
    draw_bands,
    draw_line,
    label_steps,
    legend_above,
    mark_steps,
    mark_switches,
    plain_ticks,
    plan_colour,
    plan_letter,
    step_line,
    switch_legend,
    upper_limit,
)
from optimus_jax.report.formatting import format_bytes, format_duration
from optimus_jax.report.run_events import is_finite_number, number, step_of
from optimus_jax.report.run_history import RunHistory, Switch
from optimus_jax.training.numbers import short
from optimus_jax.viz.canvas import BLUE, INK, ORANGE, SKY, VERMILLION, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 9.0, 2.8
"""Size of a chart in inches."""
WHILE_TRAINING = ("prepare",)
"""Phases of a switch during which training continues."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with its texts."""

    figure: "Figure"
    label: str
    """Description for screen readers."""
    caption: str
    titles: dict[str, str] = field(default_factory=dict)
    """gid of an artist -> tooltip."""


def draw_loss(history: RunHistory) -> Chart | None:
    """Training and held-out loss against the step; None if no step has a loss."""
    points = [(one.step, one.loss) for one in history.steps if is_finite_number(one.loss)]
    if not points:
        return None
    figure, (axes,) = new_figure(WIDTH, HEIGHT)
    grouping = draw_line(axes, [points], "training")
    held_out = [
        (step_of(event), loss)
        for event in history.events_named("eval")
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
        legend_above(axes)
    skipped = [one.step for one in history.steps if one.skipped]
    mark_steps(axes, skipped, 0.02, "x")
    axes.set(ylabel="loss, nats per token")
    label_steps(axes, history)
    (first, start), (last, end) = points[0], points[-1]
    evaluated = (
        f" Held out: {short(held_out[-1][1], 4)} after step {held_out[-1][0]:,}."
        if held_out
        else ""
    )
    left_out = (
        f" Crosses: {counted(len(skipped), 'step')} without an update because the loss or the"
        " gradient was not finite."
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
    """Time of each step, over a band for each span; None if no step's time is known."""
    times = [one.step_time_s for one in history.steps if is_finite_number(one.step_time_s)]
    if not times:
        return None
    figure, (axes,) = new_figure(WIDTH, HEIGHT + 0.3)
    top = upper_limit(times)
    axes.set(ylabel="seconds a step", ylim=(0, top))
    label_steps(axes, history)
    titles = draw_bands(axes, history) | mark_switches(axes, history)
    grouping = draw_line(
        axes,
        [
            [
                (one.step, one.step_time_s)
                for one in history.steps_in(span)
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
    mark_steps(axes, above, 0.97, "^")
    medians = "; ".join(
        f"plan {plan_letter(history.plans.index(span.plan))} from step {span.first:,}:"
        f" {format_duration(span.step_time_s)}"
        for span in history.spans[:12]
    )
    cut = (
        f" Triangles: {counted(len(above), 'step')} above the top of the chart, at most"
        f" {format_duration(max(times))}."
        if above
        else ""
    )
    return Chart(
        figure=figure,
        titles=titles,
        label=f"Time of each step, with a band for each plan. Medians: {medians}.",
        caption=(
            "Measured. Bands and letters: plans; dashed lines: their"
            f" medians{switch_legend(history)}.{grouping}{cut}"
        ),
    )


def draw_quantities(history: RunHistory) -> Chart | None:
    """Learning rate, gradient norm, tokens a second and MFU by step, as far as they are known."""
    named = {
        "learning rate": [(one.step, one.lr) for one in history.steps],
        "gradient norm": [(one.step, one.grad_norm) for one in history.steps],
        "tokens a second": [(one.step, one.tokens_per_s) for one in history.steps],
        "MFU": [(one.step, one.mfu) for one in history.steps],
    }
    known = {
        name: points
        for name, all_points in named.items()
        if (points := [(x, float(y)) for x, y in all_points if is_finite_number(y)])
    }
    if not known:
        return None
    figure, panels = new_figure(WIDTH, 1.3 * len(known) + 0.4, rows=len(known), sharex=True)
    grouping, titles = "", {}
    for panel, (axes, (name, points)) in enumerate(zip(panels, known.items(), strict=True)):
        grouping = draw_line(axes, [points], name) or grouping
        label_steps(axes, history)
        axes.set(ylabel=name, xlabel="")
        axes.yaxis.set_label_coords(-0.08, 0.5)
        titles |= mark_switches(axes, history, f"panel{panel}-")
    panels[-1].set(xlabel="step")
    last = "; ".join(f"{name} {points[-1][1]:.4g}" for name, points in known.items())
    return Chart(
        figure=figure,
        titles=titles,
        label=f"{', '.join(known)} by step. At the last step: {last}.",
        caption=f"At the last step: {last}{switch_legend(history)}.{grouping}",
    )


def draw_predictions(history: RunHistory) -> Chart | None:
    """Measured against predicted step time, a point per comparison; None without a measurement."""
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
    plain_ticks(axes)
    titles = {}
    for index, (pair, measured_s) in enumerate(pairs):
        plan = history.plans.index(pair.plan) if pair.plan in history.plans else None
        colour, name = (BLUE, "") if plan is None else (plan_colour(plan), plan_letter(plan))
        marks = axes.plot(
            pair.predicted_s,
            measured_s,
            "s" if pair.is_trial else "o",
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            markersize=7,
        )
        marks[0].set_gid(f"pair{index}")
        titles[f"pair{index}"] = (
            f"{pair.layout or 'layout unknown'}: predicted {format_duration(pair.predicted_s)},"
            f" measured {format_duration(measured_s)}"
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
            f"Measured against predicted step time of {len(pairs)} plans; the table below has the"
            " numbers."
        ),
        caption=(
            "Points below the dashed line were faster than predicted, points above it slower."
            " Squares: trials before the first step; circles: steps of the run."
        ),
    )


def draw_memory(history: RunHistory) -> Chart | None:
    """Peak memory of a device and memory that the compiled step needs; None if neither is known."""
    peaks = [
        (one.step, float(one.peak_bytes))
        for one in history.steps
        if one.peak_bytes is not None and is_finite_number(one.peak_bytes)
    ]
    compiled = [
        (step_of(event), size)
        for event in history.events_named("compile")
        if (size := number(event, "step_bytes_per_device")) is not None
    ]
    if not (peaks or compiled):
        return None
    most = max(size for _, size in [*peaks, *compiled])
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    figure, (axes,) = new_figure(WIDTH, HEIGHT - 0.4)
    if peaks:
        axes.plot(
            *step_line(peaks, history, scale),
            color=BLUE,
            drawstyle="steps-post",
            label="peak so far (measured)",
        )
    if compiled:
        axes.plot(
            *step_line(compiled, history, scale),
            "--",
            color=VERMILLION,
            drawstyle="steps-post",
            label="needed by the compiled step (reported by the compiler)",
        )
    legend_above(axes)
    axes.set(ylabel=f"{unit} on a device", ylim=(0, 1.15 * most / scale))
    label_steps(axes, history)
    titles = mark_switches(axes, history)
    summary = "; ".join(
        [
            (
                f"peak {format_bytes(max(size for _, size in peaks))}"
                if peaks
                else "peak unknown, because the backend does not report it"
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
        label=f"Memory on a device by step: {summary}.",
        caption=f"On one device: {summary}{switch_legend(history)}.",
    )


def draw_switch(switch: Switch) -> Chart | None:
    """The phases of a switch as a timeline; None if no phase's time is known."""
    total, begin, titles = sum(seconds or 0.0 for _, seconds in switch.phases_s), 0.0, {}
    if not total:
        return None
    figure, (axes,) = new_figure(WIDTH, 0.6 + 0.25 * len(switch.phases_s))
    for row, (name, seconds) in enumerate(switch.phases_s):
        if seconds is None:
            continue
        is_pause = name not in WHILE_TRAINING
        bar = axes.barh(
            row,
            max(seconds, total / 800),
            left=begin,
            height=0.7,
            facecolor=ORANGE if is_pause else SKY,
            edgecolor=INK,
            linewidth=0.5,
            hatch=None if is_pause else "///",
        )
        bar[0].set_gid(f"phase{row}")
        titles[f"phase{row}"] = (
            f"{name}: {format_duration(seconds)},"
            f" {'training pauses' if is_pause else 'training continues'}"
        )
        begin += seconds
    names = [f"{name} {format_duration(seconds)}" for name, seconds in switch.phases_s]
    axes.set_yticks(range(len(names)), names)
    axes.set(
        xlabel="seconds from the start of the switch",
        xlim=(0, total * 1.02),
        ylim=(len(names) - 0.4, -0.6),
    )
    return Chart(
        figure=figure,
        titles=titles,
        label=f"Phases of the {switch.kind} after step {switch.step:,}: {', '.join(names)}.",
        caption="Measured. Training pauses in plain bars and continues in hatched ones.",
    )
