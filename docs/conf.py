"""Sphinx reads the pages as they are on GitHub (MyST) and the API from the docstrings: `make docs`.

Warnings are errors there. The site needs no file of the lab: its pages link to the repository. Docstrings are plain
text with code in backticks, so they are made reStructuredText first.
"""

import re
from pathlib import Path
from typing import Any

import seqjax

README = Path(__file__).parents[1] / "README.md"
REPOSITORY = "https://github.com/OWNER/seqjax"  # a placeholder: write the address of the repository here

project = "seqjax"
copyright = "the seqjax authors"
version = release = seqjax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"seqjax {release}"

myst_heading_anchors = 4
myst_links_external_new_tab = False

default_role = "code"
smartquotes = False  # two dashes begin an option
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Example):$")


def as_restructured(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape what is markup to reStructuredText, and show indented blocks as they are written."""
    del app, what, name, obj, options
    if lines and lines[0].startswith("Alias for field number"):  # what a NamedTuple says of a field
        lines.clear()
    text, section, block = [], False, False
    for line in lines:
        indented = line.startswith("    ")
        if line and not indented:
            section, block = bool(SECTION.match(line)), False
        if indented and not section and not block and (not text or not text[-1]):
            text += ["::", ""]
            block = True
        text.append(line if block else escaped(line))
    lines[:] = text


def escaped(line: str) -> str:
    """Return a line in which asterisks, bars and trailing underscores outside of backticks are themselves."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*|]|_(?=\W|$))", r"\\\1", part) for part in parts)


def front_page(app: Any, docname: str, source: list[str]) -> None:
    """Put README at the beginning of the index; its links to files outside docs become links to the repository."""
    del app
    if docname == "index":
        text = README.read_text(encoding="utf-8").replace("](docs/", "](")
        source[0] = re.sub(r"\]\((?=colab/|lab/|[A-Z]+\.)", f"]({REPOSITORY}/blob/main/", text) + "\n" + source[0]


def link_lab(app: Any, docname: str, source: list[str]) -> None:
    """Make links of a page to files of the lab links to the repository."""
    del app, docname
    source[0] = source[0].replace("](../lab/", f"]({REPOSITORY}/blob/main/lab/")


def link_files(app: Any, doctree: Any) -> None:
    """Make links to Markdown files outside docs downloads, as links to files of other kinds are."""
    from sphinx import addnodes  # the rest of this file is tested without Sphinx

    for link in list(doctree.findall(addnodes.pending_xref)):
        if link.get("refdomain") == "doc" and link["reftarget"] not in app.env.found_docs:
            target = f"/{link['reftarget']}.md"
            link.replace_self(
                addnodes.download_reference("", "", *link.children, reftarget=target, refdoc=link["refdoc"])
            )


def setup(app: Any) -> None:
    """Docstrings before napoleon reads the sections, links before Sphinx collects the files."""
    app.connect("source-read", link_lab)
    app.connect("source-read", front_page)
    app.connect("autodoc-process-docstring", as_restructured, priority=400)
    app.connect("doctree-read", link_files, priority=400)
