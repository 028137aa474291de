"""The reference has what the code has: settings, checks, signals, commands, names, columns."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, load_command_class

import django_outbox as outbox
from django_outbox import conf, exceptions, signals, testing
from django_outbox.listeners import retry
from django_outbox.management import commands
from django_outbox.models import OutboxEvent
from tests.rules import Rule, Text

COMMANDS = [each.name for each in pkgutil.iter_modules(commands.__path__)]
POLICIES: dict[str, Any] = {
    "exponential": retry.Exponential,
    "fixed": retry.Fixed,
    "linear": retry.Linear,
}


def page(root: Path, name: str) -> Text:
    return Text.read(root, f"docs/reference/{name}")


def same(
    text: Text, what: str, found: Iterable[tuple[int, str]], known: Iterable[str]
) -> Iterator[str]:
    """Yield the faults of a page that should have exactly the known names."""
    places, known = {name: position for position, name in found}, {*known}
    first = len(text.text) - len(text.text.lstrip("\n"))  # of a section
    for name in sorted(known - {*places}):
        yield text.fault(first, f"no {what} {name}; add it")
    for name in sorted({*places} - known):
        yield text.fault(places[name], f"the code has no {what} {name}; remove it")


def missing(text: Text, what: str, known: Iterable[str]) -> Iterator[str]:
    """Yield a fault for each name that a page has nowhere in code."""
    for name in known:
        if f"`{name}`" not in text.text:
            yield text.fault(0, f"no {what} {name}; add it")


# --- settings ------------------------------------------------------------------------------------


def settings_have_a_row(root: Path) -> Iterator[str]:
    """Every setting has a row with its default, and there is no other."""
    text, defaults = page(root, "settings.md"), conf.Settings()
    rows = {
        found[1]: found
        for found in re.finditer(r"^\| `([A-Z_]+)` \| `([^`]+)`", text.text, re.MULTILINE)
    }
    for name in (each.name for each in dataclasses.fields(conf.Settings)):
        value = getattr(defaults, name)
        if name not in rows:
            yield text.fault(0, f"no row of {name} with its default; add it")
        elif ast.literal_eval(rows[name][2]) != value:
            yield text.fault(rows[name].start(), f"the default of {name} is {value!r}; correct it")


def no_other_settings(root: Path) -> Iterator[str]:
    text, known = (
        page(root, "settings.md"),
        {each.name for each in dataclasses.fields(conf.Settings)},
    )
    for cells in re.finditer(r"^\| (`[A-Z].*?) \|", text.text, re.MULTILINE):
        for name in {*re.findall(r"`([A-Z_]+)`", cells[1])} - known:
            yield text.fault(cells.start(), f"the code has no setting {name}; remove it")


def policies_have_their_defaults(root: Path) -> Iterator[str]:
    text = page(root, "settings.md")
    for name, policy in POLICIES.items():
        row = re.search(rf'^\| `"{name}"` \| (.*?) \|', text.text, re.MULTILINE)
        if row is None:
            yield text.fault(0, f"no row of the policy {name}; add it")
            continue
        given = eval(f"dict({', '.join(re.findall('`([^`]+)`', row[1]))})")
        if policy(**given) != policy():
            yield text.fault(row.start(), f"the defaults are {policy()!r}; correct the row")


# --- checks, signals, commands, columns ----------------------------------------------------------


def checks_are_listed(root: Path) -> Iterator[str]:
    source = "".join(each.read_text() for each in (root / "django_outbox").rglob("*.py"))
    known = {*re.findall(r'id="django_outbox\.([EWI]\d{3})"', source)}
    text = page(root, "checks.md")
    if len(known) < 9:
        yield text.fault(0, "hardly any check is found; does tests/rules/reference.py read them?")
    yield from same(text, "check", text.names(r"`django_outbox\.([EWI]\d{3})`"), known)


def signals_are_listed(root: Path) -> Iterator[str]:
    names = [name for name, each in vars(signals).items() if isinstance(each, signals.Signal)]
    yield from missing(page(root, "signals.md"), "signal", names)


def columns_are_listed(root: Path) -> Iterator[str]:
    columns = [field.column for field in OutboxEvent._meta.local_fields]
    yield from missing(page(root, "tables.md"), "column", columns)


def options_of_commands_are_listed(root: Path) -> Iterator[str]:
    """Every command has a section whose table has exactly its options."""
    text = page(root, "commands.md")
    for name in COMMANDS:
        parser = load_command_class("django_outbox", name).create_parser("manage.py", name)
        plain = BaseCommand().create_parser("manage.py", "any")
        options = {*parser._option_string_actions} - {*plain._option_string_actions}
        section = text.section(f"## `{name}`\n")
        if not section.text:
            yield text.fault(0, f"no section of the command {name}; add it")
            continue
        found = [
            (cell.start(), option)
            for cell in re.finditer(r"^\| (`-.*?) \|", section.text, re.MULTILINE)
            for option in re.findall(r"--[a-z-]+", cell[1])
        ]
        yield from same(section, f"option of {name}", found, options - {"--skip-checks"})


# --- the public names ----------------------------------------------------------------------------


def arguments_of_write_are_listed(root: Path) -> Iterator[str]:
    section = page(root, "api.md").section("### `write(", level=3)
    found = [
        (cell.start(), name)
        for cell in re.finditer(r"^\| (`.*?) \|", section.text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell[1])
    ]
    known = inspect.signature(outbox.write).parameters
    yield from same(section, "argument of write", found, known)


def errors_are_public(root: Path) -> Iterator[str]:
    del root
    for name, each in vars(exceptions).items():
        own = isinstance(each, type) and each.__module__ == exceptions.__name__
        if own and name not in outbox.__all__:
            yield f"django_outbox/exceptions.py:1: {name} is not in __all__; export it"


def public_names_are_in_the_reference(root: Path) -> Iterator[str]:
    """Every public name is on the page of the API, which has no other."""
    api = page(root, "api.md")
    chapters = api.text.partition("## Reading and acting")[0]
    headings = [*re.finditer(r"^### .*$", chapters, re.MULTILINE)]
    shown = {
        name: heading.start()
        for heading in headings
        for name in re.findall(r"`(?:await )?(\w+)", heading[0])
    }
    for name, position in shown.items():
        if name not in outbox.__all__:
            yield api.fault(position, f"{name} is not public; remove it, or export it")
    listed = {*shown, *re.findall(r"`(\w+)[(`.]", api.text)}
    for name in sorted({*outbox.__all__} - listed):
        yield api.fault(0, f"no public name {name}; add it")


def public_names_have_docstrings(root: Path) -> Iterator[str]:
    del root
    for module, names in ((outbox, outbox.__all__), (testing, testing.__all__)):
        for name in names:
            value = getattr(module, name)
            if callable(value) and not (value.__doc__ or "").strip():
                yield f"{module.__name__.replace('.', '/')}:1: {name} has no docstring; write one"


def names_of_the_test_kit_are_listed(root: Path) -> Iterator[str]:
    section = page(root, "api.md").section("## Testing")
    items = section.names(r"^- `(\w+)")
    yield from same(section, "name of the test kit", items, testing.__all__)


RULES: list[Rule] = [
    settings_have_a_row,
    no_other_settings,
    policies_have_their_defaults,
    checks_are_listed,
    signals_are_listed,
    columns_are_listed,
    options_of_commands_are_listed,
    arguments_of_write_are_listed,
    errors_are_public,
    public_names_are_in_the_reference,
    public_names_have_docstrings,
    names_of_the_test_kit_are_listed,
]
