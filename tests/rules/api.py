"""The page of the Python API is made from the docstrings, and every public name has an entry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from django.dispatch import Signal

import django_outbox as outbox
from django_outbox import relays, signals, testing
from django_outbox.contrib import logs, opentelemetry
from tests import api_reference
from tests.api_entries import CHAPTERS
from tests.rules import Rule, Text

ENTRIES = [entry for entries in CHAPTERS.values() for entry in entries]
LIST = "tests/api_entries.py:1"
PUBLIC: dict[str, set[str]] = {
    "django_outbox": {*outbox.__all__} - {"inbox"},
    "django_outbox.testing": {*testing.__all__},
    "django_outbox.relays": {*relays.__all__} - {"BrokerUnavailable"},
    "django_outbox.inbox": {*outbox.inbox.__all__},
}


def page_is_up_to_date(root: Path) -> Iterator[str]:
    page = Text.read(root, "docs/reference/api.md")
    made = api_reference.rewritten(page.text)
    if made != page.text:
        pairs = zip(made, page.text, strict=False)
        first = next((place for place, (new, old) in enumerate(pairs) if new != old), 0)
        yield page.fault(first, "not what the code says; run python -m tests.api_reference")


def lines_have_the_right_width(root: Path) -> Iterator[str]:
    page, in_code = Text.read(root, "docs/reference/api.md"), False
    for number, line in enumerate(page.text.splitlines(), 1):
        in_code ^= line.startswith("```")
        if not in_code and line[:1] != "|" and len(line) > api_reference.WIDTH:
            yield f"{page.path}:{number}: longer than {api_reference.WIDTH}; break the line"


def public_names_have_an_entry(root: Path) -> Iterator[str]:
    """The list of entries has the public names of each module and no other."""
    del root
    for module, public in PUBLIC.items():
        paths = [entry.path.partition(":") for entry in ENTRIES]
        listed = {name for path, _, name in paths if path == module} - {"signals"}
        for name in sorted(public ^ listed):
            yield f"{LIST}: {module}:{name} is either not public or has no entry; add or remove it"
    for module in (logs, opentelemetry):
        for name, value in vars(module).items():
            own = name[0] != "_" and getattr(value, "__module__", "") == module.__name__
            if own and f"{module.__name__}:{name}" not in {entry.path for entry in ENTRIES}:
                yield f"{LIST}: {module.__name__}:{name} has no entry; add it"


def signals_are_named(root: Path) -> Iterator[str]:
    del root
    [chapter] = CHAPTERS["signals"]
    named = {*re.findall(r"``([a-z_]+)``", chapter.text)} - {"sender"}
    known = {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    for name in sorted(known ^ named):
        yield f"{LIST}: the signal {name} is missing in the chapter or in the code; correct it"


def entries_are_complete(root: Path) -> Iterator[str]:
    """An entry says what the name is and what is promised, and shows one example."""
    del root
    for entry in ENTRIES:
        parts = [*api_reference.parts(entry)]
        if not (entry.text or inspect.getdoc(entry.value())):
            yield f"{LIST}: {entry.path} has no description; write a docstring"
        if not entry.see and not any(part.startswith("```python\n") for part in parts):
            yield f"{LIST}: {entry.path} has no example and no guide; add one"
        if any("``" in part for part in parts if not part.startswith("```")):
            yield f"{LIST}: {entry.path} has double backticks on the page; use a form that is read"
        for method in entry.methods:
            if not inspect.getdoc(inspect.getattr_static(entry.value(), method)):
                yield f"{LIST}: {entry.path}.{method} has no docstring; write one"


RULES: list[Rule] = [
    page_is_up_to_date,
    lines_have_the_right_width,
    public_names_have_an_entry,
    signals_are_named,
    entries_are_complete,
]
