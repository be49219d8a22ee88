"""A page about the plans of a search: an interactive chart of step time against memory, and a table
with the reasons. It opens without a network.
"""

from collections.abc import Mapping, Sequence
from importlib import resources

from optimus_jax.errors import ConfigError, explain
from optimus_jax.viz.canvas import PLOTS
from optimus_jax.viz.frontier import PlanRecord, draw_frontier, frontier

LEFT = ("mesh", "schedule", "remat", "overlap", "why")
"""Columns that are not numbers."""


def check_page_packages() -> None:
    """Raise ConfigError if a package is missing that a page needs."""
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                "the page needs plotly and jinja2, which are not both installed",
                given=str(error),
                do=PLOTS,
            )
        ) from error


def plan_page(
    plans_by_cluster: Mapping[str, Sequence[PlanRecord]],
    cells_by_cluster: Mapping[str, Sequence[Mapping[str, str]]],
    *,
    title: str,
    notes: Sequence[str] = (),
    capacity_bytes: float | None = None,
) -> str:
    """The page as an HTML document.

    Args:
      plans_by_cluster: name of each cluster -> its plans, best first.
      cells_by_cluster: the same -> their rows in a table, by column.
      notes: sentences below the title.
      capacity_bytes: memory of a device, if it is the same for all.
    Raises:
      ConfigError: plotly or jinja2 is not installed.
    """
    check_page_packages()
    from jinja2 import Environment
    from markupsafe import Markup

    figure = draw_frontier(plans_by_cluster, title="", capacity_bytes=capacity_bytes)
    legend = {"orientation": "h", "y": -0.18}
    figure.update_layout(width=None, margin={"t": 30}, legend=legend)
    chart = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True})
    text = resources.files("optimus_jax.viz").joinpath("plan_page.html").read_text("utf-8")
    template = Environment(autoescape=True).from_string(text)
    return template.render(
        title=title,
        notes=notes,
        chart=Markup(chart),
        left=LEFT,
        clusters=[
            (name, cells, {plan["rank"] for plan in frontier(plans_by_cluster[name])})
            for name, cells in cells_by_cluster.items()
        ],
    )
