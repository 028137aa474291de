"""The documentation as a site: Sphinx, MyST for the Markdown, furo for the looks.

Every page is plain Markdown that reads the same on the repository's page. What only a site needs
is added here, while the pages are read: the navigation, from the links of ``index.md``, and the
captions of code blocks, from their ``title``.
"""

from __future__ import annotations

import re
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.application import Sphinx

project = "django-transactional-outbox"
author = copyright = "the django-transactional-outbox contributors"
version = release = re.findall(
    r'^__version__ = "(.+)"$',
    (Path(__file__).parent.parent / "django_outbox" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)[0]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
needs_sphinx = installed("sphinx").partition(".")[0]

myst_heading_anchors = 4  # [text](page.md#a-heading) is checked, like [text](page.md)
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "django-transactional-outbox"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"

SECTION = re.compile(r"^## (?P<caption>.+)\n(?P<body>(?:(?!^## ).*\n?)*)", re.MULTILINE)
PAGE = re.compile(r"^- \[[^]]+\]\((?P<page>[a-z-]+/[a-z-]+)\.md\)", re.MULTILINE)
TITLED = re.compile(r'^```(?P<lexer>\w+) title="(?P<title>[^"]+)"(?: \w+)?$', re.MULTILINE)
FLAGGED = re.compile(r"^```(?P<lexer>\w+) \w+$", re.MULTILINE)


def navigation(index: str) -> str:
    """Return one hidden table of contents for each section of the index that links pages."""
    trees = []
    for section in SECTION.finditer(index):
        if pages := PAGE.findall(section["body"]):
            options = [":hidden:", f":caption: {section['caption']}", ""]
            trees.append("\n".join(["```{toctree}", *options, *pages, "```"]))
    return "\n\n".join(trees)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Add to a page what only the site shows."""
    text = TITLED.sub(r"```{code-block} \g<lexer>\n:caption: \g<title>\n", source[0])
    text = FLAGGED.sub(r"```\g<lexer>", text)
    source[0] = f"{text}\n\n{navigation(text)}\n" if name == "index" else text


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
