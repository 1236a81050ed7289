"""The documentation as a site: `make docs` writes it to out/docs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import reference_pages  # noqa: E402

from graphflow._version import __version__  # noqa: E402

project = "graphflow"
author = "the graphflow developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["README.md"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = f"graphflow {__version__}"
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures hold them
autodoc_preserve_defaults = True
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
suppress_warnings = ["myst.header"]  # pages may begin deep


def setup(app: object) -> None:
    """Write the reference's pages, and read docstrings as the text that they are."""
    reference_pages.write_pages(HERE / "reference")
    app.connect("autodoc-skip-member", reference_pages.skip_member)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", reference_pages.escape_docstring)  # type: ignore[attr-defined]
