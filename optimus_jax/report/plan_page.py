"""A page about the plans of a search: an interactive chart of step time against memory, and a table
with the reasons.
"""

from collections.abc import Mapping, Sequence

from optimus_jax.report.charts import RUNS, style
from optimus_jax.report.page import Chart, PageBlock, PageTable, Section, note, page
from optimus_jax.viz.frontier import PlanRecord, draw_frontier, frontier

TEXT_COLUMNS = ("mesh", "schedule", "remat", "overlap", "why")
"""Columns that are not numbers."""
HEIGHT = 560
"""Height of the chart in pixels."""


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
    figure = draw_frontier(plans_by_cluster, title="", capacity_bytes=capacity_bytes, colours=RUNS)
    style(figure, HEIGHT)
    figure.update_layout(
        hovermode="closest",
        showlegend=len(plans_by_cluster) > 1,
        xaxis_title="memory of a device, GiB",  # short enough for a phone
        yaxis_title="step time, s (log scale)",
    )
    chart = Chart(
        name="frontier",
        figure=figure,
        label="Predicted step time of each plan against the memory of its most loaded device; the"
        " tables below have the numbers.",
        caption="Predicted; memory of the most loaded device. A line joins plans that no other plan"
        " of their cluster beats in both time and memory. Hover over a point for its layout; drag"
        " to zoom.",
    )
    tables: list[PageBlock] = [
        _table(name, rows, {plan["rank"] for plan in frontier(plans_by_cluster[name])})
        for name, rows in cells_by_cluster.items()
        if rows
    ]
    return page(
        title,
        [
            Section(heading="Step time and memory", name="chart", blocks=[chart]),
            Section(heading="Plans", name="plans", blocks=tables),
        ],
        introduction=[note(text) for text in notes],
    )


def _table(cluster: str, rows: Sequence[Mapping[str, str]], best: set[int]) -> PageTable:
    """The plans of a cluster; those with a rank in `best` are shaded."""
    columns = list(rows[0])
    head = [column or "rank" for column in columns]
    return PageTable(
        caption=f"{cluster}: plans, best first (predicted). Shaded: no other plan on this page is"
        " as fast and needs less memory.",
        head=head,
        rows=[[row[column] for column in columns] for row in rows],
        numbers=[name for name in head if name not in TEXT_COLUMNS],
        marked=frozenset(index for index, row in enumerate(rows) if int(row[""]) in best),
    )
