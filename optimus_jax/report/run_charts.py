"""Charts of runs: loss, step time, rates, memory; and of one run: predictions, and the phases of a
switch.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

from optimus_jax.errors import counted
from optimus_jax.report.charts import (
    Points,
    add_bands,
    add_line,
    as_text,
    grouping_words,
    log_axis,
    mark_switches,
    new_chart,
    plan_colour,
    plan_letter,
    run_line,
    step_limits,
    step_line,
    switch_legend,
    upper_limit,
)
from optimus_jax.report.formatting import format_bytes, format_duration
from optimus_jax.report.page import Chart
from optimus_jax.report.run_events import is_finite_number, number, step_of
from optimus_jax.report.run_history import RunHistory, Switch
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.numbers import short
from optimus_jax.viz.canvas import BLUE, INK, ORANGE, SKY, VERMILLION

HEIGHT = 320
"""Height of a chart in pixels."""
LEGEND_ABOVE_MARKS = 1.1
"""Lower end of a legend above letters and marks, in heights of the chart."""
WHILE_TRAINING = ("prepare",)
"""Phases of a switch during which training continues."""
MIB, GIB = 2**20, 2**30
NamedRuns = dict[str, RunHistory]
"""Runs by their names on the page."""
QUANTITIES: dict[str, Callable[[StepRecord], float | None]] = {
    "learning rate": lambda one: one.lr,
    "gradient norm": lambda one: one.grad_norm,
    "tokens a second": lambda one: one.tokens_per_s,
    "MFU": lambda one: one.mfu,
}


def draw_loss(runs: NamedRuns, by: Literal["step", "time"] = "step") -> Chart | None:
    """Training and held-out loss against the step, or the time of all steps so far; None if no step
    has a loss.
    """
    lines = {
        name: [
            (x, one.loss)
            for x, one in zip(_positions(run, by), run.steps, strict=True)
            if is_finite_number(one.loss)
        ]
        for name, run in runs.items()
    }
    if not any(lines.values()):
        return None
    is_single, per_point = len(runs) == 1, []
    figure = new_chart(HEIGHT, x_title="step" if by == "step" else "hours of steps")
    words, has_held_out = [], False
    for index, (name, points) in enumerate(lines.items()):
        line, run = run_line(index), runs[name]
        shown = "training" if is_single else as_text(name)
        per_point.append(add_line(figure, [points], shown, line=line))
        held_out = [
            (step_of(event), loss)
            for event in run.events_named("eval")
            if (loss := number(event, "loss")) is not None
        ]
        has_held_out |= bool(held_out)
        _add_held_out(figure, run, held_out, by, shown, VERMILLION if is_single else line["color"])
        words.append(_loss_in_words("" if is_single else name, points, held_out, by))
    limits = {"range": step_limits(*runs.values())} if by == "step" else {}
    figure.update_layout(yaxis_title="loss", xaxis=limits, showlegend=has_held_out or not is_single)
    marks = _mark_changes(figure, *runs.values()) if is_single and by == "step" else ""
    skipped = sum(one.skipped for run in runs.values() for one in run.steps)
    left_out = (
        f" {counted(skipped, 'step')} without an update because the loss or the gradient was not"
        " finite."
        if skipped
        else ""
    )
    return Chart(
        name="loss" if by == "step" else "loss-time",
        figure=figure,
        label=f"Loss by {by}: {'; '.join(words)}",
        caption=(
            "Measured: the loss of the task, for most of them in nats per token."
            f"{' Diamonds: on held-out data.' if has_held_out else ''}"
            f"{marks}{grouping_words(per_point)}{left_out}"
        ),
    )


def _mark_changes(figure: Any, history: RunHistory) -> str:
    """Mark plans, switches and resumes, if there is more than one plan or start; what a caption
    says about them.
    """
    if len(history.spans) < 2 and not history.switches and not history.events_named("resume"):
        return ""
    add_bands(figure, history, medians=False)
    mark_switches(figure, history)
    figure.update_layout(legend_y=LEGEND_ABOVE_MARKS, margin_t=64)
    return f" Bands and letters: plans{switch_legend(history)}."


def _positions(run: RunHistory, by: Literal["step", "time"]) -> list[float]:
    """x of each step: its number, or the hours of all steps up to it."""
    if by == "step":
        return [one.step for one in run.steps]
    times = [one.step_time_s if is_finite_number(one.step_time_s) else 0.0 for one in run.steps]
    return [time_s / 3600 for time_s in accumulate(times)]


def _add_held_out(
    figure: Any,
    run: RunHistory,
    held_out: Sequence[tuple[int, float]],
    by: Literal["step", "time"],
    name: str,
    colour: str,
) -> None:
    """Markers of the held-out losses."""
    if not held_out:
        return
    at = dict(zip([one.step for one in run.steps], _positions(run, by), strict=True))
    found = [(at.get(step, step if by == "step" else None), loss) for step, loss in held_out]
    figure.add_scatter(
        x=[x for x, _ in found],
        y=[loss for _, loss in found],
        mode="lines+markers",
        name="held out" if name == "training" else f"{name}, held out",
        line={"color": colour, "dash": "dot", "width": 1},
        marker={"symbol": "diamond", "size": 7},
        hovertemplate="%{y:.4f}",
    )


def _loss_in_words(
    name: str, points: Points, held_out: Sequence[tuple[int, float]], by: str
) -> str:
    if not points:
        return f"{name}: unknown."
    (first, start), (last, end) = points[0], points[-1]
    where = f" at step {first:,}", f" at step {last:,}"
    from_start, to_end = where if by == "step" else ("", f" after {last:.3g} hours")
    evaluated = ""
    if held_out:
        evaluated = f" Held out: {short(held_out[-1][1], 4)} after step {held_out[-1][0]:,}."
    return (
        f"{f'{name}: ' if name else ''}from {short(start, 4)}{from_start} to"
        f" {short(end, 4)}{to_end}.{evaluated}"
    )


def draw_step_times(runs: NamedRuns) -> Chart | None:
    """Time of each step; of one run over a band for each span. None if no step's time is known."""
    times = [
        one.step_time_s
        for run in runs.values()
        for one in run.steps
        if is_finite_number(one.step_time_s)
    ]
    if not times:
        return None
    top = upper_limit(times)
    figure = new_chart(
        HEIGHT,
        xaxis={"range": step_limits(*runs.values())},
        yaxis={"title": "seconds a step", "range": (0, top)},
        showlegend=len(runs) > 1,
    )
    above = sum(time_s > top for time_s in times)
    cut = (
        f" {counted(above, 'step')} above the top of the chart, at most"
        f" {format_duration(max(times))}; a double click shows all."
        if above
        else ""
    )
    per_point = []
    for index, (name, run) in enumerate(runs.items()):
        parts = [
            [
                (one.step, one.step_time_s)
                for one in run.steps_in(span)
                if is_finite_number(one.step_time_s)
            ]
            for span in run.spans
        ]
        shown = as_text(name) if len(runs) > 1 else "step time"
        line, y_format = run_line(index), ".3g"
        per_point.append(add_line(figure, parts, shown, line=line, y_format=y_format))
    grouping = grouping_words(per_point)
    if len(runs) > 1:
        return Chart(
            name="times",
            figure=figure,
            label=f"Time of each step of {', '.join(runs)}.",
            caption=f"Measured.{grouping}{cut}",
        )
    (history,) = runs.values()
    add_bands(figure, history)
    mark_switches(figure, history)
    medians = "; ".join(
        f"plan {plan_letter(history.plans.index(span.plan))} from step {span.first:,}:"
        f" {format_duration(span.step_time_s)}"
        for span in history.spans[:12]
    )
    return Chart(
        name="times",
        figure=figure,
        label=f"Time of each step, with a band for each plan. Medians: {medians}.",
        caption=(
            "Measured. Bands and letters: plans; dashed lines: their"
            f" medians{switch_legend(history)}.{grouping}{cut}"
        ),
    )


