"""Colours that are safe for colour-blind readers, and an empty figure; all pictures use them.

Colour is never the only cue: labels, line styles or markers repeat what it says.
"""

from typing import TYPE_CHECKING

from optimus_jax.errors import ConfigError, explain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
"""Okabe and Ito, Color Universal Design, 2008."""
HUES = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION, "#BBBBBB")
"""Colours for unordered categories, paler ones first."""
STRONG, LINES, MARKERS = (
    (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, "#222222"),
    ("-", "--", "-.", ":"),
    "osD^vP",
)
"""Colours, line styles and markers for lines and points on white."""
IDLE, INK = "#E6E6E6", "#222222"
"""Colours of idle time and of text."""
EXTRA = "pip install 'optimus-jax[notebooks]'"
PLOTS = "pip install 'optimus-jax[plots]'"
"""What to do without the packages of notebooks, and without those of pages."""


def ink_on(colour: str) -> str:
    """Text colour on a background: white on blue, which alone of the hues is dark enough."""
    return "white" if colour == BLUE else INK


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, sharex: bool = False
) -> tuple["Figure", list["Axes"]]:
    """An empty figure of `width` x `height` inches and its rows * columns axes, row by row. It is
    not attached to pyplot.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain("pictures need matplotlib, which is not installed", given=str(error), do=EXTRA)
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).ravel())
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
