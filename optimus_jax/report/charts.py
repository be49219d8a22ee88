"""Parts of charts that plot against steps: downsampled lines, bands of plans, marks of switches.

A plan has a letter and a colour. A run of many steps is drawn in groups of steps: a line of
medians, in a shade from the minimum to the maximum. A chart of several runs has a colour and a dash
for each.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optimus_jax.report.formatting import format_duration
from optimus_jax.report.page import SMOOTH, check_page_packages
from optimus_jax.report.run_events import changed_settings, step_of
from optimus_jax.report.run_history import RunHistory, Span
from optimus_jax.viz.canvas import (
    BLUE,
    GREEN,
    IDLE,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

Numbers = NDArray[np.float64]
Points = Sequence[tuple[float, float]]

BANDS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION)
"""Colours of plans by index; they repeat, letters do not."""
RUNS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("solid", "dash", "dot", "dashdot")
"""Colours and dashes of several runs by index."""
MAX_POINTS = 2000
"""Maximum number of points along a line."""
LETTER_SHARE = 0.015
"""A band narrower than this share of the width gets no letter."""
MAX_BANDS = 200
"""Maximum number of bands, and of marks of each kind: the newest."""
REMESH, ROLLBACK, RESUME = "◆", "◇", "↻"
"""Marks above a chart."""
PANEL_SPACE = 28
"""Space between two panels, in pixels."""
ENOUGH_TICKS = 3
"""Ticks of a logarithmic axis, at least."""
SHADE = "40"
"""Opacity of a shade, as the last two digits of a colour."""


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


def run_line(index: int) -> dict[str, Any]:
    """Colour and dash of the line of a run."""
    dash = DASHES[index // len(RUNS) % len(DASHES)]
    return {"color": RUNS[index % len(RUNS)], "dash": dash, "width": 1.5}


def new_chart(height: int, *, rows: int = 1, x_title: str = "step", **axes: Any) -> "go.Figure":
    """An empty chart of some panels, one above the other, that share their x.

    Args:
      height: in pixels.
      axes: options of the layout, such as `yaxis`.
    Raises:
      ConfigError: plotly is not installed.
    """
    check_page_packages()
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=rows, cols=1, shared_xaxes=True, vertical_spacing=PANEL_SPACE / height
    )
    style(figure, height)
    figure.update_xaxes(title_text=x_title, row=rows, col=1)
    figure.update_layout({"hovermode": "x unified"} | axes)
    return figure


def style(figure: "go.Figure", height: int) -> None:
    """Give a chart the looks of the page: its colours and fonts, and the width of its column."""
    from plotly.graph_objects import layout

    grid = {"gridcolor": IDLE, "linecolor": INK, "zeroline": False, "automargin": True}
    figure.update_xaxes(**grid, ticks="outside", tickcolor=INK)
    figure.update_yaxes(**grid)
    figure.update_layout(
        template=layout.Template(),
        width=None,
        height=height,
        margin={"l": 64, "r": 16, "t": 40, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        hoverlabel={"bgcolor": "#ffffff", "font": {"color": INK}},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        showlegend=False,
        uirevision="kept",  # of zoom, when the chart is drawn again
    )


def downsampled(points: Points, per_point: int) -> Downsampled:
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


def add_line(
    figure: "go.Figure",
    parts: Sequence[Points],
    name: str,
    *,
    line: dict[str, Any],
    row: int = 1,
    shows_name: bool = True,
    y_format: str = ".4g",
) -> int:
    """Add a line with a gap between parts; return how many points each of its own stands for.

    Args:
      line: colour, dash and width.
      row: number of the panel, from 1.
      shows_name: whether the legend has it.
      y_format: of the values under the pointer.
    """
    per_point = max(1, -(-sum(map(len, parts)) // MAX_POINTS))
    drawn = [downsampled(part, per_point) for part in parts if len(part)]
    if not drawn:
        return 1
    where = {"row": row, "col": 1, "legendgroup": name}
    if per_point > 1:
        figure.add_scatter(
            x=_joined([np.concatenate([part.x, part.x[::-1]]) for part in drawn]),
            y=_joined([np.concatenate([part.low, part.high[::-1]]) for part in drawn]),
            fill="toself",
            fillcolor=line["color"] + SHADE,
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            **where,
        )
    # A single point has no line, so that it gets a marker.
    sizes = [np.full(len(part.x), 6.0 if len(part.x) == 1 else 0.0) for part in drawn]
    has_points = any(len(part.x) == 1 for part in drawn)
    figure.add_scatter(
        x=_joined([part.x for part in drawn]),
        y=_joined([part.middle for part in drawn]),
        mode="lines+markers" if has_points else "lines",
        marker={"size": [size or 0.0 for size in _joined(sizes)]} if has_points else {},
        name=name,
        line=line,
        meta=SMOOTH,
        showlegend=shows_name,
        hovertemplate=f"%{{y:{y_format}}}",
        **where,
    )
    return per_point


def grouping_words(per_point: Iterable[int]) -> str:
    """A sentence for the caption if points of the lines stand for several steps.

    Args:
      per_point: what `add_line` gave for each line.
    """
    if not (grouped := {number for number in per_point if number > 1}):
        return ""
    steps = " or ".join(f"{number:,}" for number in sorted(grouped))
    which = "Each point" if len(grouped) == 1 else "A point of a long run"
    return f" {which} is the median of {steps} steps; the shade spans minimum to maximum."


def _joined(parts: Sequence[Numbers]) -> list[float | None]:
    """The numbers of all parts, with None between two parts."""
    joined: list[float | None] = []
    for part in parts:
        joined += [None] if joined else []
        joined += part.tolist()
    return joined


def add_bands(figure: "go.Figure", history: RunHistory, *, medians: bool = True) -> None:
    """Add a band behind each span, and the plan's letter above it, with a tooltip.

    Args:
      medians: whether y is the time of a step, and a dashed line shows the span's median.
    """
    left, right = step_limits(history)
    for span in history.spans[-MAX_BANDS:]:
        plan, first, last = history.plans.index(span.plan), span.first - 0.5, span.last + 0.5
        figure.add_shape(
            type="rect",
            x0=first,
            x1=last,
            y0=0,
            y1=1,
            yref="paper",
            layer="below",
            fillcolor=plan_colour(plan),
            opacity=0.22,
            line_width=0,
        )
        if medians and span.step_time_s is not None:
            figure.add_shape(
                type="line",
                x0=first,
                x1=last,
                y0=span.step_time_s,
                y1=span.step_time_s,
                line={"color": INK, "width": 1, "dash": "dash"},
            )
        if last - first > LETTER_SHARE * (right - left):
            title = as_text(_span_title(history, span))
            _mark(figure, (first + last) / 2, plan_letter(plan), title, INK)


def mark_switches(figure: "go.Figure", history: RunHistory) -> None:
    """Add a vertical line with a mark and a tooltip at each switch and each resume."""
    for switch in history.switches[-MAX_BANDS:]:
        is_rollback = switch.kind == "rollback"
        colour = VERMILLION if is_rollback else INK
        layout = switch.layout or "an unknown layout"
        title = as_text(f"{switch.kind} after step {switch.step:,} to {layout}")
        _vertical(figure, switch.step + 0.5, colour, "dot" if is_rollback else "solid")
        _mark(figure, switch.step + 0.5, ROLLBACK if is_rollback else REMESH, title, colour)
    for event in history.events_named("resume")[-MAX_BANDS:]:
        step = step_of(event)
        lines = [f"resumed after step {step:,}", *changed_settings(event)]
        title = "<br>".join(map(as_text, lines))
        _vertical(figure, step + 0.5, INK, "dashdot")
        _mark(figure, step + 0.5, RESUME, title, INK)


def _vertical(figure: "go.Figure", x: float, colour: str, dash: str) -> None:
    figure.add_shape(
        type="line",
        x0=x,
        x1=x,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": colour, "width": 1, "dash": dash},
    )


def _mark(figure: "go.Figure", x: float, words: str, title: str, colour: str) -> None:
    """Text above the chart with a tooltip, in which `<b>` and `&lt;` are plotly's markup."""
    figure.add_annotation(
        x=x,
        y=1,
        yref="paper",
        yanchor="bottom",
        text=words,
        hovertext=title,
        showarrow=False,
        font={"color": colour, "size": 13},
    )


