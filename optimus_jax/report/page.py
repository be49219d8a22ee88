"""A self-contained HTML page: no scripts, no network, light and dark colours, printable.

`element` escapes all text that it puts on a page; `Html` marks a string that is markup already.
"""

import html
from collections.abc import Sequence
from importlib import resources
from string import Template

from optimus_jax.viz.canvas import BLUE, GREEN, IDLE, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

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
colours."""
VARIABLES = {light.lower(): f"var(--{name})" for name, (light, _) in COLOURS.items()}
"""Light colour -> CSS variable, which follows the reader's colour scheme."""
NUMBER_STYLE = "number"
LONG = 50
"""A definition of more characters than this spans two columns."""


class Html(str):
    """A string that is markup already and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
    """An HTML element with its children in order; text and attributes are escaped.

    Args:
      attributes: names that Python reserves end in `_`; any other `_` becomes `-`: `class_`,
        `aria_label`.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
    )
    return Html(f"<{tag}{given}>{concatenated(*children)}</{tag}>")


def concatenated(*parts: str) -> Html:
    """The parts one after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> Html:
    """A table whose first column holds the row headings.

    Args:
      numbers: headings of the columns to align as numbers.
    """
    kinds = [{"class_": NUMBER_STYLE} if name in numbers else {} for name in head]
    header = element(
        "tr",
        *(element("th", name, scope="col", **kind) for name, kind in zip(head, kinds, strict=True)),
    )
    body = [
        element(
            "tr",
            element("th", row[0], scope="row", **kinds[0]),
            *(element("td", cell, **kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    ]
    inner = element(
        "table", element("caption", caption), element("thead", header), element("tbody", *body)
    )
    # A wide table scrolls sideways in its own frame; tabindex lets the keyboard reach it.
    return element("div", inner, class_="frame", role="region", aria_label=caption, tabindex="0")


def definition_list(pairs: Sequence[tuple[str, str]]) -> Html:
    """A `dl` of (name, value) pairs."""
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element("dd", value),
                class_="long" if not isinstance(value, Html) and len(value) > LONG else "short",
            )
            for name, value in pairs
        ),
    )


def collapsible(summary: str, *children: str, **attributes: str) -> Html:
    """A `details` element: its children show when the summary is clicked. It prints closed."""
    return element("details", element("summary", summary), *children, **attributes)


def note(text: str) -> Html:
    """A paragraph in the style of a note."""
    return element("p", text, class_="note")


def page(title: str, body: Html) -> str:
    """The whole document."""
    return _DOCUMENT.substitute(title=html.escape(title), style=_style(), body=body)


def _style() -> str:
    light, dark = (
        "".join(f"--{name}:{pair[which]};" for name, pair in COLOURS.items()) for which in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n@media screen and"
        f" (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_RULES}"
    )


_DOCUMENT = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style</style>
</head>
<body>
$body
</body>
</html>
""")

_RULES = resources.files("optimus_jax.report").joinpath("page.css").read_text(encoding="utf-8")
