"""How Sphinx builds this documentation: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sphinx.ext.napoleon import Config, GoogleDocstring

import llm_datadist

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "llm-datadist"
author = "the llm-datadist authors"
version = release = llm_datadist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # the text is full of values and options

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"llm-datadist {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def _name_files_outside(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Links out of this folder work in a checkout only: name the file instead."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` of the repository)", source[0])


def _read_google_style(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """As sphinx.ext.napoleon, which however takes what stands before the first colon of a property for its type."""
    kind = "method" if what in {"attribute", "property"} else what
    lines[:] = GoogleDocstring(list(lines), Config(napoleon_use_ivar=True), app, kind, name, obj, options).lines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _read_google_style)
    app.connect("source-read", _name_files_outside)
