"""Cells and blocks that several sections of a report use: plans, times, charts, and the newest rows
of a table.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from optimus_jax.report.charts import plan_colour, plan_letter
from optimus_jax.report.formatting import UNKNOWN, format_time
from optimus_jax.report.page import Chart, Moment, PageBlock, PlanName, Text, note
from optimus_jax.report.run_history import RunHistory

T = TypeVar("T")

MAX_ROWS = 200
"""Maximum number of rows of a table."""
AT = "at (UTC)"
"""Heading of a column of times."""
_MESH = re.compile(r"mesh (\S*[^\s,])")


def moment(time_s: float | None) -> Moment:
    """A time for a column AT."""
    return Moment(words=format_time(time_s))


def plan_name(
    history: RunHistory, digest: str | None, layout: str | None = None, *, whole: bool = False
) -> PlanName:
    """A plan's letter, if it has one, and its mesh, or with `whole` its layout."""
    words = layout or history.layouts.get(digest or "") or (f"plan {digest}" if digest else UNKNOWN)
    mesh = None if whole else _MESH.search(words)
    shown = mesh[1] if mesh else words
    if digest not in history.plans:
        return PlanName(words=shown, tooltip=words, is_short=bool(mesh))
    index = history.plans.index(digest)
    return PlanName(
        words=shown,
        tooltip=words,
        is_short=bool(mesh),
        letter=plan_letter(index),
        colour=plan_colour(index),
    )


def chart_or_note(chart: Chart | None, otherwise: str) -> list[PageBlock]:
    """A chart; without one, the text `otherwise`."""
    return [note(otherwise) if chart is None else chart]


def newest_rows(
    items: Sequence[T], max_rows: int, noun: str, keep: Callable[[T], bool] = lambda _: False
) -> tuple[list[T], list[Text]]:
    """The newest `max_rows` items and those that `keep` selects, in order, with a note on how many
    were left out.

    Args:
      noun: what the note calls the items, in the plural.
    """
    first = len(items) - max_rows
    shown = [item for index, item in enumerate(items) if index >= first or keep(item)]
    left_out = len(items) - len(shown)
    cut = [note(f"{left_out:,} older {noun} are left out; events.jsonl has them all.")]
    return shown, cut if left_out else []
