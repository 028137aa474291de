"""Give stored events to a listener that was registered after they were written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Q, When

from ..events import stream_of
from ..exceptions import did_you_mean
from ..listeners import registry
from ..listeners.outcomes import Status
from ..listeners.queues import Route, missing_of, row_id
from ..listeners.registry import ANY, Listener
from ..sql import dialect_of
from ..sql.values import in_parts
from .operation import By, OutboxOperation, acting
from .replay import ALONE, Spacing, due_times

if TYPE_CHECKING:
    from .event_queryset import OutboxQuerySet

PART: Final = 1000  # rows that are read for one transaction: limits how long others wait for it
PAGE: Final = 50_000  # rows with a key whose order is read at a time: some 15 MB
TRIES: Final = 5  # of a transaction that fails, as one does that deadlocks with another


class Source(NamedTuple):
    """A stored event, as one of its rows has it."""

    event_id: str
    aggregate_type: str
    event_type: str
    key: str | None
    receipt: str | None

    def route_to(self, title: str, receipt: str | None) -> Route | None:
        """Return how the listener is to get this event; None if it was given it, or gets none."""
        missing = missing_of(self.aggregate_type, self.event_type, receipt or "")
        return next((each for each in missing if each.title == title), None)


COLUMNS: Final = ("event_id", "aggregate_type", "event_type", "key", "routes")  # of a ``Source``


def registered(title: str) -> Listener:
    """Return the listener with a title; raises ``ValueError`` if this process has none."""
    found = next((each for each in registry.listeners() if title in each.titles), None)
    if found is None:
        hint = did_you_mean(title, [each.title for each in registry.listeners()])
        raise ValueError(
            f"No listener has the title {title!r}; expected the title of a listener in your code. "
            f"{hint} outbox_status --listeners lists them."
        )
    return found


def deliver_parts(
    rows: OutboxQuerySet, listener: Listener, spacing: Spacing | None = None, *, by: By = ""
) -> Iterator[int]:
    """Insert the deliveries that a listener lacks of these; yield how many, part by part.

    Each part commits by itself. With a ``spacing`` they become due one after the other.
    """
    act = acting(OutboxOperation.Kind.DELIVER_TO, by, listener.title)
    tries = 1 if rows._connection().in_atomic_block else TRIES
    for part in lacking(rows, listener):
        yield _repeated(partial(_deliver, rows, listener.title, part, spacing, act), tries)


def lacking(rows: OutboxQuerySet, listener: Listener) -> Iterator[list[Source]]:
    """Yield the events among these that a listener should have and was not given, part by part.

    First those without a key by id, then those with a key in the order of ``seq``, so that no
    stream gets an event before an earlier one. What is not routed, or not due for the first time
    yet, is left out: the worker that claims it routes it.
    """
    now = rows._clock()
    rows = rows.filter(listener__isnull=False, created_at__lte=now)
    rows = rows.exclude(status=Status.NEW, first_due_at__gt=now)
    if not any("*" in each for each in listener.types):
        rows = rows.filter(event_type__in=listener.types)
    if listener.aggregate_type is not ANY:
        rows = rows.filter(aggregate_type=listener.aggregate_type)
    for title in listener.titles:
        rows = rows.exclude(routes__contains=registry.digest(title))
    before: dict[str, Source] = {}
    for part in chain(_by_id(rows.filter(key=None)), _by_seq(rows.filter(key__isnull=False))):
        found = {each.event_id: each for each in part}
        # Rows of one event are adjacent; a part may end between two of them.
        wanted = [each for each in found.values() if each.event_id not in before]
        before = found
        if wanted := [each for each in wanted if each.route_to(listener.title, each.receipt)]:
            yield wanted


def _by_id(rows: OutboxQuerySet) -> Iterator[list[Source]]:
    after, every = "", rows.order_by("pk").values_list("pk", *COLUMNS)
    while found := [*every.filter(pk__gt=after)[:PART]]:
        yield [Source(*each[1:]) for each in found]
        after = found[-1][0]


def _by_seq(rows: OutboxQuerySet) -> Iterator[list[Source]]:
    """Read the events in pages, as no index has the order of those that are done."""
    seq, pk = -1, ""
    places, every = rows.order_by("seq", "pk").values_list("seq", "pk"), rows._all_rows()
    while page := [*places.filter(Q(seq__gt=seq) | Q(seq=seq, pk__gt=pk))[:PAGE]]:
        for some in in_parts(page, PART):
            part = every.filter(pk__in=[pk for _, pk in some])
            yield [Source(*each) for each in part.order_by("seq", "pk").values_list(*COLUMNS)]
        seq, pk = page[-1][0] or 0, page[-1][1]


def _repeated(deliver: Callable[[], int], tries: int) -> int:
    for _ in range(tries - 1):
        with suppress(OperationalError):
            return deliver()
    return deliver()


def _deliver(
    rows: OutboxQuerySet,
    title: str,
    part: Sequence[Source],
    spacing: Spacing | None,
    act: OutboxOperation,
) -> int:
    """Insert the deliveries of some events in one transaction; return how many.

    All rows of an event are locked, as by a worker that routes it: what others have given
    meanwhile is in their receipts, and an event that was purged has no rows.
    """
    connection = rows._connection()
    dialect = dialect_of(connection)
    route = next(found for each in part if (found := each.route_to(title, each.receipt)))
    streams = [stream_of(route.lane, each.key) for each in part if each.key is not None]
    sources: defaultdict[str, list[str]] = defaultdict(list)
    with dialect.read_committed():
        dialect.wake_streams(streams, queue=route.queue)
        locked = _lock(connection, part)
        given: list[str] = []
        noted: defaultdict[str, list[str]] = defaultdict(list)
        for each in part:
            receipts = locked[each.event_id]
            known = " ".join({*receipts.values()})  # one and the same text, as a rule
            if receipts and each.route_to(title, known):
                noted[known] += receipts
                sources[known].append(min(receipts))
                given.append(row_id(each.event_id, route.digest))
        for known, ids in noted.items():
            receipt = " ".join(sorted({*known.split(), route.entry}))
            dialect.note_receipt(ids=ids, receipt=receipt)
            dialect.add_rows(ids=sources[known], route=route, receipt=receipt)
        if spacing is not None:
            _space(rows._all_rows(), given, spacing)
        return act.counted(len(given), using=connection.alias)


def _lock(connection: BaseDatabaseWrapper, part: Sequence[Source]) -> dict[str, dict[str, str]]:
    """Lock the rows of these events; return the receipt of each row, by event and id.

    An event can have a row for each digest in its receipts, which may have got more meanwhile.
    """
    dialect, locked = dialect_of(connection), {each.event_id: dict[str, str]() for each in part}
    read = {each.event_id: each.receipt or "" for each in part}
    wanted = {id_ for event_id, receipt in read.items() for id_ in _ids(event_id, receipt)}
    asked: set[str] = set()
    while more := sorted(wanted - asked):
        asked |= wanted
        for id_, event_id, receipt in dialect.lock_rows(more):
            if event_id in locked:
                locked[event_id][id_] = receipt
                if receipt != read[event_id]:
                    wanted |= _ids(event_id, receipt)
    return locked


def _ids(event_id: str, receipt: str) -> set[str]:
    """Return the ids that the rows of an event with this receipt can have.

    The first row has the event's id, so an event that one listener was given has no other.
    """
    given = receipt.split()
    digests = receipt.replace("/", " ").split() if len(given) > 1 else []
    return {event_id, *(row_id(event_id, each) for each in digests)}


def _space(rows: OutboxQuerySet, ids: list[str], spacing: Spacing) -> None:
    """Make new deliveries due one after the other; those with a key in their streams."""
    times = dict(zip(ids, spacing.take(len(ids), rows._clock()), strict=True))
    for some, due in due_times(ids, times):
        rows.filter(pk__in=some).update_by_id(
            available_at=Case(When(ALONE, then=due)),
            deliver_at=Case(When(ALONE, then=F("deliver_at")), default=due),
            first_due_at=due,
        )
