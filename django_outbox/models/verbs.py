"""The verbs of the event table; the claim itself is SQL of ``dialects``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from .. import dialects
from ..conf import Settings, current
from ..dialects.fields import DatabaseNow
from ..outcomes import UNSETTLED, Status
from ..signals import announce, events_discarded, events_purged, events_replayed

if TYPE_CHECKING:
    from . import OutboxEvent  # noqa: F401 - named in a string below


class OutboxQuerySet(models.QuerySet["OutboxEvent"]):
    """Adjectives read, verbs act, questions answer; all by the database's clock."""

    def pending(self) -> OutboxQuerySet:
        """Events not finished yet."""
        return self.filter(status__in=UNSETTLED)

    def leased(self) -> OutboxQuerySet:
        """Events that a worker holds at this moment."""
        return self.filter(locked_by__isnull=False, available_at__gt=DatabaseNow())

    def due(self) -> OutboxQuerySet:
        """Events that the next claim may take, oldest first."""
        return self.filter(available_at__lte=DatabaseNow()).order_by("available_at", "event_id")

    def done(self) -> OutboxQuerySet:
        return self.filter(status=Status.DONE)

    def dead(self) -> OutboxQuerySet:
        """Events that ended without success, oldest first."""
        return self.filter(status=Status.DEAD).order_by("done_at", "event_id")

    def replay(self) -> int:
        """Make the dead events among these due again as if new; return how many."""
        rows = self._dead_rows()
        count = 0
        for pk, progress in rows.exclude(progress=None).values_list("pk", "progress"):
            count += self._replay(rows.filter(pk=pk), progress=_what_succeeded(progress))
        count += self._replay(rows.filter(progress=None))
        if count:
            announce(events_replayed, sender=self._write_alias(), count=count)
        return count

    def discard(self) -> int:
        """Delete the dead events among these; return how many."""
        count = self._dead_rows().delete()[0]
        if count:
            announce(events_discarded, sender=self._write_alias(), count=count)
        return count

    def release(self) -> int:
        """Give the leases of these back: due now, no attempt counted; return how many.

        Whoever held one finds its settle refused. Meant for a worker that is known to be gone.
        """
        return (
            self._plain()
            .filter(status__in=UNSETTLED, locked_by__isnull=False)
            .update(available_at=DatabaseNow(), locked_by=None, locked_at=None)
        )

    def purge(self) -> int:
        """Delete every finished event past its retention, batch by batch; return how many."""
        count = sum(self.purge_batches())
        if count:
            announce(events_purged, sender=self._write_alias(), count=count)
        return count

    def purge_batches(self) -> Iterator[int]:
        """Purge these; yield the size of each delete, which commits by itself, be it 0.

        It walks the primary key upwards in ranges, so that it needs no index of its own and no
        batch reads more than its range.
        """
        alias, size = self._write_alias(), current().PURGE_BATCH_SIZE
        every = self.model.objects.using(alias)
        expired = self._plain().expired()
        if expired.query.is_empty():  # everything is kept
            return
        low: str | None = ""
        while low is not None:
            ahead = every.filter(pk__gt=low).order_by("pk").values_list("pk", flat=True)
            high = next(iter(ahead[size - 1 : size]), None)
            batch = expired.filter(pk__gt=low, **({} if high is None else {"pk__lte": high}))
            yield batch._delete_unlocked()
            low = high

    def _delete_unlocked(self) -> int:
        connection = connections[self._write_alias()]
        with transaction.atomic(using=connection.alias):
            ids = unlocked(self, connection)
            return dialects.of(connection).delete(connection, ids=ids) if ids else 0

    def expired(self) -> OutboxQuerySet:
        """Finished events past their retention: what the next purge deletes."""
        connection = connections[self._write_alias()]
        condition = _expired(current(), dialects.of(connection).clock(connection))
        return self.filter(condition) if condition else self.none()

    def counts_by_status(self) -> dict[str, int]:
        """Return the number of events per status name; it reads the whole table."""
        rows = self.order_by().values_list("status").annotate(count=models.Count("pk"))
        found = dict(rows)
        return {status.name: found.get(status.value, 0) for status in Status}

    def oldest_pending_age(self) -> float | None:
        """Return the seconds that the oldest due event has waited; None if nothing is due."""
        row = self.due().annotate(now=DatabaseNow()).values_list("available_at", "now").first()
        if row is None or row[0] is None:
            return None
        return max((row[1] - row[0]).total_seconds(), 0.0)

    def _replay(self, rows: OutboxQuerySet, **values: str | None) -> int:
        return rows.update(
            status=Status.NEW,
            attempts=0,
            rescues=0,
            available_at=DatabaseNow(),
            first_due_at=DatabaseNow(),
            done_at=None,
            last_error=None,
            locked_by=None,
            locked_at=None,
            **values,
        )

    def _plain(self) -> OutboxQuerySet:
        """The same rows without order or slice, as UPDATE and DELETE need them."""
        if self.query.is_sliced:
            return self.model.objects.using(self._write_alias()).filter(
                pk__in=[*self.values_list("pk", flat=True)]
            )
        return self.using(self._write_alias()).order_by()

    def _dead_rows(self) -> OutboxQuerySet:
        return self._plain().filter(status=Status.DEAD)

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]


def unlocked(rows: models.QuerySet[Any], connection: BaseDatabaseWrapper) -> list[Any]:
    """Lock rows but for what somebody else has locked, and return their keys.

    A purge waits for nobody.
    """
    features = connection.features
    if features.has_select_for_update:
        rows = rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)
    return [*rows.values_list("pk", flat=True)]


def _what_succeeded(progress: str | None) -> str | None:
    """Return the progress of a replayed row: listeners that are done are not run again."""
    try:
        entries = json.loads(progress or "")
        done = {title: each for title, each in entries.items() if each["state"] == "done"}
        for each in done.values():
            each.pop("attempts", None)  # the row begins to count anew
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged: every listener runs
    return json.dumps(done) if done else None


def _expired(settings: Settings, now: datetime) -> Q:
    """Return the condition of rows that are past their retention; empty if all are kept."""
    if settings.MODE == "writer_only":  # nobody finishes rows there: age alone tells
        age = settings.RETENTION_DONE
        return Q() if age is None else Q(created_at__lt=now - timedelta(seconds=age))
    expired = Q()
    for status, retention in (
        (Status.DONE, settings.RETENTION_DONE),
        (Status.DEAD, settings.RETENTION_DEAD),
    ):
        if retention is not None:
            expired |= Q(status=status, done_at__lt=now - timedelta(seconds=retention))
    if expired:
        forgotten = Q(unique_key=None) | ~Q(status=Status.DONE)
        if settings.RETENTION_UNIQUE is not None:
            kept = now - timedelta(seconds=settings.RETENTION_UNIQUE)
            forgotten |= Q(done_at__lt=kept)
        expired &= forgotten
    return expired
