"""Sphinx: what the site is made with. `make docs` builds it, and needs no network."""

from optimus_jax.version import VERSION

project = "optimus_jax"
release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_typehints = "description"
html_theme = "furo"
# Mermaid and untyped code stay as they are written.
suppress_warnings = ["misc.highlighting_failure"]
