"""The code blocks of a page of the documentation, so that a test can run what a reader copies."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from django_outbox import registry

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(
    r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL
)


def blocks(page: str) -> dict[str, str]:
    """Return the Python blocks of a page, in order, by their title or else their line."""
    text = (DOCS / page).read_text()
    found = {}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        # Empty lines before the code have a traceback name the line of the page.
        found[match["title"] or f"line {line}"] = "\n" * line + match["code"]
    assert found, f"no sample in {page}"
    return found


@contextmanager
def modules(page: str) -> Iterator[dict[str, ModuleType]]:
    """Make a module of each block that is titled by its file, so that paths lead to it.

    ``shop/hooks.py`` becomes ``shop.hooks``. Afterwards they and their listeners are forgotten.
    """
    before = {*registry.listeners()}
    made: dict[str, ModuleType] = {}
    try:
        for title, code in blocks(page).items():
            if title.endswith(".py"):
                name = title.removesuffix(".py").replace("/", ".")
                sys.modules[name] = made[name] = ModuleType(name)
                exec(compile(code, str(DOCS / page), "exec"), vars(made[name]))
        assert made, f"no sample with a file's name in {page}"
        yield made
    finally:
        for name in made:
            del sys.modules[name]
        for each in {*registry.listeners()} - before:
            registry.remove(each.call)


@contextmanager
def run(page: str, **given: Any) -> Iterator[dict[str, Any]]:
    """Run all blocks of a page in one namespace and lend it; then forget its listeners."""
    before = {*registry.listeners()}
    names = {"__name__": "sample", **given}
    try:
        for code in blocks(page).values():
            exec(compile(code, str(DOCS / page), "exec"), names)
        yield names
    finally:
        for each in {*registry.listeners()} - before:
            registry.remove(each.call)
