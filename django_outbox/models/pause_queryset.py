"""Queryset methods that pause and resume; the SQL that postpones rows is in package ``sql``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from django.db import connections
from django.db.models import Q

from ..conf import current
from ..events import as_utc
from ..listeners.outcomes import UNSETTLED
from ..listeners.registry import titles_of
from ..signals import announce, breaker_closed, delivery_paused, delivery_resumed
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, POSTPONED_FOR
from .fields import DatabaseNow
from .queryset import TableQuerySet

if TYPE_CHECKING:
    from . import OutboxPause  # noqa: F401 - named in a string below

EVENTS_PER_STATEMENT: Final = 500  # events made due in one statement
STREAMS_PER_BATCH: Final = 200  # streams that are checked and woken together
MAX_NAME_LENGTH: Final = 255  # characters of a pause's name, at most

DUE_LATER: Final = Q(available_at__gt=DatabaseNow())
LEASED: Final = Q(DUE_LATER, locked_by__isnull=False)
POSTPONED: Final = Q(DUE_LATER, locked_by=None, locked_at__isnull=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The outcome of a resume."""

    pauses: int  # that ended
    events: int  # that were made due
    streams: int  # that were made due


class PauseQuerySet(TableQuerySet["OutboxPause"]):
    """``pause`` adds a pause, ``resume`` ends these; workers apply both within about a second.

    Example::

        OutboxPause.objects.pause("event_type", "order.placed", reason="stocktaking", by="ada")
        resumed = OutboxPause.objects.filter(kind="event_type", name="order.placed").resume()
        print(resumed.events, resumed.streams)  # how many were made due
    """

    def pause(
        self, kind: str, name: str, *, reason: str = "", by: str = "", until: datetime | None = None
    ) -> bool:
        """Pause an event type, a listener, a stream or a queue; return False if it is paused.

        ``kind`` is ``"event_type"``, ``"listener"`` (``name`` is its title: event type and name),
        ``"stream"`` (its key) or ``"queue"``. Running deliveries finish. Waiting events cost no
        attempt. At ``until`` a worker ends the pause as ``resume`` does; None: it stays.

        Raises ``ValueError`` for a kind or name that cannot exist, and for an ``until`` that is not
        in the future.
        """
        if fault := pause_error(kind, name):
            raise ValueError(fault)
        if until is not None and (fault := until_error(until := as_utc(until), self._clock())):
            raise ValueError(fault)
        _, is_new = self.using(self._write_alias()).get_or_create(
            kind=kind,
            name=name,
            defaults={
                "reason": reason,
                "paused_by": by[:MAX_NAME_LENGTH],
                "paused_at": DatabaseNow(),
                "until": until,
            },
        )
        if is_new:
            announce(
                delivery_paused,
                sender=self._write_alias(),
                kind=kind,
                name=name,
                reason=reason,
                by=by,
                until=until,
            )
        return is_new

    def ended(self) -> PauseQuerySet:
        """Return pauses whose ``until`` has passed, and which no worker has ended yet."""
        return self.filter(until__lte=DatabaseNow()).exclude(kind="breaker")

    def resume(self) -> Resumed:
        """End these pauses, and make the events that waited due now, batch by batch.

        If it is interrupted, the remaining events become due by themselves within ten minutes. The
        events of a queue need no change: workers claim from it again.
        """
        batches = [*self.resume_batches()]
        return Resumed(
            pauses=sum(each.pauses for each in batches),
            events=sum(each.events for each in batches),
            streams=sum(each.streams for each in batches),
        )

    def resume_batches(self) -> Iterator[Resumed]:
        """End these pauses as ``resume`` does; yield the outcome of each step, which is short.

        Each step commits by itself, unless there is a transaction.
        """
        alias = self._write_alias()
        every = self.model.objects.using(alias)
        for pk, kind, name in self.using(alias).order_by("pk").values_list("pk", "kind", "name"):
            # This waits for a worker that is postponing rows; a later one finds the pause gone.
            if not every.filter(pk=pk).delete()[0]:
                continue
            yield Resumed(pauses=1, events=0, streams=0)
            count = 0
            for batch in _make_due(alias, kind, name):
                count += batch.events + batch.streams
                yield batch
            announce(delivery_resumed, sender=alias, kind=kind, name=name, count=count)
            if kind == "breaker":
                announce(breaker_closed, sender=alias, queue=name)


def _make_due(alias: str, kind: str, name: str) -> Iterator[Resumed]:
    """Make what waited for a pause due; yield the numbers of events and streams of each batch."""
    if kind in CLOSING_KINDS:
        return
    found = _ResumedBacklog(alias, kind, name)
    for events in found.make_events_due():
        yield Resumed(pauses=0, events=events, streams=0)
    for streams in found.wake_streams():
        yield Resumed(pauses=0, events=0, streams=streams)


