# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for `make docs`. Its pages are the Markdown of the repository, where links lead as they do in a
checkout; only what is in this folder is for the site alone."""

import re
from pathlib import Path

from pygments.lexers.special import TextLexer

ROOT = Path(__file__).parents[2]

project = "lamina"
release = (ROOT / "VERSION").read_text().strip()
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lamina {release}"
html_copy_source = False
html_extra_path = ["index.html"]  # which leads to README.html

myst_heading_anchors = 4

# Docstrings are written to be read in a terminal.
default_role = "literal"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints_format = "short"
napoleon_use_ivar = True
napoleon_custom_sections = [("Errors", "params_style")]


def add_headers(app, name: str, source: list[str]) -> None:
    """The headers of C++ programs go to their page, each with its comments."""
    if name == "docs/site/cpp":
        headers = re.findall(r'#include "(.*)"', (ROOT / "lamina/lamina.h").read_text())
        for header in [*headers, "lamina/dist/dist.h", "lamina/session/timeline.h"]:
            source[0] += f"\n{header}\n{'-' * len(header)}\n\n.. literalinclude:: /{header}\n   :language: cpp\n"


def mark_code(app, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Indented lines below an empty one are code, as in Markdown."""
    for number in range(len(lines) - 1, 1, -1):
        below_text = lines[number - 2] and not lines[number - 2].startswith(" ")
        if below_text and not lines[number - 1] and lines[number].startswith("    "):
            lines[number:number] = [".. code-block:: python", ""]


def setup(app) -> None:
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
    app.connect("source-read", add_headers)
    app.add_lexer("mermaid", TextLexer)
