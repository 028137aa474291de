"""Changes of rows by people: replay, cancel and reschedule, also in the streams of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db import transaction
from django.db.models import Case, F, Q, TextField, Value, When
from django.db.models.deletion import Collector
from django.db.models.functions import Coalesce, Concat, Length, Substr
from django.dispatch import Signal

from ..events import UNROUTED_LANE
from ..listeners.history import Entry, addition
from ..listeners.outcomes import Status
from ..queue_settings import is_rate, per_second
from ..signals import announce
from ..sql import dialect_of
from ..sql.values import in_parts
from .fields import DatabaseNow, ExactTextField, UTCDateTimeField

if TYPE_CHECKING:
    from .event_queryset import OutboxQuerySet
    from .operation import OutboxOperation


_MARKED: Final = Q(stream__gte=UNROUTED_LANE, stream__lt=chr(ord(UNROUTED_LANE) + 1))
ALONE: Final = Q(stream=None) | _MARKED  # events that are due by themselves, not by a stream

BY: Final = 255  # characters of who replayed
SKIPPED: Final = "Skipped: its followers may go on."
EVENTS_PER_STATEMENT: Final = 100  # events that get due times of their own in one statement


BATCH_SIZE: Final = 500  # events per transaction: limits how long rows stay locked

Change = Callable[["OutboxQuerySet"], int]  # changes rows; returns how many


class Spacing:
    """Due times of a slow replay: one event after the other, over any number of batches."""

    def __init__(self, rate: str, *, start: datetime | None = None) -> None:
        """``rate``: "50/s", "100/m" or "10/h". ``start``: when the first is due; None: now.

        Raises ``ValueError`` for another rate.
        """
        if not is_rate(rate):
            raise ValueError(f'The rate is {rate!r}; expected one such as "50/s", "100/m", "10/h".')
        self.rate, self.next_at = rate, start
        self.last_at: datetime | None = None  # the last due time that was given
        self._interval = timedelta(seconds=1 / per_second(rate))

    def room(self, now: datetime, within: timedelta) -> int:
        """Return how many due times are left until that long after ``now``."""
        left = now + within - max(self.next_at or now, now)
        return max(left // self._interval + 1, 0)

    def take(self, count: int, now: datetime) -> list[datetime]:
        """Return the next due times, none before ``now``."""
        first = max(self.next_at or now, now)
        times = [first + place * self._interval for place in range(count)]
        if times:
            self.last_at, self.next_at = times[-1], times[-1] + self._interval
        return times


def replay_rows(rows: OutboxQuerySet, *, by: str, spacing: Spacing | None = None) -> int:
    """Replay these rows, which are dead; return how many. ``by``: who does.

    With a ``spacing`` they become due one after the other, in ascending order of their ids.
    """
    ids = rows.lock()
    if not ids:
        return 0
    times: dict[str, datetime] = {}
    now = rows._clock()
    if spacing is not None:
        times = dict(zip(ids, spacing.take(len(ids), now), strict=True))
    replayed = Entry(at=now, kind="replayed", by=by[:BY])
    for some, due in due_times(ids, times):
        _reset(rows._all_rows().filter(pk__in=some), due, replayed)
    return len(ids)


def due_times(ids: list[str], times: Mapping[str, datetime]) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield some of the ids with the expression of their due times, until all are yielded."""
    if not times:
        yield ids, DatabaseNow()
        return
    field = UTCDateTimeField()
    for some in in_parts(ids, EVENTS_PER_STATEMENT):
        yield some, Case(*(When(pk=pk, then=Value(times[pk], field)) for pk in some))


def _reset(rows: OutboxQuerySet, due: Any, replayed: Entry) -> int:
    """Make dead events new and due at the time of an expression; those with a key, no earlier."""
    alone, is_now = ALONE, isinstance(due, DatabaseNow)
    first, added = addition(replayed)
    shorter = Substr("history", 1, Length("history") - 1)
    longer = Concat(shorter, Value(added), output_field=ExactTextField())
    return rows.update_by_id(
        status=Status.NEW,
        attempts=0,
        rescues=0,
        available_at=Case(When(alone, then=due)),
        deliver_at=Case(When(alone, then=F("deliver_at")), default=None if is_now else due),
        first_due_at=due,
        done_at=None,
        last_error=None,
        cause=None,
        history=Case(
            When(history=None, then=Value(first)), default=longer, output_field=ExactTextField()
        ),
        locked_by=None,
        locked_at=None,
    )


