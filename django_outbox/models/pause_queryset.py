"""Queryset methods that pause and resume; the SQL that parks rows is in package ``sql``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..conf import current
from ..events import as_utc
from ..listeners.registry import titles_of
from ..queue_settings import PARKED as PARKED_START
from ..queue_settings import PARKED_END
from ..signals import announce, breaker_closed, delivery_paused, delivery_resumed
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS, EVENTS, STREAMS, Pauses
from .fields import DatabaseNow
from .operation import OperationQuerySet, OutboxOperation
from .queryset import TableQuerySet

if TYPE_CHECKING:
    from . import OutboxPause  # noqa: F401 - named in a string below

AT_ONCE: Final = 500  # rows or streams that a resume moves together
MAX_NAME_LENGTH: Final = 255  # characters of a pause's name, at most

DUE_LATER: Final = Q(available_at__gt=DatabaseNow())
LEASED: Final = Q(DUE_LATER, locked_by__isnull=False)
# What is parked by a pause, a row or a stream: the id of the pause is in the name of its queue.
PARKED: Final = Q(queue__gt=PARKED_START, queue__lt=PARKED_END)


class Resumed(NamedTuple):
    """The outcome of a resume."""

    pauses: int = 0  # that ended
    events: int = 0  # without a key that waited for it
    streams: int = 0  # that waited for it


class PauseQuerySet(TableQuerySet["OutboxPause"]):
    """``pause`` adds a pause, ``resume`` ends these; workers apply both within about a second.

    Example::

        OutboxPause.objects.pause("event_type", "order.placed", reason="stocktaking", by="ada")
        resumed = OutboxPause.objects.filter(kind="event_type", name="order.placed").resume()
        print(resumed.events, resumed.streams)  # how many waited
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
        now = self._clock()
        if until is not None and (fault := until_error(until := as_utc(until), now)):
            raise ValueError(fault)
        alias = self._write_alias()
        end = "" if until is None else f" until {until.isoformat(' ', 'seconds')}"
        about = f"{kind} {name}{end}{': ' * bool(reason)}{reason}"
        with dialect_of(connections[alias]).read_committed():
            new = {"reason": reason, "paused_by": by[:MAX_NAME_LENGTH], "paused_at": now}
            _, is_new = self.using(alias).get_or_create(
                kind=kind, name=name, defaults={**new, "until": until}
            )
            if is_new:
                self._log().note(OutboxOperation.Kind.PAUSE, about, by=by)
        if is_new:
            given = {"kind": kind, "name": name, "reason": reason, "by": by, "until": until}
            announce(delivery_paused, sender=alias, **given)
        return is_new

    def ended(self) -> PauseQuerySet:
        """Return pauses whose ``until`` has passed, and which no worker has ended yet."""
        return self.filter(until__lte=DatabaseNow()).exclude(kind="breaker")

    def resume(self, *, by: str = "") -> Resumed:
        """End these pauses, and move what waited to the queues of its listeners, batch by batch.

        ``by``: who does. If it is interrupted, a worker moves the rest. What waits in a queue that
        was paused needs no change: workers claim from it again.
        """
        return Resumed(*map(sum, zip(Resumed(), *self.resume_batches(by=by), strict=True)))

    def resume_batches(self, *, by: str = "") -> Iterator[Resumed]:
        """End these pauses as ``resume`` does; yield the outcome of each step, which is short.

        Each step commits by itself, unless there is a transaction.
        """
        alias = self._write_alias()
        every = self.model.objects.using(alias)
        for pk, kind, name in self.using(alias).order_by("pk").values_list("pk", "kind", "name"):
            ended = OutboxOperation.Kind.RESUME
            if kind == "breaker":
                ended = OutboxOperation.Kind.BREAKER_CLOSED
            with dialect_of(connections[alias]).read_committed():
                # This waits for a worker that is parking rows; a later one finds the pause gone.
                if not every.filter(pk=pk).delete()[0]:
                    continue
                operation = self._log().note(ended, f"{kind} {name}", by=by)
            yield Resumed(pauses=1)
            count = 0
            for batch in bring_home(connections[alias], pk):
                count += batch.events + batch.streams
                operation.add(batch.events + batch.streams, using=alias)
                yield batch
            announce(delivery_resumed, sender=alias, kind=kind, name=name, count=count)
            if kind == "breaker":
                announce(breaker_closed, sender=alias, queue=name)

    def _log(self) -> OperationQuerySet:
        return OutboxOperation.objects.using(self._write_alias())


def bring_home(connection: BaseDatabaseWrapper, pause: int) -> Iterator[Resumed]:
    """Move what is parked for a pause that has ended; yield the numbers of each batch."""
    dialect = dialect_of(connection)
    if dialect.keep_pauses([pause]):
        return
    while events := dialect.unpark(EVENTS, pause=pause, limit=AT_ONCE):
        yield Resumed(events=events)
    while streams := dialect.unpark(STREAMS, pause=pause, limit=AT_ONCE):
        yield Resumed(streams=streams)


def in_held_queue() -> Q:
    """Return the condition of what waits where no worker claims: parked, or in a closed queue."""
    from . import OutboxPause

    closed = OutboxPause.objects.filter(kind__in=CLOSING_KINDS)
    return PARKED | Q(queue__in=closed.values("name"))


def names_holding(event_type: str, listener: str | None, key: str | None) -> list[tuple[str, str]]:
    """Return kind and name of each pause, but of its queue, that would hold back a delivery.

    A pause of a listener that was renamed holds by any of its titles.
    """
    titles = [("listener", title) for title in titles_of(listener)]
    return [("event_type", event_type), *titles, *([("stream", key)] if key is not None else [])]


def holding(pauses: Pauses, event_type: str, listener: str | None, key: str | None) -> int | None:
    """Return the id of a pause, but of its queue, that holds back a delivery; None if none does."""
    if not pauses:
        return None
    names = names_holding(event_type, listener, key)
    return next((pauses[name] for name in names if name in pauses), None)


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
