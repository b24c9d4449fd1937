"""Settings of the documentation site. `make docs` builds it with warnings as errors."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT / "packaging" / "python")]

import c_reference
import docstrings
import plots
import records

project = "Spillway"
author = "the Spillway authors"
release = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "tools"]
root_doc = "index"
html_theme = "furo"
html_title = f"Spillway {release}"
nitpicky = False

myst_enable_extensions = ["deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
# The site is built without torch.
autodoc_mock_imports = ["torch"]
autodoc_default_options = {"members": True}


def _markdown_docstring(app, what, name, obj, options, lines):
    lines[:] = docstrings.converted(lines)


def _skips(app, what, name, obj, skip, options):
    """Fields of named tuples are described in the docstrings of the tuples."""
    return True if type(obj).__name__ == "_tuplegetter" else skip


def _links_to_the_repository(app, name, source):
    if not name.startswith(("records/", "reference/c/")):
        source[0] = records.inside(name, source[0])


def setup(app):
    c_reference.write()
    plots.write()
    records.write()
    app.connect("source-read", _links_to_the_repository)
    app.connect("autodoc-skip-member", _skips)
    app.connect("autodoc-process-docstring", _markdown_docstring)