def paused_condition(alias: str) -> Q:
    """Return the condition of events that are postponed, or that no poll will claim now."""
    from . import OutboxPause

    pauses = OutboxPause.objects.using(alias)
    types = pauses.filter(kind="event_type").values("name")
    keys = pauses.filter(kind="stream").values("name")
    queues = pauses.filter(kind__in=CLOSING_KINDS).values("name")
    return Q(event_type__in=types) | Q(key__in=keys) | Q(queue__in=queues) | POSTPONED


def names_holding(
    event_type: str, listener: str | None, key: str | None
) -> list[tuple[str, str | None]]:
    """Return kind and name of each pause, but of its queue, that would hold back a delivery.

    A pause of a listener that was renamed holds by any of its titles.
    """
    titles = [("listener", title) for title in titles_of(listener)]
    return [("event_type", event_type), *titles, ("stream", key)]


def settable_kinds() -> list[str]:
    """Return the kinds of pauses that people can set; only a worker opens a circuit breaker."""
    from . import OutboxPause

    return [each for each in OutboxPause.Kind.values if each != OutboxPause.Kind.BREAKER]


def pause_error(kind: str, name: str) -> str | None:
    """Return why a pause of this kind and name is invalid; None if it is valid."""
    kinds = settable_kinds()
    if kind not in kinds:
        return f"The kind is {kind!r}; expected one of {', '.join(kinds)}."
    if not name or "\0" in name or len(name) > MAX_NAME_LENGTH:
        return f"The name of a {kind} is {name!r}; expected 1 to {MAX_NAME_LENGTH} characters."
    if kind == "queue" and name not in current().queues:
        known = ", ".join(current().queues)
        return f'OUTBOX["QUEUES"] does not have {name!r}; expected one of {known}.'
    return None


def until_error(until: datetime, now: datetime) -> str | None:
    """Return why a pause cannot end at ``until``; None if it can. ``now``: the database's clock."""
    if until > now:
        return None
    return (
        f"The end of the pause, {until.isoformat(' ', 'seconds')}, is not in the future; "
        f"it is {now.astimezone(until.tzinfo).isoformat(' ', 'seconds')} now."
    )


class _ResumedBacklog:
    """Events and streams that waited for a pause that has ended, and may wait for others."""

    def __init__(self, alias: str, kind: str, name: str) -> None:
        self._alias, self._connection = alias, connections[alias]
        self._kind, self._name = kind, name
        self._dialect = dialect_of(self._connection)
        now = self._dialect.clock()
        # No row was postponed beyond this, and a worker that postpones now sees the resume.
        self._until = now + timedelta(seconds=max(POSTPONED_FOR, current().LEASE))

    def make_events_due(self) -> Iterator[int]:
        """Make the events without a key due, except those whose event type is still paused."""
        from . import OutboxEvent, OutboxPause

        if self._kind == "stream":
            return
        rows = OutboxEvent.objects.using(self._alias).postponed()
        rows = rows.filter(available_at__lte=self._until)
        if self._kind == "event_type":
            rows = rows.filter(event_type=self._name)
        else:
            paused = OutboxPause.objects.using(self._alias).filter(kind="event_type")
            rows = rows.filter(listener__in=titles_of(self._name))
            rows = rows.exclude(event_type__in=paused.values("name"))
        rows, low = rows.order_by("available_at", "id"), None
        while True:
            batch = rows if low is None else rows.filter(available_at__gte=low)
            # Another query reads the due time: PostgreSQL would sort all rows if it were selected.
            ids = list(batch.values_list("pk", flat=True)[:EVENTS_PER_STATEMENT])
            if not ids:
                return
            low = rows.filter(pk=ids[-1]).order_by().values_list("available_at", flat=True).first()
            yield self._dialect.resume(ids=ids)

    def wake_streams(self) -> Iterator[int]:
        """Make streams due whose first event waited; a new version undoes a late postponement."""
        from . import OutboxStream

        streams = OutboxStream.objects.using(self._alias)
        # Include leased streams: their worker may have read them while they were still paused.
        waiting = streams.filter(due_at__gt=DatabaseNow(), due_at__lte=self._until)
        if self._kind == "stream":  # in all lanes
            yield self._wake([*waiting.filter(key=self._name).values_list("pk", flat=True)])
            return
        keys = [*waiting.order_by("pk").values_list("pk", flat=True)]
        for start in range(0, len(keys), STREAMS_PER_BATCH):
            yield self._wake(self._with_waiting_heads(keys[start : start + STREAMS_PER_BATCH]))

    def _with_waiting_heads(self, keys: Sequence[str]) -> list[str]:
        """Return those of these streams whose first event may have waited."""
        from . import OutboxEvent

        heads = self._dialect.heads(streams=keys, statuses=UNSETTLED)
        events = OutboxEvent.objects.using(self._alias).filter(pk__in=[*heads.values()])
        if self._kind == "event_type":
            events = events.filter(event_type=self._name)
        found = {*events.values_list("pk", flat=True)}
        return [key for key, event_id in heads.items() if event_id in found]

    def _wake(self, keys: Sequence[str]) -> int:
        if keys:
            self._dialect.wake_streams(keys)
        return len(keys)