def draw_quantities(runs: NamedRuns) -> Chart | None:
    """Learning rate, gradient norm, tokens a second and MFU by step, as far as they are known."""
    known = {
        quantity: lines
        for quantity, value_of in QUANTITIES.items()
        if any((lines := _points(runs, value_of)).values())
    }
    if not known:
        return None
    is_single, per_point = len(runs) == 1, []
    figure = new_chart(90 + 130 * len(known), rows=len(known), showlegend=not is_single)
    for row, (quantity, lines) in enumerate(known.items(), start=1):
        for index, (name, points) in enumerate(lines.items()):
            added = add_line(
                figure,
                [points],
                quantity if is_single else as_text(name),
                line=run_line(index),
                row=row,
                shows_name=row == 1,
            )
            per_point.append(added)
        values = {value for points in lines.values() for _, value in points}
        limits = {"range": (0, 1.2 * max(values))} if len(values) == 1 and max(values) > 0 else {}
        figure.update_yaxes({"title": {"text": quantity}} | limits, row=row, col=1)
    figure.update_xaxes(range=step_limits(*runs.values()))
    last = "; ".join(
        f"{quantity} {_plain(points[-1][1])}{'' if is_single else f' ({name})'}"
        for quantity, lines in known.items()
        for name, points in lines.items()
        if points
    )
    legend = ""
    if is_single:
        (history,) = runs.values()
        mark_switches(figure, history)
        legend = switch_legend(history)
    return Chart(
        name="quantities",
        figure=figure,
        label=f"{', '.join(known)} by step. At the last step: {last}.",
        caption=f"At the last step: {last}{legend}.{grouping_words(per_point)}",
    )


