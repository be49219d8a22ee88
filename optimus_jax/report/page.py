"""A page as data, and the HTML document that it makes: sections of blocks, as tables and charts.

The document needs no network: its styles, its script and plotly.js are in it. It follows the
reader's colour scheme and can be printed. The template escapes all text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

from optimus_jax.errors import ConfigError, explain
from optimus_jax.viz.canvas import (
    BLUE,
    GREEN,
    IDLE,
    INK,
    ORANGE,
    PLOTS,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jinja2 import Environment

COLOURS = {
    "ink": (INK, "#e8e8e8"),
    "paper": ("#ffffff", "#15181b"),
    "idle": (IDLE, "#34393e"),
    "blue": (BLUE, "#5fb4e8"),
    "orange": (ORANGE, "#f0b445"),
    "green": (GREEN, "#35c79f"),
    "purple": (PURPLE, "#dd9cc2"),
    "sky": (SKY, "#7cc7f0"),
    "vermillion": (VERMILLION, "#ff8a4a"),
    "yellow": (YELLOW, "#f5e96b"),
}
"""Colour name -> (colour on a light screen, on a dark screen). Charts are drawn in the light
colours; page.js replaces them on a dark screen."""
VARIABLES = {light.lower(): f"var(--{name})" for name, (light, _) in COLOURS.items()}
"""Light colour -> CSS variable, which follows the reader's colour scheme."""
LONG = 50
"""A fact of more characters than this spans two columns."""


@dataclass(frozen=True, kw_only=True)
class PlanName:
    """A cell with the name of a plan; the tooltip shows its whole layout."""

    kind: ClassVar[str] = "plan"
    words: str
    tooltip: str
    letter: str | None = None
    """Its letter on the page, if it has one."""
    colour: str = INK
    """Its colour on the page, one of COLOURS."""
    is_short: bool = True
    """Whether the words stay on one line."""

    @property
    def variable(self) -> str:
        """The colour as a CSS variable."""
        return VARIABLES[self.colour.lower()]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A cell with a date and time, which stays on one line."""

    kind: ClassVar[str] = "moment"
    words: str


Cell = str | PlanName | Moment


@dataclass(frozen=True, kw_only=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    cells: Sequence[Cell]
    style: str = ""
    """`note`, `warning`, `why` or `heading` of page.css; empty: plain."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names with their values."""

    kind: ClassVar[str] = "facts"
    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table whose first column holds the headings of its rows."""

    kind: ClassVar[str] = "table"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: Sequence[str] = ()
    """Headings of the columns that are aligned as numbers."""
    marked: frozenset[int] = frozenset()
    """Indices of the rows that are shaded."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with its texts. It cannot be inside a `Fold`, where it would be drawn without a
    width.
    """

    kind: ClassVar[str] = "chart"
    name: str
    """Id of the chart, unique on its page."""
    figure: "go.Figure"
    label: str
    """Description for screen readers."""
    caption: str

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.figure.to_dict()["layout"]["height"]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Blocks that show when their summary is clicked. They print as they are on the screen."""

    kind: ClassVar[str] = "fold"
    summary: Sequence[Cell]
    blocks: Sequence["PageBlock"]


PageBlock = Text | Facts | PageTable | Chart | Fold


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page with a heading, which the contents link to."""

    heading: str
    name: str
    """Id of the section, unique on its page."""
    blocks: Sequence[PageBlock]


def note(text: str) -> Text:
    """A paragraph in the style of a note."""
    return Text(cells=[text], style="note")


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


def page(
    title: str,
    sections: Sequence[Section],
    *,
    introduction: Sequence[Text] = (),
    refresh_s: int | None = None,
) -> str:
    """The HTML document.

    Args:
      introduction: paragraphs below the title.
      refresh_s: seconds after which a browser reads the page again; None: it does not.
    Raises:
      ConfigError: plotly or jinja2 is not installed.
    """
    check_page_packages()
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    charts = {
        block.name: json.loads(str(block.figure.to_json()))
        for section in sections
        for block in section.blocks
        if isinstance(block, Chart)
    }
    traces = [trace for chart in charts.values() for trace in chart["data"]]
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            introduction=introduction,
            sections=sections,
            refresh_s=refresh_s,
            colours=COLOURS,
            long=LONG,
            charts=charts,
            dark={light.lower(): dark for light, dark in COLOURS.values()},
            has_smoothing=any(trace.get("meta") == SMOOTH for trace in traces),
            plotly=Markup(get_plotlyjs()) if charts else "",
        )
    )


SMOOTH = "smooth"
"""`meta` of a trace whose y page.js smooths when the reader asks for it."""


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FunctionLoader

    files = resources.files("optimus_jax.report")
    return Environment(
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files.joinpath(name).read_text(encoding="utf-8")),
    )
