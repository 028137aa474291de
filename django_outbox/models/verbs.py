"""The verbs of the event table; the claim itself is SQL of ``dialects``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When
from django.db.models.functions import Coalesce, Concat, Substr

from .. import dialects
from ..conf import Settings, current
from ..dialects.fields import DatabaseNow, IsIndexed
from ..outcomes import UNSETTLED, Status
from ..signals import announce, events_discarded, events_purged, events_replayed

if TYPE_CHECKING:
    from . import OutboxEvent
    from .streams import StreamQuerySet

BATCH: Final = 500  # events with a key per transaction, so that their writers never wait long


class OutboxQuerySet(models.QuerySet["OutboxEvent"]):
    """Adjectives read, verbs act, questions answer; all by the database's clock."""

    def pending(self) -> OutboxQuerySet:
        """Events not finished yet."""
        return self.filter(status__in=UNSETTLED)

    def leased(self) -> OutboxQuerySet:
        """Events that a worker holds at this moment; of those with a key it holds the stream."""
        return self.filter(locked_by__isnull=False, available_at__gt=DatabaseNow())

    def due(self) -> OutboxQuerySet:
        """Events that the next claim may take, oldest first; for a key its stream is due."""
        return self.filter(available_at__lte=DatabaseNow()).order_by("available_at", "event_id")

    def done(self) -> OutboxQuerySet:
        return self.filter(status=Status.DONE)

    def dead(self) -> OutboxQuerySet:
        """Events that ended without success, oldest first."""
        return self.filter(status=Status.DEAD).order_by("done_at", "event_id")

    def replay(self) -> int:
        """Make the dead events among these due again as if new; return how many.

        An event with a key keeps its place: it comes next, before any that wait behind it.
        """
        dead = self._dead_rows()
        count = dead.filter(key=None)._replay()
        count += dead._in_streams(OutboxQuerySet._replay)
        if count:
            announce(events_replayed, sender=self._write_alias(), count=count)
        return count

    def discard(self) -> int:
        """Delete the dead events among these; return how many."""
        dead = self._dead_rows()
        count = dead.filter(key=None).delete()[0]
        count += dead._in_streams(lambda batch: batch.delete()[0])
        if count:
            announce(events_discarded, sender=self._write_alias(), count=count)
        return count

    def skip(self) -> int:
        """Give up these events with a key, that their followers may go on; return how many.

        They are dead then, and can be replayed. What a worker is about to run is left to it.
        """
        return self._plain().pending()._in_streams(OutboxQuerySet._give_up)

    def release(self) -> int:
        """Give the leases of these, or of their streams, back: due now; return how many.

        No attempt is counted. Whoever held one finds its settle refused. Meant for a worker that is
        known to be gone.
        """
        rows = self._plain().pending()
        count = rows.filter(locked_by__isnull=False).update(
            available_at=DatabaseNow(), locked_by=None, locked_at=None
        )
        keys = rows._keys()
        for start in range(0, len(keys), BATCH):
            count += self._streams(keys[start : start + BATCH]).release()
        return count

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
        settings = current()
        condition = _expired(settings, dialects.of(connection).clock(connection))
        if condition and settings.ON_DEAD == "block":  # else it would end the wait of its followers
            waiting = self.model.objects.filter(IsIndexed("status"), key=OuterRef("key")).pending()
            condition &= Q(~Q(status=Status.DEAD) | Q(key=None) | ~Exists(waiting))
        return self.filter(condition) if condition else self.none()

    def ahead_of(self, event: OutboxEvent) -> OutboxQuerySet:
        """Events of the same key that are to be delivered before this one."""
        earlier = self.pending().filter(IsIndexed("status"), key=event.key, seq__lt=event.seq)
        return earlier.order_by()

    def newest(self, count: int) -> OutboxQuerySet:
        """The last events by primary key, which is the order of their writes, at most ``count``."""
        ids = self.model.objects.using(self._write_alias()).order_by("-pk")
        below = ids.values_list("pk", flat=True)[count : count + 1]
        return self.filter(pk__gt=next(iter(below), ""))

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

    def _in_streams(self, change: Callable[[OutboxQuerySet], int]) -> int:
        """Change those of these that have a key, batch by batch; return how many.

        Each batch is a transaction of its own, that wakes their streams first: so no worker
        releases one as idle, and writers, who lock in the same order, wait instead of deadlocking.
        """
        connection, count = connections[self._write_alias()], 0
        rows = self.exclude(key=None).order_by("key", "seq").values_list("pk", "key")
        found = [(pk, key) for pk, key in rows if key is not None]
        for start in range(0, len(found), BATCH):
            batch = found[start : start + BATCH]
            with transaction.atomic(using=connection.alias):
                dialects.of(connection).wake(connection, [key for _, key in batch])
                count += change(self.filter(pk__in=[pk for pk, _ in batch]))
        return count

    def _replay(self) -> int:
        count = 0
        for pk, progress in self.exclude(progress=None).values_list("pk", "progress"):
            count += self.filter(pk=pk)._renew(progress=_what_succeeded(progress))
        return count + self.filter(progress=None)._renew()

    def _renew(self, **values: str | None) -> int:
        without_key = Q(key=None)
        return self.update(
            status=Status.NEW,
            attempts=0,
            rescues=0,
            available_at=Case(When(without_key, then=DatabaseNow())),
            deliver_at=Case(When(without_key, then=F("deliver_at"))),
            first_due_at=DatabaseNow(),
            done_at=None,
            last_error=None,
            locked_by=None,
            locked_at=None,
            **values,
        )

    def _give_up(self) -> int:
        free = self._streams(self._keys()).filter(locked_by=None).values_list("pk", flat=True)
        return self.filter(key__in=[*free]).update(
            status=Status.DEAD,
            done_at=DatabaseNow(),
            deliver_at=None,
            last_error=Concat(
                Value("Skipped: its followers may go on. "),
                Substr(Coalesce("last_error", Value("")), 1, 3900),
                output_field=models.TextField(),
            ),
        )

    def _keys(self) -> list[str]:
        return [key for key in self.values_list("key", flat=True).distinct() if key is not None]

    def _streams(self, keys: Sequence[str]) -> StreamQuerySet:
        from . import OutboxStream

        return OutboxStream.objects.using(self._write_alias()).filter(pk__in=keys)

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
