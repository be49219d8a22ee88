"""What all sections of a run's report share: a plan by its letter, a moment, a picture, the newest
rows of a long table.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from optimus_jax.report.formatting import UNKNOWN, format_time
from optimus_jax.report.page import VARIABLES, Html, element, note
from optimus_jax.report.run_charts import Chart, band, letter
from optimus_jax.report.run_history import RunHistory
from optimus_jax.report.svg import to_svg

T = TypeVar("T")

MOST_ROWS = 200
"""Of a table."""
AT = "at (UTC)"
_MESH = re.compile(r"mesh (\S*[^\s,])")


def time_cell(time_s: float | None) -> Html:
    """When something happened, for a column AT."""
    return element("time", format_time(time_s))


def plan_name(history: RunHistory, digest: str | None, layout: str | None = None) -> Html:
    """A plan by its letter, where it has one, and its mesh; a pointer is shown the whole layout."""
    words = layout or history.layouts.get(digest or "") or (f"plan {digest}" if digest else UNKNOWN)
    mesh, letters = (
        _MESH.search(words),
        [badge(history.plans.index(digest))] if digest in history.plans else [],
    )
    return element(
        "span",
        *letters,
        mesh[1] if mesh else words,
        title=words,
        class_="short" if mesh else "long",
    )


def badge(place: int) -> Html:
    """A plan's letter in its colour."""
    return element(
        "span", letter(place), class_="plan", style=f"--plan:{VARIABLES[band(place).lower()]}"
    )


def chart_or_note(chart: Chart | None, name: str, otherwise: str) -> Html:
    """A picture with its caption, or what to say if there is none."""
    if chart is None:
        return note(otherwise)
    return element(
        "figure",
        to_svg(chart.figure, name=name, label=chart.label, titles=chart.titles),
        element("figcaption", chart.caption),
    )


def newest_rows(
    items: Sequence[T], most: int, called: str, keep: Callable[[T], bool] = lambda _: False
) -> tuple[list[T], Html]:
    """The newest `most` of them and whatever is to be kept, in order, with a word on what was left
    out.
    """
    first = len(items) - most
    shown = [item for place, item in enumerate(items) if place >= first or keep(item)]
    left_out = len(items) - len(shown)
    return shown, note(
        f"{left_out:,} older {called} are left out; events.jsonl has them all."
    ) if left_out else Html("")
