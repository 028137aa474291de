"""Options that choose dead events, shared by ``outbox_replay`` and ``outbox_dead``."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections

from ..inspection.causes import DIGEST_LENGTH, only_of_cause
from ..models import OutboxEvent, OutboxQuerySet
from ..models.fields import begins_with
from .arguments import instant

FILTERS: Final = {
    "event_types": "event_type__in",
    "aggregate_type": "aggregate_type",
    "aggregate_id": "aggregate_id",
    "tenant": "tenant_id",
    "key": "key",
    "since": "done_at__gte",
    "until": "done_at__lt",
}


def add_filters(parser: ArgumentParser) -> None:
    """Add the filters, all of which an event must match."""
    add = parser.add_argument
    add(
        "--event-type",
        action="append",
        dest="event_types",
        metavar="TYPE",
        help="of this type; may be repeated",
    )
    add("--aggregate-type", metavar="TYPE", help="of objects of this type, such as shop.order")
    add("--aggregate-id", metavar="ID", help="of the object with this id")
    add("--tenant", metavar="ID", help="of this tenant")
    add("--key", metavar="KEY", help="of the stream with this key")
    add("--error", metavar="TEXT", help="whose last error begins with this, as its class does")
    add("--cause", type=cause, metavar="CAUSE", help="of this cause, as outbox_dead list names it")
    add("--since", type=instant, metavar="TIME", help="that died since then: 2026-03-01T08:30, 2h")
    add("--until", type=instant, metavar="TIME", help="that died before then")


def add_database(parser: ArgumentParser) -> None:
    parser.add_argument("--database", choices=tuple(connections), help="default: the router's")


def add_choice(parser: ArgumentParser, verb: str) -> None:
    """Add ids, ``--all`` and the filters, of which ``chosen`` requires one."""
    parser.add_argument("ids", nargs="*", metavar="EVENT_ID", help=f"events to {verb}")
    parser.add_argument("--all", action="store_true", help="every dead event")
    add_filters(parser)


def chosen(rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> OutboxQuerySet:
    """Return the requested events; ``CommandError`` stops a forgotten filter from meaning all."""
    is_chosen = bool(options["ids"]) or any(
        options[name] is not None for name in (*FILTERS, "error", "cause")
    )
    if not is_chosen and not options["all"]:
        raise CommandError("Expected ids, a filter, or --all for every dead event.")
    if is_chosen and options["all"]:
        raise CommandError("--all cannot be combined with ids or filters.")
    if options["ids"]:
        rows = rows.filter(pk__in=options["ids"])
    return filtered(rows, options, now)


def dead_batches(
    rows: OutboxQuerySet, options: dict[str, Any], *, size: int, until: datetime, after: str = ""
) -> Iterator[OutboxQuerySet]:
    """Yield the dead events among these in batches, as ``dead_batches`` of the rows does.

    With ``--cause``, which no query can compare, leave out the events of others.
    """
    every, digest = OutboxEvent.objects.using(rows.db), options["cause"]
    for ids in rows.dead().batches(size=size, until=until, after=after):
        meant = ids if digest is None else only_of_cause(rows.db, digest, ids)
        if meant:
            yield every.filter(pk__in=meant)


def cause(text: str) -> str:
    """Return the name of a cause; ``ArgumentTypeError`` if it cannot be one."""
    if not re.fullmatch(f"[0-9a-f]{{{DIGEST_LENGTH}}}", text):
        raise ArgumentTypeError(
            f"{text!r} is not a cause; expected {DIGEST_LENGTH} characters from the last column of "
            "outbox_dead list."
        )
    return text


def filtered(rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> OutboxQuerySet:
    """Return the events that match the filters; ``now`` is the database's clock."""
    wanted = {
        column: options[name] for name, column in FILTERS.items() if options[name] is not None
    }
    for name, value in wanted.items():
        if isinstance(value, timedelta):
            wanted[name] = now - value
    rows = rows.filter(**wanted)
    error = options["error"]
    return rows if error is None else rows.filter(begins_with("last_error", error))


def text_about_others(options: dict[str, Any], count: int) -> str:
    """Return what is to be said of the named ids that were not among the ``count`` changed ones."""
    named = len(set(options["ids"]))
    if named <= count:
        return ""
    return f"; {named - count} of the given ids are unknown or not dead"