def alone(rows: OutboxQuerySet, change: Change, act: OutboxOperation) -> int:
    """Apply a change to the events that no stream has, batch by batch; return how many it changed.

    Each batch is one transaction, with its count in the log of operations.
    """
    return in_batches(rows.filter(ALONE), change, act)


def in_batches(rows: Any, change: Callable[[Any], int], act: OutboxOperation) -> int:
    """Apply a change to events or streams as ``alone`` does."""
    alias, count = rows._write_alias(), 0
    ids = sorted(rows.order_by().values_list("pk", flat=True))
    for some in in_parts(ids, BATCH_SIZE):
        with transaction.atomic(using=alias):
            changed = change(rows.filter(pk__in=some))
            count += act.counted(changed, using=alias)
    return count


def in_streams(rows: OutboxQuerySet, change: Change, act: OutboxOperation) -> int:
    """Apply a change to the events with a key, batch by batch; return how many it changed.

    Each batch is one transaction, as for ``alone``, and wakes the streams first, so that no worker
    releases one as idle. Writers lock streams in the same order: they wait instead of deadlocking.
    """
    connection, count = rows._connection(), 0
    ordered = rows.exclude(ALONE).order_by("stream", "seq").values_list("pk", "stream")
    found = [(pk, stream) for pk, stream in ordered if stream is not None]
    for batch in in_parts(found, BATCH_SIZE):
        with transaction.atomic(using=connection.alias):
            dialect_of(connection).wake_streams([stream for _, stream in batch])
            changed = change(rows.filter(pk__in=[pk for pk, _ in batch]))
            count += act.counted(changed, using=connection.alias)
    return count


def lock_streams(rows: OutboxQuerySet) -> None:
    """Lock the streams of these rows, and wake them; call it before the rows are locked."""
    dialect_of(rows._connection()).wake_streams(rows.exclude(ALONE)._names())


def in_free_streams(rows: OutboxQuerySet) -> OutboxQuerySet:
    """Return those whose streams, which the transaction has locked, no worker has leased."""
    free = rows._streams(rows._names()).filter(locked_by=None).values_list("pk", flat=True)
    return rows.filter(stream__in=[*free])


def mark_dead(rows: OutboxQuerySet) -> int:
    """Give up pending events with a key whose streams no worker has leased."""
    return in_free_streams(rows).update_by_id(
        status=Status.DEAD,
        done_at=DatabaseNow(),
        deliver_at=None,
        cause=SKIPPED,
        last_error=Concat(
            Value(f"{SKIPPED} "),
            Substr(Coalesce("last_error", Value("")), 1, 3900),
            output_field=TextField(),
        ),
    )


def delete_rows(rows: OutboxQuerySet) -> int:
    """Delete these rows, locked first; return how many.

    If a project listens to deletions, Django reads the rows and deletes them by their ids alone. A
    worker could lease one in between.
    """
    ids = rows.lock()
    if Collector(using=rows._write_alias()).can_fast_delete(rows._all_rows()):
        return dialect_of(rows._connection()).delete(rows.table, ids=ids)
    rows._all_rows().filter(pk__in=ids).delete()
    return len(ids)


def change_waiting(
    rows: OutboxQuerySet, change: Change, act: OutboxOperation, signal: Signal | None = None
) -> int:
    """Apply a change to pending events that no worker has leased, in one transaction; count them.

    ``signal`` is sent once it has committed.
    """
    alias, pending = rows._write_alias(), rows.pending()
    with transaction.atomic(using=alias):
        # Streams first, as writers lock them before their rows.
        count = in_streams(pending, lambda batch: change(in_free_streams(batch)), act)
        count += alone(pending.filter(locked_by=None), change, act)
        if count and signal is not None:
            sent = partial(announce, signal, sender=alias, count=count)
            transaction.on_commit(sent, using=alias, robust=True)
    return count


def due_at(rows: OutboxQuerySet, due: datetime) -> int:
    """Give pending events a due time; a row with a key is found by that of its stream instead."""
    alone = When(ALONE, then=Value(due, UTCDateTimeField()))
    return rows.update_by_id(available_at=Case(alone), deliver_at=due, first_due_at=due)