def _plain(value: float) -> str:
    """A number without an exponent, where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _points(
    runs: NamedRuns, value_of: Callable[[StepRecord], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """By run: the steps with a value, and the values."""
    return {
        name: [
            (one.step, float(value))
            for one in run.steps
            if is_finite_number(value := value_of(one))
        ]
        for name, run in runs.items()
    }


def draw_predictions(history: RunHistory) -> Chart | None:
    """Measured against predicted step time, a point per comparison; None without a measurement."""
    pairs = [(pair, pair.measured_s) for pair in history.comparisons if pair.measured_s]
    if not pairs:
        return None
    ends = [value for pair, measured_s in pairs for value in (pair.predicted_s, measured_s)]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    figure = new_chart(
        380,
        x_title="predicted seconds a step",
        xaxis=log_axis(low, high),
        yaxis={**log_axis(low, high), "title": "measured seconds a step"},
        hovermode="closest",
    )
    diagonal = {"color": INK, "width": 1, "dash": "dash"}
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", line=diagonal, hoverinfo="skip")
    plans = [
        history.plans.index(pair.plan) if pair.plan in history.plans else None for pair, _ in pairs
    ]
    figure.add_scatter(
        x=[pair.predicted_s for pair, _ in pairs],
        y=[measured_s for _, measured_s in pairs],
        mode="markers+text",
        text=["" if plan is None else plan_letter(plan) for plan in plans],
        textposition="middle right",
        marker={
            "color": [BLUE if plan is None else plan_colour(plan) for plan in plans],
            "symbol": ["square" if pair.is_trial else "circle" for pair, _ in pairs],
            "size": 11,
            "line": {"color": INK, "width": 1},
        },
        hovertext=[
            as_text(
                f"{pair.layout or 'layout unknown'}: predicted {format_duration(pair.predicted_s)},"
                f" measured {format_duration(measured_s)}"
            )
            for pair, measured_s in pairs
        ],
        hoverinfo="text",
    )
    return Chart(
        name="predictions",
        figure=figure,
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
    figure = new_chart(
        HEIGHT - 40,
        xaxis={"range": step_limits(history)},
        yaxis={"title": f"{unit} on a device", "range": (0, 1.15 * most / scale)},
        showlegend=True,
        margin={"t": 72},
        legend={"y": 1.15},  # above the marks of switches
    )
    for points, name, line in (
        (peaks, "peak so far (measured)", {"color": BLUE}),
        (compiled, "compiled step (by the compiler)", {"color": VERMILLION, "dash": "dash"}),
    ):
        if points:
            x, y = step_line(points, history, scale)
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                name=name,
                line={**line, "shape": "hv"},
                hovertemplate=f"%{{y:.3g}} {unit}",
            )
    mark_switches(figure, history)
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
        name="memory",
        figure=figure,
        label=f"Memory on a device by step: {summary}.",
        caption=f"On one device: {summary}{switch_legend(history)}.",
    )


def draw_switch(switch: Switch, name: str) -> Chart | None:
    """The phases of a switch as a timeline; None if no phase's time is known.

    Args:
      name: id of the chart.
    """
    known = [(phase, seconds) for phase, seconds in switch.phases_s if seconds is not None]
    if not (total := sum(seconds for _, seconds in known)):
        return None
    figure = new_chart(
        90 + 24 * len(known),
        x_title="seconds from the start of the switch",
        yaxis={"autorange": "reversed"},
        hovermode="closest",
    )
    pauses = [phase not in WHILE_TRAINING for phase, _ in known]
    labels = [f"{as_text(phase)} {format_duration(seconds)}" for phase, seconds in known]
    figure.add_bar(
        orientation="h",
        y=labels,
        x=[max(seconds, total / 800) for _, seconds in known],
        base=[0.0, *accumulate(seconds for _, seconds in known)][:-1],
        marker={
            "color": [ORANGE if is_pause else SKY for is_pause in pauses],
            "line": {"color": INK, "width": 0.5},
            "pattern": {
                "shape": ["" if is_pause else "/" for is_pause in pauses],
                "fgcolor": INK,
                "size": 6,
            },
        },
        hovertext=[
            f"{label}, {'training pauses' if is_pause else 'training continues'}"
            for label, is_pause in zip(labels, pauses, strict=True)
        ],
        hoverinfo="text",
    )
    every = [f"{phase} {format_duration(seconds)}" for phase, seconds in switch.phases_s]
    return Chart(
        name=name,
        figure=figure,
        label=f"Phases of the {switch.kind} after step {switch.step:,}: {', '.join(every)}.",
        caption="Measured. Training pauses in plain bars and continues in hatched ones.",
    )
