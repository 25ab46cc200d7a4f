"""Configuration of the documentation site: ``make docs`` builds it into ``docs/_build/html``."""

from importlib.metadata import version as installed_version

project = "became-avalanche"
author = "The became-avalanche developers"
project_copyright = author
version = release = installed_version("became-avalanche")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # a test executes the notebook; the site shows the outputs that are stored in it
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
nitpicky = False

intersphinx_mapping = {}  # the build needs no network

html_theme = "furo"
html_title = "became-avalanche"
html_static_path = ["_static"]
html_css_files = ["site.css"]
