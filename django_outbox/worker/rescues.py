"""Rescues: events that were claimed from lost workers are logged and added to their history."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ..delivery.lease import Lease
from ..log import first_line
from ..signals import announce, event_rescued
from ..sql import dialect_of
from ..sql.base.transactions import all_or_nothing
from ..sql.halving import in_halves
from ..sql.values import Attempt

logger = logging.getLogger("django_outbox")


def report_rescues(connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> None:
    """Report events that were claimed from lost workers, and add them to their history."""
    for lease in leases:
        logger.warning(
            "rescued event_id=%s event_type=%s rescues=%d",
            lease.event_id,
            lease.event_type,
            lease.rescues,
        )
        announce(event_rescued, sender=connection.alias, event=lease.event, rescues=lease.rescues)
    if not leases:
        return

    def note(some: list[Attempt]) -> None:
        with all_or_nothing(connection):
            dialect_of(connection).note_attempts(connection, some)

    lost = [Attempt(each.event_id, "lost", each.rescues, each.previous_owner) for each in leases]
    missing, problem = len(lost), None
    try:
        for part in in_halves(connection, lost, note, shorter=[Attempt.shortened]):
            missing -= len(part.rows) * part.is_written
            problem = part.error or problem
    except Exception as error:  # noqa: BLE001 - the events are to be delivered all the same
        problem = error
    if missing and problem is not None:
        reason = first_line(problem)
        logger.warning("rescues missing in the history count=%d error=%s", missing, reason)
