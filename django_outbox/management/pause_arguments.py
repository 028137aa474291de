"""Options of ``outbox_pause`` and ``outbox_resume``: what to pause, until when, the database."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from datetime import datetime, time, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections, router
from django.utils.dateparse import parse_datetime, parse_time
from django.utils.timezone import is_naive, localtime, make_aware

from ..models import OutboxPause, missing_table
from ..models.pause_queryset import until_error
from ..sql import dialect_of
from .arguments import retention

KINDS: Final = {
    "event_type": ("--event-type", "TYPE", "the events of this type"),
    "listener": ("--listener", "TITLE", 'what this listener gets: its event type and name, "x y"'),
    "stream": ("--stream", "KEY", "the events with this key, in their order"),
    "queue": ("--queue", "NAME", "what waits in this queue"),
}
# A worker opens a circuit breaker; people can only end one.
RESUMABLE: Final = {
    **KINDS,
    "breaker": ("--breaker", "QUEUE", "the open circuit breaker of this queue"),
}
TIME_OF_DAY: Final = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")

Kinds = Mapping[str, tuple[str, str, str]]  # option, metavar and help text by kind


def add_names(parser: ArgumentParser, kinds: Kinds) -> None:
    """Add ``--database`` to a command, and the options that name pauses, which may be repeated."""
    for kind, (option, metavar, text) in kinds.items():
        parser.add_argument(
            option,
            action="append",
            dest=kind,
            metavar=metavar,
            default=[],
            help=f"{text}; may be repeated",
        )
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


def add_end(parser: ArgumentParser) -> None:
    """Add the options that give a pause an end."""
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--until",
        type=end_time,
        metavar="TIME",
        help="a worker resumes it then: 09:00 (the next), or 2026-11-26T09:00",
    )
    end.add_argument(
        "--for",
        type=length,
        dest="length",
        metavar="DURATION",
        help="a worker resumes it after this time: 45m, 2h, 1d",
    )


def end_time(text: str) -> datetime | time:
    """Return an instant, or a time of day; both are in ``TIME_ZONE`` unless they have an offset."""
    try:
        found = parse_time(text) if TIME_OF_DAY.fullmatch(text) else parse_datetime(text)
    except ValueError as error:  # well formed, but not in the calendar
        raise ArgumentTypeError(f"{text!r} is not a time: {error}.") from error
    if found is None:
        raise ArgumentTypeError(
            f"{text!r} is not a time; expected 09:00 or 2026-11-26T09:00, with an offset if it is "
            "not in TIME_ZONE. For a duration, use --for."
        )
    return found


def length(text: str) -> float:
    """Return the seconds of a duration above zero that has a unit."""
    if not (seconds := retention(text)):
        raise ArgumentTypeError(f"{text!r} is nothing; expected a duration such as 45m or 2h.")
    return seconds


def pause_end(options: dict[str, Any], alias: str) -> datetime | None:
    """Return when the pause ends; None: not by itself. ``CommandError`` for a time in the past."""
    given, seconds = options["until"], options["length"]
    if given is None and seconds is None:
        return None
    now = localtime(dialect_of(connections[alias]).clock(connections[alias]))
    if seconds is not None:
        return now + timedelta(seconds=seconds)
    until = _next(given, now) if isinstance(given, time) else given
    until = make_aware(until) if is_naive(until) else until
    if fault := until_error(until, now):
        raise CommandError(fault)
    return until


def _next(at: time, now: datetime) -> datetime:
    """Return when it is next ``at`` in the time zone of ``now``."""
    today = make_aware(datetime.combine(now.date(), at))
    tomorrow = make_aware(datetime.combine(now.date() + timedelta(days=1), at))
    return today if today > now else tomorrow
