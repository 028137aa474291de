"""Queryset methods of streams; the SQL that leases streams is in package ``sql``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, models
from django.db.models import Exists, OuterRef, Q

from ..conf import DAY, Settings, current
from ..listeners.outcomes import UNSETTLED, Status
from ..sql import dialect_of
from .event_queryset import OutboxQuerySet
from .fields import DatabaseNow, IsIndexed, age
from .operation import By, OutboxOperation, acting
from .pause_queryset import in_held_queue
from .queryset import TableQuerySet
from .replay import in_batches

if TYPE_CHECKING:
    from . import OutboxEvent, OutboxStream  # noqa: F401 - named in a string below

MAX_BACKLOG: Final = 1000  # events of one stream that a backlog counts, at most
LONG_TEXTS: Final = ("payload", "headers", "result", "history")  # not shown in lists
HEADS_PER_QUERY: Final = 40  # streams per query for their first events
MAX_SEARCHED: Final = 1000  # streams that oldest_head_age searches, oldest due first, at most
IDLE_BEFORE_PURGE: Final = DAY  # seconds; no writer is still adding an event then


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """The first event of a stream (its head), and the size of its backlog."""

    head: OutboxEvent | None  # without the columns in LONG_TEXTS
    backlog: int  # unsettled events, the head included if it is one; at most MAX_BACKLOG


def with_summaries(rows: Any, streams: Iterable[Any]) -> list[Any]:
    """Return these streams, each with its ``summary``, by one lookup for all of them."""
    found = [*streams]
    summaries = rows.summaries([each.pk for each in found])
    for each in found:
        each.summary = summaries[each.pk]
    return found


class StreamQuerySet(TableQuerySet["OutboxStream"]):
    """Filters and bulk changes of streams, all by the database's clock.

    Example::

        blocked = [stream.pk for stream in OutboxStream.objects.blocked()[:10]]
        for stream, summary in OutboxStream.objects.summaries(blocked).items():
            print(stream, summary.head, summary.backlog)
    """

    table = "outbox_stream"

    def due(self) -> StreamQuerySet:
        """Return streams that the next claim may take, oldest first."""
        return self._due(~in_held_queue())

    def held(self) -> StreamQuerySet:
        """Return streams that are due, but whose first event a pause or an open breaker holds."""
        return self._due(in_held_queue())

    def leased(self) -> StreamQuerySet:
        """Return streams leased now."""
        every = self.using(self._write_alias())
        return every.filter(locked_by__isnull=False, due_at__gt=DatabaseNow())

    def blocked(self) -> StreamQuerySet:
        """Return streams whose head blocks the events behind it: it waits for a try, or is dead."""
        waiting = Q(locked_by=None, due_at__gt=DatabaseNow())
        if current().ON_DEAD == "block":
            waiting |= Q(locked_by=None, due_at=None, pk__in=self._dead_with_followers())
        return self.using(self._write_alias()).filter(waiting)

    def _due(self, where: Q) -> StreamQuerySet:
        due = self.using(self._write_alias()).filter(where, due_at__lte=DatabaseNow())
        return due.order_by("due_at")

    def release(self, *, by: By = "") -> int:
        """Release the leases of these: due now; return how many.

        The previous owner can no longer settle their events. Use this for a worker that is known
        to be gone.
        """
        now, act = DatabaseNow(), acting(OutboxOperation.Kind.RELEASE, by, self)
        free = {"due_at": now, "locked_by": None, "locked_at": now}
        leased = self.using(self._write_alias()).filter(locked_by__isnull=False)
        return in_batches(leased, lambda rows: rows.update_by_id(**free), act)

    def expired_condition(self, settings: Settings) -> Q:
        """Return the condition of streams that were idle for a day and have no unfinished events.

        A writer updates the row that a purge locks, so none is deleted while it gets an event.
        """
        limit = self._clock() - timedelta(seconds=IDLE_BEFORE_PURGE)
        never_leased = Q(locked_at=None, seq__lt=int(limit.timestamp() * 1_000_000))
        idle = Q(due_at=None) & (Q(locked_at__lt=limit) | never_leased)
        if settings.MODE == "writer_only":  # no worker makes streams idle there
            idle |= Q(due_at__lt=limit)
        return idle & ~Q(Exists(self._events()))

    def oldest_head_age(self, events: OutboxQuerySet) -> float | None:
        """Return the seconds that the oldest due stream has waited whose head is in ``events``.

        Return None if there is none among the ``MAX_SEARCHED`` streams due first.
        """
        due = self.due().annotate(now=DatabaseNow()).values_list("pk", "due_at", "now")
        connection = self._connection()
        for start in range(0, MAX_SEARCHED, HEADS_PER_QUERY):
            some = list(due[start : start + HEADS_PER_QUERY])
            keys = [key for key, *_ in some]
            heads = dialect_of(connection).heads(streams=keys, statuses=UNSETTLED)
            mine = {*events.filter(pk__in=[*heads.values()]).values_list("pk", flat=True)}
            for key, due_at, now in some:
                if due_at is not None and heads.get(key) in mine:
                    return age(due_at, now)
            if len(some) < HEADS_PER_QUERY:
                break
        return None

    def summaries(self, keys: Sequence[str]) -> dict[str, StreamSummary]:
        """Return the first event (``head``) and the number of pending events of each stream.

        That number, ``backlog``, counts up to 1000. It takes a few queries, however long the
        streams are.
        """
        from . import OutboxEvent

        alias, blocks = self._write_alias(), current().ON_DEAD == "block"
        statuses, dialect = [*UNSETTLED, *[Status.DEAD] * blocks], dialect_of(connections[alias])
        found = dialect.summaries(streams=keys, statuses=statuses, most=MAX_BACKLOG) if keys else {}
        heads = [head for head, _backlog in found.values() if head]
        events = OutboxEvent.objects.using(alias).filter(status__in=statuses)  # some end meanwhile
        first = events.defer(*LONG_TEXTS).in_bulk(heads)
        return {
            key: StreamSummary(head=first.get(head or ""), backlog=backlog)
            for key, (head, backlog) in found.items()
        }

    def heads(self, keys: Sequence[str]) -> dict[str, OutboxEvent]:
        """Return the first event of each of these streams that has one."""
        found = self.summaries(keys)
        return {key: each.head for key, each in found.items() if each.head is not None}

    def _events(self) -> OutboxQuerySet:
        """Return pending and dead events of the stream in the outer query."""
        from . import OutboxEvent

        return OutboxEvent.objects.filter(IsIndexed("status"), stream=OuterRef("pk"))

    def _dead_with_followers(self) -> models.QuerySet[OutboxEvent, str | None]:
        """Return streams with a dead and a pending event.

        Search from the dead events, which are few; idle streams may be many.
        """
        from . import OutboxEvent

        indexed = OutboxEvent.objects.filter(IsIndexed("status"), stream__isnull=False)
        pending = indexed.filter(stream=OuterRef("stream")).pending()
        return indexed.dead().filter(Exists(pending)).order_by().values_list("stream", flat=True)
