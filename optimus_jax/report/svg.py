"""A matplotlib figure as a piece of a page: text that stays text, colours that follow the page's,
and words under the pointer.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from optimus_jax.errors import ConfigError, explain
from optimus_jax.report.page import VARIABLES, Html
from optimus_jax.viz.canvas import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REM_PER_INCH = 7.6
"""At most; a page is 70 rem wide."""
_COLOUR = re.compile("|".join(VARIABLES), re.IGNORECASE)
_LOCAL = re.compile(r"url\(#|^#(?![0-9a-fA-F]{6}$)")
"""Where an attribute names an element of its own picture."""
_NOT_FOR_PAGES = (f"{{{SVG}}}style", f"{{{SVG}}}metadata")
"""Rules of a style would hold for everything else on the page too."""


@contextmanager
def page_settings() -> Iterator[None]:
    """Within this, figures are made and turned into SVG the way that `to_svg` needs.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                "a report's pictures need matplotlib, which is not installed",
                given=str(error),
                do="pip install 'optimus-jax[plots]'",
            )
        ) from error
    ink = dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "hatch.color",
        ),
        INK,
    )
    # A `$` in the name of a run is no formula; the salt makes one figure one text.
    with matplotlib.rc_context(
        {
            **ink,
            "svg.fonttype": "none",
            "svg.hashsalt": "optimus_jax",
            "text.parse_math": False,
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.axisbelow": True,
        }
    ):
        yield


def to_svg(figure: "Figure", *, name: str, label: str, titles: Mapping[str, str]) -> Html:
    """The figure as an `svg` element.

    Args:
      name: what its parts' ids begin with, so that no two pictures of a page share one.
      label: what a screen reader says instead of the picture.
      titles: gid of an artist -> text shown while a pointer is over it.
    """
    file = io.StringIO()
    figure.savefig(
        file,
        format="svg",
        transparent=True,
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(file.getvalue())
    for part in list(root.iter()):
        for child in [child for child in part if child.tag in _NOT_FOR_PAGES]:
            part.remove(child)
        if (text := titles.get(part.get("id", ""))) is not None:
            title = ElementTree.Element(f"{{{SVG}}}title")
            title.text = text
            part.insert(0, title)
        for key, value in part.items():
            part.set(key, f"{name}-{value}" if key == "id" else _on_page(value, name))
    for size in ("width", "height"):  # the page's style decides
        root.attrib.pop(size, None)
    root.set("style", f"max-width:{figure.get_figwidth() * REM_PER_INCH:.1f}rem")
    root.set("role", "img")
    root.set("aria-label", label)
    return Html(ElementTree.tostring(root, encoding="unicode"))


def _on_page(value: str, name: str) -> str:
    """An attribute with the page's colours, and with the new names of what it points to."""
    return _COLOUR.sub(
        lambda found: VARIABLES[found[0].lower()],
        _LOCAL.sub(lambda found: f"{found[0]}{name}-", value),
    )
