"""Configuration of the documentation site: ``make docs`` builds it into ``docs/_build/html``."""

from importlib.metadata import version as installed_version
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

project = "became-avalanche"
author = "The became-avalanche developers"
project_copyright = author
version = release = installed_version("became-avalanche")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
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

autoclass_content = "both"  # the parameters are documented in __init__
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
nitpicky = False

intersphinx_mapping = {}  # the build needs no network

html_theme = "furo"
html_title = "became-avalanche"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"


def render_math(translator: Any, node: nodes.Element, display: str) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def drop_init(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Remove the summary line of constructors, which says nothing."""
    lines[:] = [line for line in lines if line != "Init."]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda self, node: render_math(self, node, "inline"), None),
        block_renderers=(lambda self, node: render_math(self, node, "block"), None),
    )
    app.connect("autodoc-process-docstring", drop_init)
