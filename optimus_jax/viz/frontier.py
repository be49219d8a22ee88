"""Interactive chart of plans by step time and memory, with the Pareto frontier.

A plan is on the *frontier* if no other plan is at least as good in both step time and memory and
better in one. All times and bytes are the planner's predictions.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

from optimus_jax.errors import ConfigError, explain
from optimus_jax.viz.canvas import EXTRA, INK

if TYPE_CHECKING:
    import plotly.graph_objects as go

GIB = 2**30
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "star",
    "hexagon",
)
SCALE = "cividis"
"""Perceptually uniform and safe for colour-blind readers (Nunez, Anderton and Renslow 2018)."""


class PlanRecord(TypedDict):
    """The values of a plan that the chart shows; `optimus plan --json` prints them."""

    rank: int
    """From 1, best first."""
    axes: dict[str, int]
    """Devices along each mesh axis."""
    schedule: str | None
    """Pipeline schedule; None without stages."""
    microbatches: int
    remat: str
    zero: int
    step_time_s: float
    step_time_interval_s: Sequence[float]
    """Bounds of the step time in seconds."""
    tokens_per_s: float
    """Total over all devices."""
    mfu: float | None
    """Model FLOPs utilisation; None if the devices' peak is unknown."""
    memory_bytes: float
    """Memory of the most loaded device."""
    bubble: float
    """Fraction of the time that stages are idle."""
    communication: float
    """Fraction of the step time in communication that does not overlap compute."""
    why: NotRequired[str]
    """How it compares with others."""


def merge_rankings(*rankings: Sequence[PlanRecord]) -> list[PlanRecord]:
    """One ranking of the plans of several searches, without duplicates."""
    best: dict[str, PlanRecord] = {}
    for plan in sorted(
        (plan for ranking in rankings for plan in ranking), key=lambda plan: plan["step_time_s"]
    ):
        best.setdefault(repr({**plan, "rank": 0}), plan)
    return [{**plan, "rank": rank} for rank, plan in enumerate(best.values(), start=1)]


def frontier(plans: Sequence[PlanRecord]) -> list[PlanRecord]:
    """The plans on the frontier, fastest first; of equal plans the first."""
    best: list[PlanRecord] = []
    for plan in sorted(plans, key=lambda plan: (plan["step_time_s"], plan["memory_bytes"])):
        if not best or plan["memory_bytes"] < best[-1]["memory_bytes"]:
            best.append(plan)
    return best


def tooltip(plan: PlanRecord) -> str:
    """Tooltip of a plan, as HTML."""
    mesh = (
        ", ".join(f"{axis}={size}" for axis, size in plan["axes"].items() if size > 1)
        or "one device"
    )
    pipeline = (
        f"{plan['schedule']}, bubble {plan['bubble']:.1%}" if plan["schedule"] else "no stages"
    )
    low_s, high_s = plan["step_time_interval_s"]
    return "<br>".join(
        [
            f"<b>rank {plan['rank']}: {mesh}</b>",
            (
                f"{pipeline}; {plan['microbatches']}"
                f" microbatch{'es' if plan['microbatches'] > 1 else ''}"
            ),
            f"remat {plan['remat']}, ZeRO {plan['zero']}",
            (
                f"{plan['step_time_s']:.3g} s a step ({low_s:.3g} to {high_s:.3g}),"
                f" {plan['tokens_per_s']:,.0f} tokens/s"
            ),
            (
                f"MFU {'unknown' if plan['mfu'] is None else format(plan['mfu'], '.1%')},"
                f" {plan['communication']:.1%} of the time in communication"
            ),
            f"{plan['memory_bytes'] / GIB:.1f} GiB a device",
        ]
    )


def draw_frontier(
    plans_by_cluster: Mapping[str, Sequence[PlanRecord]],
    *,
    title: str,
    capacity_bytes: float | None = None,
    colours: Sequence[str] = (),
) -> "go.Figure":
    """All plans as pale points and each cluster's frontier as a line, with tooltips.

    Args:
      plans_by_cluster: label of each cluster in the legend -> its plans.
      capacity_bytes: memory of a device, drawn as a vertical line.
      colours: of the clusters, repeated if there are more; empty: shades of SCALE.
    Raises:
      ConfigError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.colors import sample_colorscale
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain("this picture needs plotly, which is not installed", given=str(error), do=EXTRA)
        ) from error
    figure = go.Figure()
    # The bright end of the scale is too pale for white paper.
    shades = [0.8 * n / max(1, len(plans_by_cluster) - 1) for n in range(len(plans_by_cluster))]
    chosen = list(colours) or list(map(str, sample_colorscale(SCALE, shades)))
    for number, (name, plans) in enumerate(plans_by_cluster.items()):
        colour = chosen[number % len(chosen)]
        look = {"color": colour, "symbol": SYMBOLS[number % len(SYMBOLS)]}
        figure.add_scatter(
            **_points(plans),
            name=name,
            legendgroup=name,
            showlegend=False,
            mode="markers",
            marker={**look, "size": 5, "opacity": 0.25},
        )
        figure.add_scatter(
            **_points(frontier(plans)),
            name=name,
            legendgroup=name,
            mode="lines+markers",
            line={"color": colour, "width": 2, "shape": "vh"},
            marker={**look, "size": 9, "line": {"color": "white", "width": 1}},
        )
    if capacity_bytes is not None:
        figure.add_vline(
            x=capacity_bytes / GIB,
            line={"color": INK, "dash": "dash"},
            annotation_text=f"{capacity_bytes / GIB:.0f} GiB on a device",
            annotation_position="top left",
        )
    figure.update_layout(
        title=title,
        width=1000,
        height=600,
        template="plotly_white",
        font={"color": INK, "size": 13},
        legend={"title": "cluster"},
        showlegend=len(plans_by_cluster) > 1,
        xaxis={"title": "memory of the most loaded device, GiB (predicted)", "rangemode": "tozero"},
        yaxis={
            "title": "step time, seconds (predicted; log scale)",
            "type": "log",
        },
    )
    return figure


def _points(plans: Sequence[PlanRecord]) -> dict[str, list | str]:
    return {
        "x": [plan["memory_bytes"] / GIB for plan in plans],
        "y": [plan["step_time_s"] for plan in plans],
        "hovertext": [tooltip(plan) for plan in plans],
        "hoverinfo": "text",
    }
