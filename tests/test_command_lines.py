"""Command lines as the documentation shows them: each is one that its command takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from unittest.mock import patch

from django.core.management import get_commands, load_command_class
from django.db import connections

from tests.cases import cases
from tests.samples import DOCS

SHELL = re.compile(r"manage\.py (outbox_\w+)((?: [^\n`#&|>]+)?)")
LISTED = re.compile(r'\["python", "manage\.py", "(outbox_\w+)"([^\]]*)\]')


def lines() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Page, command and arguments of each command line in the documentation."""
    for page in sorted(DOCS.rglob("*.md")):
        text, name = page.read_text(), str(page.relative_to(DOCS))
        for command, rest in SHELL.findall(text):
            yield name, command, tuple(shlex.split(rest))
        for command, rest in LISTED.findall(text):
            yield name, command, tuple(json.loads(f"[{rest.lstrip(', ')}]"))


FOUND = sorted(set(lines()))


@cases("page, command, arguments", FOUND, ids=[f"{p} {c} {' '.join(a)}" for p, c, a in FOUND])
def test_a_command_line_of_the_documentation_is_taken(
    page: str, command: str, arguments: tuple[str, ...]
) -> None:
    aliases = dict.fromkeys([*arguments, "default"], connections.settings["default"])
    with patch.dict(connections.settings, aliases):  # the reader's
        loaded = load_command_class(get_commands()[command], command)
        loaded.create_parser("manage.py", command).parse_args([*arguments])


def test_there_are_command_lines() -> None:
    assert {command for _, command, _ in FOUND} >= {"outbox_worker", "outbox_status"}
    assert len(FOUND) > 5


COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_outbox")


@cases("name", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_it_takes(name: str) -> None:
    parser = load_command_class("django_outbox", name).create_parser("manage.py", name)
    listed = parser.format_help().rpartition("Examples:\n")[2].splitlines()
    assert len(listed) >= 2
    assert all(line.startswith("  # ") for line in listed[::2])
    for line in listed[1::2]:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("manage.py", name)
        parser.parse_args(arguments)


@cases("name", COMMANDS)
def test_every_option_of_a_command_is_explained(name: str) -> None:
    parsers = [load_command_class("django_outbox", name).create_parser("manage.py", name)]
    for parser in parsers:
        for action in parser._actions:
            assert action.help, action.option_strings or action.dest
            if isinstance(action.choices, dict):  # parsers of its actions
                parsers.extend(action.choices.values())
