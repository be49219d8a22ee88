"""Settings of Sphinx. `make docs` builds the site and needs no network."""

from optimus_jax.version import VERSION

project = "optimus_jax"
release = VERSION
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are stored with their outputs (notebooks/run.py)
autodoc_typehints = "description"
html_theme = "furo"
# Mermaid diagrams and code without a language are shown as they are written.
suppress_warnings = ["misc.highlighting_failure"]
