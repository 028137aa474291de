"""The code blocks of a page of the documentation, so that a test can run what a reader copies."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from django_outbox.listeners import registry

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(
    r'^```python(?: title="(?P<title>[^"]+)")?(?: \w+)?\n(?P<code>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?P<path>\S+)\.py(?: line \d+)?$")
SETTINGS = re.compile(r"\s*(?:OUTBOX|TASKS) =")  # of whatever title


def section(page: str) -> str:
    """Return the text of a page; of ``page.md#A heading`` only that section, its lines in place.

    ``page.md#..A heading`` is what comes before it.
    """
    path, _, heading = page.partition("#")
    text = (DOCS / path).read_text()
    if not heading:
        return text
    found = re.search(rf"^(#+) {re.escape(heading.removeprefix('..'))}$", text, re.MULTILINE)
    assert found, f"{path} has no section {heading}"
    if heading.startswith(".."):
        return text[: found.start()]
    outside = CODE.sub(lambda block: " " * len(block[0]), text)
    end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(outside, found.end())
    return (
        "\n" * text.count("\n", 0, found.start())
        + text[found.start() : end.start() if end else None]
    )


def blocks(page: str) -> dict[str, str]:
    """Return the Python blocks of a page, in order, by their title or else their line.

    A further block of the same title carries its line, too. ``page.md#heading`` is a section.
    """
    text = section(page)
    found = {}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        title = match["title"] or ""
        name = f"{title} line {line}".strip() if title in found or not title else title
        # Empty lines before the code have a traceback name the line of the page.
        found[name] = "\n" * line + match["code"]
    assert found, f"no sample in {page}"
    return found


def pages() -> Iterator[str]:
    """Yield the pages that have a sample, the README among them."""
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        if BLOCK.search(path.read_text()):
            yield os.path.relpath(path, DOCS)


def files(page: str) -> dict[str, str]:
    """Return the blocks of a page of which each is a file, by its path."""
    return {title: code.lstrip() for title, code in blocks(page).items() if FILE.match(title)}


def is_of_settings(title: str, code: str) -> bool:
    """Whether a block is for the settings: test_pages reads those of all pages."""
    return title.startswith("settings") or bool(SETTINGS.match(code))


@contextmanager
def modules(page: str, **given: Any) -> Iterator[dict[str, ModuleType]]:
    """Make a module of each block that is titled by its file, so that paths lead to it.

    ``shop/hooks.py`` becomes ``shop.hooks``; all blocks of one file make one module, which begins
    with what is ``given``. Afterwards they and their listeners are forgotten.
    """
    before = {*registry.listeners()}
    made: dict[str, ModuleType] = {}
    try:
        for title, code in blocks(page).items():
            if match := FILE.match(title):
                name = match["path"].replace("/", ".")
                if name not in made:
                    sys.modules[name] = made[name] = ModuleType(name)
                    vars(made[name]).update(given)
                exec(compile(code, str(DOCS / page), "exec"), vars(made[name]))
        assert made, f"no sample with a file's name in {page}"
        yield made
    finally:
        for name in made:
            del sys.modules[name]
        for each in {*registry.listeners()} - before:
            registry.remove(each.call)


@contextmanager
def run(page: str, *, only: str = "", **given: Any) -> Iterator[dict[str, Any]]:
    """Run the blocks of a page in one namespace and lend it; then forget its listeners.

    ``only`` is a text that one block has, which is then the only one to run.
    """
    before = {*registry.listeners()}
    names = {"__name__": "sample", **given}
    codes = [code for code in blocks(page).values() if only in code]
    assert not only or len(codes) == 1, f"{len(codes)} blocks of {page} have {only}"
    try:
        for code in codes:
            exec(compile(code, str(DOCS / page), "exec"), names)
        yield names
    finally:
        for each in {*registry.listeners()} - before:
            registry.remove(each.call)
