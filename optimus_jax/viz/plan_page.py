"""A page about the plans of a search: their frontier of step time and memory to hover over, and a
table with the reasons. It opens without a network.
"""

from collections.abc import Mapping, Sequence
from importlib import resources

from optimus_jax.errors import ConfigError, explain
from optimus_jax.viz.frontier import GIB, PlanRecord, draw_frontier, frontier

HEADS = (
    "",
    "mesh",
    "schedule",
    "microbatches",
    "remat",
    "ZeRO",
    "step",
    "tokens/s",
    "MFU",
    "GiB",
    "why",
)
"""Columns of the table."""


def plan_page(
    plans_by_cluster: Mapping[str, Sequence[PlanRecord]],
    *,
    title: str,
    notes: Sequence[str] = (),
    capacity_bytes: float | None = None,
) -> str:
    """The page as an HTML document.

    Args:
      plans_by_cluster: name of each cluster -> its plans, best first.
      notes: sentences below the title.
      capacity_bytes: memory of a device, if it is the same for all.
    Raises:
      ConfigError: plotly or jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                "the page needs jinja2, which is not installed",
                given=str(error),
                do="pip install 'optimus-jax[plots]'",
            )
        ) from error
    figure = draw_frontier(plans_by_cluster, title="", capacity_bytes=capacity_bytes)
    legend = {"orientation": "h", "y": -0.18}
    figure.update_layout(width=None, margin={"t": 30}, legend=legend)
    chart = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True})
    text = resources.files("optimus_jax.viz").joinpath("plan_page.html").read_text("utf-8")
    template = Environment(autoescape=True).from_string(text)
    return template.render(
        title=title,
        notes=notes,
        heads=HEADS,
        chart=Markup(chart),
        clusters={name: _rows(plans) for name, plans in plans_by_cluster.items()},
    )


def _rows(plans: Sequence[PlanRecord]) -> list[dict[str, object]]:
    """The cells of the table of one cluster."""
    best = {plan["rank"] for plan in frontier(plans)}
    return [
        {
            "rank": plan["rank"],
            "is_frontier": plan["rank"] in best,
            "mesh": ", ".join(f"{axis}={size}" for axis, size in plan["axes"].items() if size > 1)
            or "one device",
            "schedule": plan["schedule"] or "-",
            "microbatches": plan["microbatches"],
            "remat": plan["remat"],
            "zero": plan["zero"],
            "step": f"{plan['step_time_s']:.4g} s",
            "tokens_per_s": f"{plan['tokens_per_s']:,.0f}",
            "mfu": "-" if plan["mfu"] is None else f"{plan['mfu']:.1%}",
            "memory": f"{plan['memory_bytes'] / GIB:.1f}",
            "why": plan.get("why", ""),
        }
        for plan in plans
    ]
