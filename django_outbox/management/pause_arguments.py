"""Options that ``outbox_pause`` and ``outbox_resume`` share: what to pause, and the database."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections, router

from ..models import OutboxPause, missing_table

KINDS: Final = {
    "event_type": ("--event-type", "TYPE", "the events of this type"),
    "listener": ("--listener", "TITLE", 'what this listener gets: its event type and name, "x y"'),
    "stream": ("--stream", "KEY", "the events with this key, in their order"),
    "queue": ("--queue", "NAME", "what waits in this queue"),
}
# A worker opens a circuit breaker; people can only end one.
RESUMABLE: Final = {
    **KINDS, "breaker": ("--breaker", "QUEUE", "the open circuit breaker of this queue"),
}  # fmt: skip


Kinds = Mapping[str, tuple[str, str, str]]  # option, metavar and help text by kind


def add_names(parser: ArgumentParser, kinds: Kinds) -> None:
    """Add ``--database`` to a command, and the options that name pauses, which may be repeated."""
    for kind, (option, metavar, text) in kinds.items():
        parser.add_argument(
            option, action="append", dest=kind, metavar=metavar, default=[],
            help=f"{text}; may be repeated",
        )  # fmt: skip
    parser.add_argument(
        "--database", choices=tuple(connections), help="alias; default: the router's"
    )


def named_pauses(options: dict[str, Any], kinds: Kinds) -> list[tuple[str, str]]:
    """Return the kind and name of each pause that was named."""
    return [(kind, name) for kind in kinds for name in options[kind]]


def checked_alias(alias: str | None) -> str:
    """Return the alias, or the router's; raises ``CommandError`` if a table is missing."""
    if missing := missing_table(alias):
        raise CommandError(missing)
    return alias or router.db_for_write(OutboxPause)
