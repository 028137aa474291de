"""Rescues: events that were claimed from lost workers are logged and added to their history."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import Settings
from ..delivery.lease import Lease, of_rows
from ..listeners.history import Entry, with_entries
from ..log import first_line
from ..signals import announce, event_rescued
from ..sql import dialect_of
from ..sql.transactions import all_or_nothing
from ..sql.values import SUSPECT_FROM

logger = logging.getLogger("django_outbox")


def kept_count(settings: Settings) -> int:
    """Return how many lost workers a suspected stream is left with once its head has ended.

    So it stays a suspect for the events behind, of which none dies for what was before it.
    """
    return min(SUSPECT_FROM, settings.MAX_RESCUES - 1)


def report_rescues(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> None:
    """Report events that were claimed from lost workers, and add them to their history."""
    alike: defaultdict[tuple[object, ...], list[Lease]] = defaultdict(list)
    for lease in leases:
        logger.warning(
            "rescued event_id=%s event_type=%s listener=%r rescues=%d", *lease.named, lease.rescues
        )
        announce(event_rescued, sender=connection.alias, event=lease.event, rescues=lease.rescues)
        alike[lease.kind, lease.rescues, lease.previous_owner].append(lease)
    for some in alike.values():
        _note(connection, some)


def _note(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> None:
    """Add the same lost worker to the history of each event; they are delivered in any case."""
    first, rows = leases[0], of_rows(leases)
    lost = Entry(at=first.database_now, kind="lost", number=first.rescues, by=first.previous_owner)
    try:
        with all_or_nothing(connection):
            dialect_of(connection).note_lost(
                me=first.owner, leases=rows, entry=lost, kind=first.kind
            )
    except Exception as error:  # noqa: BLE001
        reason = first_line(error)
        logger.warning("rescues missing in the history count=%d error=%s", len(rows), reason)
        return
    for each in leases:
        each.history = with_entries(each.history, [lost])
