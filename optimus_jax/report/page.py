"""A self-contained HTML page: no scripts, no network, light and dark colours, printable.

`element` escapes all text that it puts on a page; `Html` marks a string that is markup already.
"""

import html
from collections.abc import Sequence
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
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
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

_RULES = """\
*{box-sizing:border-box}
body{margin:0 auto;max-width:70rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;margin:0}h2{font-size:1.25rem;margin:2.5rem 0 .5rem;border-bottom:1px solid var(--idle)}h3{font-size:1rem;margin:1.5rem 0 .25rem}
a{color:var(--blue)}p{margin:.4rem 0}.note,figcaption,caption{font-size:.875rem;opacity:.85}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:1rem 0;list-style:none}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:.6rem 1.5rem;margin:1rem 0}
dt{font-size:.8rem;opacity:.8}dd{margin:0;font-weight:600}
figure{margin:.5rem 0}figure svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round;stroke-linecap:butt}svg text{font-family:system-ui,sans-serif!important}
.frame{overflow-x:auto;margin:.75rem 0}table{border-collapse:collapse;font-size:.875rem;min-width:40%}
caption{text-align:left;padding:.2rem 0}th,td{text-align:left;vertical-align:top;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--idle)}
thead th{border-bottom-width:2px}thead th:first-child{white-space:nowrap}tbody th{font-weight:600}time,span.short{white-space:nowrap}span.layout{display:inline-block;min-width:13rem}div.long{grid-column:span 2}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.decision{border-left:4px solid var(--blue);padding:.3rem 0 .3rem 1rem;margin:1rem 0}.decision .why{font-size:1.1rem}
.warning{border-left:4px solid var(--vermillion);padding-left:1rem}
.plan{display:inline-block;min-width:1.7em;padding:0 .3em;margin-right:.4em;border:1px solid var(--plan);border-radius:.25em;text-align:center;font-weight:700;
background:color-mix(in srgb,var(--plan) 25%,transparent)}
summary{cursor:pointer}details details{margin:.3rem 0 .3rem 1.2rem}.log{font-size:.8rem}
@media print{body{max-width:none;padding:0;font-size:9pt}nav{display:none}figure,tr,.decision{break-inside:avoid}h2,h3{break-after:avoid}.frame{overflow:visible}}
"""