def as_text(text: str) -> str:
    """Text for a chart, where plotly would read `<b>` and `&lt;` as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def switch_legend(history: RunHistory) -> str:
    """What a caption says about the lines of `mark_switches`."""
    kinds = {switch.kind for switch in history.switches}
    words = [
        text
        for kind, text in (
            ("remesh", f"{REMESH} re-meshes"),
            ("rollback", f"{ROLLBACK} rollbacks"),
        )
        if kind in kinds
    ]
    if history.events_named("resume"):
        words.append(f"{RESUME} resumes")
    return "".join(f"; {text}" for text in words)


def _span_title(history: RunHistory, span: Span) -> str:
    return (
        f"plan {plan_letter(history.plans.index(span.plan))},"
        f" steps {span.first:,} to {span.last:,}, median {format_duration(span.step_time_s)}:"
        f" {history.layouts.get(span.plan, 'layout unknown')}"
    )


def step_line(
    points: Sequence[tuple[int, float]], history: RunHistory, scale: float
) -> tuple[list[int], list[float]]:
    """x and y of a line that is extended to the run's last step; y is divided by `scale`."""
    steps, sizes = [step for step, _ in points], [size / scale for _, size in points]
    last = max(steps[-1], history.steps[-1].step if history.steps else 1)
    return [*steps, last], [*sizes, sizes[-1]]


def step_limits(*runs: RunHistory) -> tuple[float, float]:
    """Half a step before the first step of the runs, and half a step after the last one."""
    steps = [end.step for run in runs if run.steps for end in (run.steps[0], run.steps[-1])]
    return (min(steps) - 0.5, max(steps) + 0.5) if steps else (0.5, 1.5)


def upper_limit(times: Sequence[float]) -> float:
    """Upper limit of an axis of times, below outliers that would make the rest look flat."""
    threshold = 3 * float(np.percentile(times, 95))
    return 1.08 * (max(times) if max(times) <= threshold else threshold / 1.5) or 1.0


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Options of a logarithmic axis from `low` to `high`, with a few plain numbers as ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for mantissas in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), np.arange(1, 10, 0.2)):
        ticks = [
            tick
            for decade in decades
            for mantissa in mantissas
            if low <= (tick := float(f"{mantissa * 10.0**decade:.3g}")) <= high
        ]
        if len(ticks) >= ENOUGH_TICKS:
            break
    names = [f"{tick:g}" for tick in ticks]
    limits = (math.log10(low), math.log10(high))
    return {"type": "log", "range": limits, "tickvals": ticks, "ticktext": names}
