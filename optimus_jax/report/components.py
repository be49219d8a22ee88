"""HTML components that several sections of a run's report use: plan badges, times, charts, and
tables cut to their newest rows.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from optimus_jax.report.chart_axes import plan_colour, plan_letter
from optimus_jax.report.formatting import UNKNOWN, format_time
from optimus_jax.report.page import VARIABLES, Html, element, note
from optimus_jax.report.run_charts import Chart
from optimus_jax.report.run_history import RunHistory
from optimus_jax.report.svg import to_svg

T = TypeVar("T")

MAX_ROWS = 200
"""Maximum number of rows of a table."""
AT = "at (UTC)"
"""Heading of a column of times."""
_MESH = re.compile(r"mesh (\S*[^\s,])")


def time_cell(time_s: float | None) -> Html:
    """A time for a column AT."""
    return element("time", format_time(time_s))


def plan_name(history: RunHistory, digest: str | None, layout: str | None = None) -> Html:
    """A plan's letter, if it has one, and its mesh. The tooltip shows the whole layout."""
    words = layout or history.layouts.get(digest or "") or (f"plan {digest}" if digest else UNKNOWN)
    mesh, letters = (
        _MESH.search(words),
        [plan_badge(history.plans.index(digest))] if digest in history.plans else [],
    )
    return element(
        "span",
        *letters,
        mesh[1] if mesh else words,
        title=words,
        class_="short" if mesh else "long",
    )


def plan_badge(index: int) -> Html:
    """A plan's letter in its colour."""
    return element(
        "span",
        plan_letter(index),
        class_="plan",
        style=f"--plan:{VARIABLES[plan_colour(index).lower()]}",
    )


def chart_or_note(chart: Chart | None, name: str, otherwise: str) -> Html:
    """A chart with its caption; without a chart, the text `otherwise`.

    Args:
      name: prefix of the ids inside the chart, unique on the page.
    """
    if chart is None:
        return note(otherwise)
    return element(
        "figure",
        to_svg(chart.figure, name=name, label=chart.label, titles=chart.titles),
        element("figcaption", chart.caption),
    )


def newest_rows(
    items: Sequence[T], max_rows: int, noun: str, keep: Callable[[T], bool] = lambda _: False
) -> tuple[list[T], Html]:
    """The newest `max_rows` items and those that `keep` selects, in order, with a note on how many
    were left out.

    Args:
      noun: what the note calls the items, in the plural.
    """
    first = len(items) - max_rows
    shown = [item for index, item in enumerate(items) if index >= first or keep(item)]
    left_out = len(items) - len(shown)
    return shown, note(
        f"{left_out:,} older {noun} are left out; events.jsonl has them all."
    ) if left_out else Html("")
