"""Matplotlib figures as inline SVG: text stays text, colours follow the page's, parts have
tooltips.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from optimus_jax.errors import ConfigError, explain
from optimus_jax.report.page import VARIABLES, Html
from optimus_jax.viz.canvas import INK, PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REM_PER_INCH = 7.6
"""Maximum scale of a chart; a page is 70 rem wide."""
_COLOUR = re.compile("|".join(VARIABLES), re.IGNORECASE)
_LOCAL = re.compile(r"url\(#|^#(?![0-9a-fA-F]{6}$)")
"""Matches an attribute that refers to an id of the same chart."""
_NOT_FOR_PAGES = (f"{{{SVG}}}style", f"{{{SVG}}}metadata")
"""Elements to remove: a chart's style rules would apply to the whole page."""


@contextmanager
def page_settings() -> Iterator[None]:
    """Matplotlib settings that `to_svg` needs, while a figure is made and while it is converted.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            explain(
                "a report's charts need matplotlib, which is not installed",
                given=str(error),
                do=PLOTS,
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
    # A `$` in a run's name is not a formula. The fixed salt makes the SVG reproducible.
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
      name: prefix of all ids in it, so that ids are unique on a page.
      label: text for screen readers.
      titles: gid of an artist -> tooltip.
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
    """An attribute's value with the page's colour variables and prefixed ids."""
    return _COLOUR.sub(
        lambda match: VARIABLES[match[0].lower()],
        _LOCAL.sub(lambda match: f"{match[0]}{name}-", value),
    )
