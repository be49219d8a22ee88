"""What all pictures share: colours that colour-blind people can tell apart, and an empty figure.

Colours are never the only sign: whatever they say stands in a label too.
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
"""For things with no order, paler ones first."""
STRONG, LINES, MARKERS = (
    (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, "#222222"),
    ("-", "--", "-.", ":"),
    "osD^vP",
)
"""For lines and points on white, with a second sign each."""
IDLE, INK = "#E6E6E6", "#222222"
"""Of waiting, and of text."""
EXTRA = "pip install 'optimus-jax[notebooks]'"


def ink_on(colour: str) -> str:
    """Colour of a text that is read on `colour`: of the hues, blue alone is dark enough for
    white."""
    return "white" if colour == BLUE else INK


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, sharex: bool = False
) -> tuple["Figure", list["Axes"]]:
    """An empty figure, `width` x `height` inches, and its rows * columns axes, row by row; it
    belongs to no window.

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
