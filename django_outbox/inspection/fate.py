"""What became of an event: the state of each of its deliveries, and what holds one back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from django.db import router

from ..events import ROW_ID_LENGTH, exact_text, is_slot, spellings
from ..listeners import registry
from ..listeners.history import first_line
from ..listeners.outcomes import COALESCED, DISCARDED, UNSETTLED, Status
from ..models import OutboxEvent, OutboxPause, OutboxStream
from ..models.fields import DatabaseNow
from ..models.pause_queryset import names_holding
from ..models.stream_queryset import LONG_TEXTS
from ..queue_settings import parked_by
from ..sql.values import CLOSING_KINDS

DELETED: Final = "purged, cancelled or discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The state of an event for one listener; ``str()`` makes it a line.

    - ``event_type``, ``listener``: its title; None: not routed yet.
    - ``state``: ``"done"``, ``"dead"``, ``"leased"``, ``"held"`` (by a pause, a breaker or its
      key), ``"retrying"``, ``"waiting"``, ``"unrouted"``, ``"discarded"`` (its listener was
      removed) or ``"deleted"``.
    - ``since``: when it ended, was leased, paused or due.
    - ``until``: when that changes, if known.
    - ``by``: the worker, pause, breaker or earlier event.
    - ``reason``: of the pause, or the error's first line; ``"coalesced"``: a newer one replaced it.
    - ``attempts``: failed ones.
    - ``id``: of the delivery; empty if deleted.

    Example::

        fate = outbox.Fate(event_type="order.placed", listener=None, state="unrouted")
        assert str(fate) == "order.placed unrouted"
    """

    event_type: str
    listener: str | None
    state: str
    since: datetime | None = None
    until: datetime | None = None
    by: str = ""
    reason: str = ""
    attempts: int = 0
    id: str = ""

    def __str__(self) -> str:
        parts = [self.listener or self.event_type, self.state]
        at = {"since": self.since, "until": self.until}
        parts += [f"{name} {each.isoformat(' ', 'seconds')}" for name, each in at.items() if each]
        parts += [f"by {self.by}"] if self.by else []
        return " ".join(parts) + (f": {self.reason}" if self.reason else "")

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        return {name: each for name, each in asdict(self).items() if name != "event_type"}


class Place(NamedTuple):
    """The stream of a delivery that waits in one."""

    stream: OutboxStream
    head: OutboxEvent | None  # its first event
    is_blocked: bool  # by the head


def fate(event_id: str, *, using: str | None = None) -> list[Fate]:
    """Return the state of an event for each of its listeners; empty if it is not stored.

    The id of a delivery means that one alone. Raises ``InvalidEvent`` for an id that no event can
    have.

    Example::

        for each in outbox.fate("01KAW3J5Q8ZV7N2M4X6R9T0BCD"):
            print(each)  # order.placed mail held by queue letters: printer down
    """
    text = exact_text("event_id", event_id, most=ROW_ID_LENGTH)
    alias = using or router.db_for_write(OutboxEvent)
    return next(filter(None, (fates_of(each, alias) for each in spellings(text))), [])


def fates_of(event_id: str, alias: str) -> list[Fate]:
    """Return the same as ``fate``, of an id that is stored."""
    found = OutboxEvent.objects.using(alias).filter(id__of_event=event_id)
    rows: list[Any] = [*found.defer(*LONG_TEXTS).annotate(seen_at=DatabaseNow()).order_by("pk")]
    fates = fates_of_rows(rows, alias)
    return [*fates, *_deleted(rows)] if rows and rows[0].event_id == event_id else fates


def fates_of_rows(rows: Sequence[Any], alias: str) -> list[Fate]:
    """Return the fate of each row; ``seen_at`` of the rows is the database's time."""
    pending = [each for each in rows if each.status in UNSETTLED]
    pauses = [*OutboxPause.objects.using(alias)] if pending else []
    places = _places(alias, pending)
    return [fate_of(each, each.seen_at, pauses, places.get(each.stream)) for each in rows]


def fate_of(
    row: OutboxEvent, now: datetime, pauses: Iterable[OutboxPause], place: Place | None = None
) -> Fate:
    """Return the fate of a row; ``now``: the database's, ``place``: in its stream, if it has one.

    ``pauses`` may hold others as well.
    """
    tell = partial(
        Fate, event_type=row.event_type, listener=row.listener, attempts=row.attempts, id=row.pk
    )
    reason = first_line(row.last_error)
    if row.status not in UNSETTLED:
        state = "done" if row.status == Status.DONE else "dead"
        state = "discarded" if state == "done" and reason.startswith(DISCARDED) else state
        if is_slot(row.stream) and row.result == COALESCED:
            reason = COALESCED
        return tell(state=state, since=row.done_at, reason=reason)
    holder, due = (place.stream, place.stream.due_at) if place else (row, row.available_at)
    later = due if due is not None and due > now else None
    before = place.head if place and place.head and place.head.pk != row.pk else None
    if (owner := holder.locked_by) and later and before is None:
        return tell(state="leased", since=holder.locked_at, until=later, by=owner, reason=reason)
    if not later and due and (pause := _pause_of(row, pauses, holder.queue)) is not None:
        name, since = f"{pause.kind} {pause.name}", max(due, pause.paused_at)
        wait = partial(tell, state="held", since=since, until=pause.until)
        return wait(by=name, reason=pause.reason)
    if place and before is not None:
        wait = partial(tell, by=f"event {before.event_id}")
        if not place.is_blocked:
            return wait(state="waiting")
        return wait(state="held", until=later, reason=first_line(before.last_error))
    state = "retrying" if row.status == Status.RETRY else "waiting"
    state = state if row.listener is not None else "unrouted"
    return tell(state=state, since=None if later else due, until=later, reason=reason)


def _pause_of(row: OutboxEvent, pauses: Iterable[OutboxPause], queue: str) -> OutboxPause | None:
    """Return the pause or open breaker that holds a row; of several, the one that ends last."""
    names = names_holding(row.event_type, row.listener, row.key)
    names += [(kind, queue) for kind in CLOSING_KINDS]
    parked = parked_by(queue)
    found = [each for each in pauses if (each.kind, each.name) in names or each.pk == parked]
    return max(
        found, key=lambda each: (each.until is None, each.until or each.paused_at), default=None
    )


def _places(alias: str, rows: Sequence[OutboxEvent]) -> dict[str | None, Place]:
    """Return the streams in which these rows wait, by name."""
    names = {row.stream for row in rows if row.stream is not None and row.available_at is None}
    if not names:
        return {}
    every = OutboxStream.objects.using(alias)
    streams, heads = every.filter(pk__in=names), every.heads([*names])
    blocked = {*every.blocked().filter(pk__in=names).values_list("pk", flat=True)}
    return {each.pk: Place(each, heads.get(each.pk), each.pk in blocked) for each in streams}


def _deleted(rows: Sequence[OutboxEvent]) -> Iterator[Fate]:
    """Yield a fate for each listener of which only the receipt of an event is left."""
    left = {registry.digest(row.listener) for row in rows if row.listener is not None}
    titles = {registry.digest(t): t for each in registry.listeners() for t in each.titles}
    for entry in sorted({each for row in rows for each in (row.routes or "").split()}):
        digests = entry.split("/")
        if left.isdisjoint(digests):
            title = next(filter(None, map(titles.get, digests)), f"#{digests[0]}")
            event_type = rows[0].event_type
            yield Fate(event_type=event_type, listener=title, state="deleted", reason=DELETED)
