"""The verbs of the event table; the claim itself is SQL of ``dialects``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from django.db import connections, models, router, transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When
from django.db.models.functions import Coalesce, Concat, Substr

from .. import dialects
from ..conf import Settings, current
from ..dialects.fields import DatabaseNow, IsDead, IsIndexed
from ..outcomes import UNSETTLED, Status
from ..signals import announce, events_discarded, events_purged, events_replayed
from .pauses import LEASED, POSTPONED, of_pauses
from .retention import batches, is_expired, unlocked

if TYPE_CHECKING:
    from . import OutboxEvent
    from .streams import StreamQuerySet

NEXT: Final = ("available_at", "event_id")  # as their index has them
BATCH: Final = 500  # events per transaction, so that nobody waits long for them


class OutboxQuerySet(models.QuerySet["OutboxEvent"]):
    """Adjectives read, verbs act, questions answer; all by the database's clock."""

    def pending(self) -> OutboxQuerySet:
        """Events not finished yet."""
        return self.filter(status__in=UNSETTLED)

    def leased(self) -> OutboxQuerySet:
        """Events that a worker holds at this moment; of those with a key it holds the stream."""
        return self.filter(LEASED)

    def due(self) -> OutboxQuerySet:
        """Events that the next claim may take, oldest first; for a key its stream is due."""
        return self.filter(available_at__lte=DatabaseNow()).order_by(*NEXT)

    def waiting(self) -> OutboxQuerySet:
        """Events that wait for their time or their next try, and are not leased."""
        later = Q(available_at__gt=DatabaseNow()) | Q(status=Status.RETRY, available_at=None)
        return self.pending().filter(later, locked_by=None)

    def skippable(self) -> OutboxQuerySet:
        """Events with a key that are not finished, and whose stream no worker holds."""
        held = self._every_stream().filter(locked_by__isnull=False).values("pk")
        return self.pending().exclude(key=None).exclude(key__in=held)

    def scheduled(self) -> OutboxQuerySet:
        """New events that wait for their time, the next one first."""
        return self._later().filter(status=Status.NEW)

    def retrying(self) -> OutboxQuerySet:
        """Failed events that wait for their next try, the next one first; of those with a key
        the stream waits.
        """
        return self._later().filter(status=Status.RETRY)

    def done(self) -> OutboxQuerySet:
        return self.filter(status=Status.DONE)

    def dead(self) -> OutboxQuerySet:
        """Events that ended without success, oldest first."""
        return self.filter(IsDead("status")).order_by("done_at", "event_id")

    def postponed(self) -> OutboxQuerySet:
        """Events without a key that a worker has made due later because they are paused."""
        return self.filter(POSTPONED)

    def paused(self) -> OutboxQuerySet:
        """Pending events that wait for a resume: by their type, their key, or postponed.

        Not the followers of such an event; what a worker has in hand is finished first.
        """
        return self.pending().filter(of_pauses(self._write_alias())).exclude(LEASED)

    def replay(self) -> int:
        """Make the dead events among these due again as if new; return how many.

        An event with a key keeps its place: it comes next, before any that wait behind it.
        """
        return sum(self.replay_batches())

    def replay_batches(self, *, size: int = BATCH) -> Iterator[int]:
        """Replay the dead events among these; yield how many of each batch, be it 0.

        Batches are those of ``dead_batches``; each commits by itself, so that nobody waits long.
        """
        return (batch._replay_dead() for batch in self.dead_batches(size=size))

    def discard(self) -> int:
        """Delete the dead events among these; return how many."""
        return sum(self.discard_batches())

    def discard_batches(self, *, size: int = BATCH) -> Iterator[int]:
        """Delete the dead events among these; yield how many of each batch, be it 0."""
        return (batch._discard_dead() for batch in self.dead_batches(size=size))

    def dead_batches(
        self, *, size: int = BATCH, after: str = "", until: datetime | None = None
    ) -> Iterator[OutboxQuerySet]:
        """Yield the dead events among these in ``batches``."""
        every = self.model.objects.using(self._write_alias())
        ids = self._dead_rows().batches(size=size, after=after, until=until)
        return (every.filter(pk__in=each) for each in ids)

    def batches(
        self, *, size: int = BATCH, after: str = "", until: datetime | None = None
    ) -> Iterator[list[str]]:
        """Yield the ids of these in batches, by primary key upwards.

        No id comes twice, and what ended later than ``until`` (database clock; default: now) is
        left out: so the walk ends even if what is replayed dies again meanwhile. ``after`` is the
        id at which an earlier walk was left. ``ValueError`` for a size below 1.
        """
        if size < 1:
            raise ValueError(f"The size of a batch is {size!r}; expected at least 1.")
        connection = connections[self._write_alias()]
        until = until or dialects.of(connection).clock(connection)
        return _batches(self._plain().exclude(done_at__gt=until), size=size, after=after)

    def edit(self, *, payload: str, headers: str | None) -> int:
        """Change what the dead events among these tell, as ready JSON text; return how many."""
        return self._dead_rows().update(payload=payload, headers=headers)

    def run_now(self) -> int:
        """Make the waiting events among these due now, attempts kept; return how many.

        An event with a key waits for those before it all the same.
        """
        waiting = self._plain().waiting()
        count = waiting.filter(key=None).update(available_at=DatabaseNow())
        return count + waiting._in_streams(lambda batch: batch.update(deliver_at=DatabaseNow()))

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

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Purge these; yield the size of each delete, which commits by itself, be it 0.

        ``settings`` stand for those in force: their retention and their size of a batch. It walks
        the primary key upwards in ranges, so that it needs no index of its own and no batch reads
        more than its range.
        """
        settings = settings or current()
        every = self.model.objects.using(self._write_alias())
        expired = self._plain().expired(settings)
        if expired.query.is_empty():  # everything is kept
            return
        for batch in batches(every, settings.PURGE_BATCH_SIZE):
            yield expired.filter(batch)._delete_unlocked()

    def _delete_unlocked(self) -> int:
        connection = connections[self._write_alias()]
        with transaction.atomic(using=connection.alias):
            ids = unlocked(self, connection)
            return dialects.of(connection).delete(connection, ids=ids) if ids else 0

    def expired(self, settings: Settings | None = None) -> OutboxQuerySet:
        """Finished events past their retention: what the next purge deletes."""
        connection = connections[self._write_alias()]
        settings = settings or current()
        condition = is_expired(settings, dialects.of(connection).clock(connection))
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

    def _later(self) -> OutboxQuerySet:
        return self.filter(locked_by=None, available_at__gt=DatabaseNow()).order_by(*NEXT)

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

    def _replay_dead(self) -> int:
        dead = self._dead_rows()
        count = dead.filter(key=None)._replay()
        count += dead._in_streams(OutboxQuerySet._replay)
        if count:
            announce(events_replayed, sender=self._write_alias(), count=count)
        return count

    def _discard_dead(self) -> int:
        dead = self._dead_rows()
        count = dead.filter(key=None).delete()[0]
        count += dead._in_streams(lambda batch: batch.delete()[0])
        if count:
            announce(events_discarded, sender=self._write_alias(), count=count)
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
        return self._every_stream().filter(pk__in=keys)

    def _every_stream(self) -> StreamQuerySet:
        from . import OutboxStream

        return OutboxStream.objects.using(self._write_alias())

    def _plain(self) -> OutboxQuerySet:
        """The same rows without order or slice, as UPDATE and DELETE need them."""
        if self.query.is_sliced:
            return self.model.objects.using(self._write_alias()).filter(
                pk__in=[*self.values_list("pk", flat=True)]
            )
        return self.using(self._write_alias()).order_by()

    def _dead_rows(self) -> OutboxQuerySet:
        return self._plain().filter(IsDead("status"))

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]


def _batches(rows: OutboxQuerySet, *, size: int, after: str) -> Iterator[list[str]]:
    ids = rows.order_by("pk").values_list("pk", flat=True)
    while found := [*ids.filter(pk__gt=after)[:size]]:
        yield found
        after = found[-1]


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
