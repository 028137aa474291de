"""Queryset methods of the event table; the SQL that claims events is in package ``sql``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.dispatch import Signal

from ..conf import Settings, current
from ..events import spellings
from ..listeners.outcomes import UNSETTLED, Status
from ..signals import announce, events_discarded, events_purged, events_replayed
from ..sql.values import in_parts
from .deliver_to import deliver_parts, registered
from .fields import DatabaseNow, IsDead, IsIndexed, IsRescued, age
from .operation import By, OutboxOperation, acting
from .pause_queryset import LEASED, in_held_queue
from .queryset import TableQuerySet
from .replay import (
    ALONE,
    BATCH_SIZE,
    Change,
    Spacing,
    alone,
    change_waiting,
    delete_rows,
    due_at,
    in_streams,
    mark_dead,
    replay_rows,
)
from .retention import expired_condition

if TYPE_CHECKING:
    from . import OutboxEvent  # noqa: F401 - named in a string below
    from .stream_queryset import StreamQuerySet

Kind: Final = OutboxOperation.Kind
CLAIM_ORDER: Final = ("available_at", "id")  # as in the index of due events
IDS_PER_QUERY: Final = 100  # SQLite nests conditions at most 1000 deep


class OutboxQuerySet(TableQuerySet["OutboxEvent"]):
    """Filters, bulk changes and counts of events, all by the database's clock.

    Example::

        for row in OutboxEvent.objects.dead()[:10]:
            print(row.event_type, row.last_error)
        count = OutboxEvent.objects.filter(event_type="order.placed").replay()
    """

    table = "outbox_event"

    def of_event(self, event_id: str) -> OutboxQuerySet:
        """Return the rows of an event, one for each listener; a range of the primary key."""
        return self.filter(_of_event(event_id))

    def with_ids(self, ids: Iterable[str]) -> OutboxQuerySet:
        """Return the rows that these ids name: an event's id all its rows, a row's own this row."""
        every, given = self._all_rows(), [spellings(str(each)) for each in ids]
        texts = [*dict.fromkeys(text for each in given for text in each)]
        found = dict[str, str]()  # the event's id, by the row's
        for some in in_parts(texts, IDS_PER_QUERY):
            named = Q()
            for each in some:
                named |= Q(pk=each) | _of_event(each)
            found.update(every.filter(named).values_list("pk", "event_id"))
        stored = {*found, *found.values()}
        meant = {next((text for text in each if text in stored), "") for each in given}
        return self.filter(pk__in=[pk for pk, of in found.items() if {pk, of} & meant])

    def pending(self) -> OutboxQuerySet:
        """Return events that are not finished: NEW or RETRY."""
        return self.filter(status__in=UNSETTLED)

    def leased(self) -> OutboxQuerySet:
        """Return events leased now; an event with a key is never here: its stream is leased."""
        return self.filter(LEASED)

    def due(self) -> OutboxQuerySet:
        """Return events that the next claim may take, oldest first; keyed ones by their stream."""
        due = self.filter(~in_held_queue(), available_at__lte=DatabaseNow())
        return due.order_by(*CLAIM_ORDER)

    def waiting(self) -> OutboxQuerySet:
        """Return events that wait for their due time or next try, and are not leased."""
        later = Q(available_at__gt=DatabaseNow()) | Q(status=Status.RETRY, available_at=None)
        return self.pending().filter(later, locked_by=None)

    def skippable(self) -> OutboxQuerySet:
        """Return unfinished events with a key whose stream no worker has leased."""
        leased = self._all_streams().filter(locked_by__isnull=False).values("pk")
        return self.pending().exclude(ALONE).exclude(stream__in=leased)

    def done(self) -> OutboxQuerySet:
        """Return delivered events."""
        return self.filter(status=Status.DONE)

    def dead(self) -> OutboxQuerySet:
        """Return dead events, oldest first."""
        return self.filter(IsDead("status")).order_by("done_at", "id")

    def rescued(self) -> OutboxQuerySet:
        """Return pending events that workers were lost with since they were last settled."""
        return self.pending().filter(IsRescued("rescues"))

    def held(self) -> OutboxQuerySet:
        """Return due events that wait for a pause, an open breaker, or an event of their key."""
        streams, blocks = self._all_streams(), current().ON_DEAD == "block"
        statuses = [*UNSETTLED, Status.DEAD] if blocks else UNSETTLED
        earlier = self.model.objects.filter(
            IsIndexed("status"), stream=OuterRef("stream"), seq__lt=OuterRef("seq")
        )
        behind = Q(
            Exists(earlier.filter(status__in=statuses)), stream__in=streams.blocked().values("pk")
        )
        held = Q(in_held_queue(), available_at__lte=DatabaseNow())
        return self.pending().filter(held | Q(stream__in=streams.held().values("pk")) | behind)

    def replay(self, *, by: By = "", rate: str | Spacing | None = None) -> int:
        """Make the dead events among these due again as if new; return how many.

        An event with a key keeps its place in its stream, before those that wait behind it. The
        history of each event keeps its failures, and who replayed it: ``by``. With a ``rate``
        such as "50/s", "100/m" or "10/h" they become due one after the other, in ascending order
        of their ids; the call does not wait for that. Raises ``ValueError`` for another rate.
        The log of operations gets a row, unless ``by`` is the operation that this is part of.
        """
        return sum(self.replay_batches(by=by, rate=rate))

    def replay_batches(
        self, *, size: int = BATCH_SIZE, by: By = "", rate: str | Spacing | None = None
    ) -> Iterator[int]:
        """Replay the dead events among these; yield the count of each batch, which may be 0.

        A batch has at most ``size`` events. Each commits by itself to keep locks short.
        """
        spacing = Spacing(rate) if isinstance(rate, str) else rate
        act, batches = acting(Kind.REPLAY, by, self), self.dead_batches(size=size)
        replay = partial(replay_rows, by=act.by, spacing=spacing)
        return (each._change_dead(replay, act, events_replayed) for each in batches)

    def deliver_to(self, title: str, *, rate: str | None = None, by: By = "") -> int:
        """Deliver these to a listener that was added after they were written; return how many.

        The listener with this ``title`` gets the events of its types that it was not given before,
        whatever their state. They are due at once, or at a ``rate`` as in ``replay``. Each part
        commits by itself. Raises ``ValueError`` for another title or rate.
        """
        spacing = None if rate is None else Spacing(rate)
        return sum(deliver_parts(self._updatable(), registered(title), spacing, by=by))

    def discard(self, *, by: By = "") -> int:
        """Delete the dead events among these; return how many."""
        return sum(self.discard_batches(by=by))

    def discard_batches(self, *, size: int = BATCH_SIZE, by: By = "") -> Iterator[int]:
        """Delete the dead events among these, as ``replay_batches`` replays them."""
        act, batches = acting(Kind.DISCARD, by, self), self.dead_batches(size=size)
        return (each._change_dead(delete_rows, act, events_discarded) for each in batches)

    def dead_batches(
        self, *, size: int = BATCH_SIZE, after: str = "", until: datetime | None = None
    ) -> Iterator[OutboxQuerySet]:
        """Yield the dead events among these in batches, as ``batches`` does."""
        every = self._all_rows()
        ids = self._dead_rows().batches(size=size, after=after, until=until)
        return (every.filter(pk__in=each) for each in ids)

    def batches(
        self, *, size: int = BATCH_SIZE, after: str = "", until: datetime | None = None
    ) -> Iterator[list[str]]:
        """Yield the ids of these in batches, in ascending order.

        Yield no id twice, and leave out events that ended after ``until`` (database clock;
        default: now). So the scan ends even if replayed events die again meanwhile. ``after`` is
        the id where an earlier scan stopped. Raises ``ValueError`` for a size below 1.
        """
        if size < 1:
            raise ValueError(f"The size of a batch is {size!r}; expected at least 1.")
        until = until or self._clock()
        return _batches(self._updatable().exclude(done_at__gt=until), size=size, after=after)

    def run_now(self, *, by: By = "") -> int:
        """Make the waiting events among these due now and keep their attempts; return how many.

        An event with a key still waits for the events before it in its stream.
        """
        act, waiting = acting(Kind.RUN_NOW, by, self), self._updatable().waiting()
        count = alone(waiting, lambda rows: rows.update_by_id(available_at=DatabaseNow()), act)
        count += in_streams(waiting, lambda rows: rows.update_by_id(deliver_at=DatabaseNow()), act)
        return count

    def skip(self, *, by: By = "") -> int:
        """Make these events with a key dead, to unblock those behind them; return how many.

        They can be replayed. Events in a stream that a worker has leased are not changed.
        """
        return in_streams(self._updatable().pending(), mark_dead, acting(Kind.SKIP, by, self))

    def cancel(self, *, by: By = "") -> int:
        """Delete the pending events among these that no worker has leased; return how many."""
        act = acting(Kind.CANCEL, by, self)
        return change_waiting(self._updatable(), delete_rows, act, events_discarded)

    def reschedule(self, due: datetime | timedelta, *, by: By = "") -> int:
        """Make the pending events among these that no worker has leased due then; return how many.

        A timedelta counts from now. What is behind an event with a key waits with it.
        """
        when = self._clock() + due if isinstance(due, timedelta) else due
        act = acting(Kind.RESCHEDULE, by, self)
        return change_waiting(self._updatable(), lambda rows: due_at(rows, when), act)

    def release(self, *, by: By = "") -> int:
        """Release the leases of these, or of their streams: due now; return how many.

        Count no attempt. The owner can no longer settle them. Use this if it is known to be gone.
        """
        act, rows = acting(Kind.RELEASE, by, self), self._updatable().pending()
        values = {"available_at": DatabaseNow(), "locked_by": None, "locked_at": None}
        leased = rows.filter(locked_by__isnull=False)
        count = alone(leased, lambda rows: rows.update_by_id(**values), act)
        names = in_parts(rows._names(), BATCH_SIZE)
        return count + sum(self._streams(some).release(by=act) for some in names)

    def purge(self) -> int:
        """Delete the finished events among these that are past their retention; return how many."""
        if count := sum(self.purge_batches()):
            announce(events_purged, sender=self._write_alias(), count=count)
        return count

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Purge in batches; yield the size of each delete, which may be 0. Each commits by itself.

        ``settings`` replaces the project's settings for retention and batch size. The purge scans
        the primary key upwards: it needs no index.
        """
        return (each.deleted for each in self._updatable()._purged(settings or current()))

    def expired_condition(self, settings: Settings) -> Q:
        """Return the condition of finished events past their retention; empty if all are kept."""
        condition = expired_condition(settings, self._clock())
        if condition and settings.ON_DEAD == "block":  # a dead event blocks those behind it
            same = self.model.objects.filter(IsIndexed("status"), stream=OuterRef("stream"))
            condition &= Q(~Q(status=Status.DEAD) | ALONE | ~Exists(same.pending()))
        return condition

    def newest(self, count: int) -> OutboxQuerySet:
        """Return the newest events by primary key (the order of writes), at most ``count``."""
        ids = self._all_rows().order_by("-pk").values_list("pk", flat=True)
        return self.filter(pk__gt=next(iter(ids[count : count + 1]), ""))

    def counts_by_status(self) -> dict[str, int]:
        """Return the number of events per status name. This reads the whole table."""
        found = dict(self.order_by().values_list("status").annotate(count=models.Count("pk")))
        return {status.name: found.get(status.value, 0) for status in Status}

    def oldest_pending_age(self) -> float | None:
        """Return the seconds that the oldest due event has waited; None if nothing is due.

        An event with a key counts if it is first in its stream, from when the stream became due.
        In ``MODE`` "writer_only" the result is None, because no event waits for a worker.
        """
        if current().MODE == "writer_only":
            return None
        row = self.due().annotate(now=DatabaseNow()).values_list("available_at", "now").first()
        ages = [] if row is None or row[0] is None else [age(row[0], row[1])]
        if (keyed := self._all_streams().oldest_head_age(self._updatable())) is not None:
            ages.append(keyed)
        return max(ages, default=None)

    def _change_dead(self, change: Change, act: OutboxOperation, signal: Signal) -> int:
        dead = self._dead_rows()
        count = alone(dead, change, act) + in_streams(dead, change, act)
        if count:
            announce(signal, sender=self._write_alias(), count=count)
        return count

    def _names(self) -> list[str]:
        names = self.values_list("stream", flat=True).distinct()
        return [each for each in names if each is not None]

    def _streams(self, keys: Sequence[str]) -> StreamQuerySet:
        return self._all_streams().filter(pk__in=keys)

    def _all_streams(self) -> StreamQuerySet:
        from . import OutboxStream

        return OutboxStream.objects.using(self._write_alias())

    def _updatable(self) -> OutboxQuerySet:
        """Return the same rows, without order or slice, for an UPDATE or DELETE."""
        if self.query.is_sliced:
            return self._all_rows().filter(pk__in=[*self.values_list("pk", flat=True)])
        return self.using(self._write_alias()).order_by()

    def _dead_rows(self) -> OutboxQuerySet:
        return self._updatable().filter(IsDead("status"))


def _of_event(event_id: str) -> Q:
    """Return the condition of an event's rows."""
    return Q(pk__gte=event_id, pk__lt=f"{event_id}/", event_id=event_id)


def _batches(rows: OutboxQuerySet, *, size: int, after: str) -> Iterator[list[str]]:
    ids = rows.order_by("pk").values_list("pk", flat=True)
    while found := [*ids.filter(pk__gt=after)[:size]]:
        yield found
        after = found[-1]
