"""What people do to many events: replay, discard, run now, skip; a batch is one transaction."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.core.exceptions import FieldError
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from ..log import first_line
from ..sql import dialect_of
from . import OutboxEvent, OutboxOperation, OutboxQuerySet
from .fields import DatabaseNow
from .operation import condition
from .replay import BATCH_SIZE, Spacing, lock_streams

logger = logging.getLogger("django_outbox")

Kind: Final = OutboxOperation.Kind

# Due times that a worker gives in advance: a stop leaves what has got one.
AHEAD: Final = timedelta(seconds=10)


# Of each kind: the events that allow it. The query set's method of the same name does it.
APPLICABLE: Final[dict[str, Callable[[OutboxQuerySet], OutboxQuerySet]]] = {
    Kind.REPLAY: OutboxQuerySet.dead,
    Kind.DISCARD: OutboxQuerySet.dead,
    Kind.RUN_NOW: OutboxQuerySet.waiting,
    Kind.SKIP: OutboxQuerySet.skippable,
}


def apply_to_batch(
    batch: OutboxQuerySet, operation: OutboxOperation, spacing: Spacing | None = None
) -> int:
    """Do what the operation says to one batch; return how many events it changed.

    Lock the events first, so that the log counts exactly those that the action changed. Rows that
    are locked elsewhere are skipped, so that the action does not wait for them.
    """
    rows = APPLICABLE[operation.kind](batch).order_by()
    given: dict[str, Any] = {} if spacing is None else {"rate": spacing}
    with dialect_of(connections[batch.db]).read_committed():
        lock_streams(rows)  # first, as writers do
        locked = rows.lock_unlocked()
        events = OutboxEvent.objects.using(batch.db).filter(pk__in=locked)
        return getattr(events, operation.kind)(by=operation, **given) if locked else 0


class Worked(NamedTuple):
    """The result of a step of an operation."""

    changed: int
    wait: float | None  # seconds until its next step; None: it has ended


def work_off(pk: int, connection: BaseDatabaseWrapper) -> Worked:
    """Do the next batch of an open operation, and note how far it is in the same transaction.

    The row is locked: of two workers, one finds what the other has done.
    """
    every, dialect = OutboxOperation.objects.using(connection.alias), dialect_of(connection)
    with dialect.read_committed():
        every.filter(pk=pk).lock()
        if (operation := every.open().filter(pk=pk).first()) is None:
            return Worked(0, None)  # stopped, or another worker was faster
        now, spacing = dialect.clock(), None
        if operation.rate is not None:
            spacing = Spacing(operation.rate, start=operation.next_at)
            if wait := _wait(spacing, now):
                return Worked(0, wait)
        size = _size(operation, spacing, now)
        events = OutboxEvent.objects.using(connection.alias)
        try:
            rows = events.filter(condition(json.loads(operation.filters or "[]")))
        except (FieldError, ValueError, TypeError) as error:  # no newer worker would do better
            logger.error("operation stopped id=%d error=%s", pk, reason := first_line(error))
            every.filter(pk=pk).stop(by=reason)
            return Worked(0, None)
        found = APPLICABLE[operation.kind](rows)
        batches = found.batches(size=size, after=operation.after, until=operation.started_at)
        ids = next(batches, [])
        changed = apply_to_batch(events.filter(pk__in=ids), operation, spacing) if ids else 0
        is_over = len(ids) < size or operation.processed + size == operation.limit
        changes: dict[str, Any] = {"skipped": F("skipped") + len(ids) - changed}
        if ids:
            changes["after"] = ids[-1]
        if is_over:
            changes |= {"state": OutboxOperation.State.DONE, "ended_at": DatabaseNow()}
        if spacing is not None:
            changes["next_at"] = spacing.next_at
        every.filter(pk=pk).update(**changes)
    return Worked(changed, None if is_over else 0.0)


def _wait(spacing: Spacing, now: datetime) -> float:
    """Return the seconds until more due times are to be given; 0 once half of them have passed."""
    left = (spacing.next_at or now) - now - AHEAD / 2
    return max(left.total_seconds(), 0.0)


def _size(operation: OutboxOperation, spacing: Spacing | None, now: datetime) -> int:
    size = BATCH_SIZE if spacing is None else min(BATCH_SIZE, spacing.room(now, AHEAD))
    return size if operation.limit is None else min(size, operation.limit - operation.processed)
