"""Replay: dead events are made due again as if new, and their history says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Concat, Length, Substr

from ..events import UNROUTED_LANE
from ..listeners.history import Entry, addition
from ..listeners.outcomes import Status
from ..queue_settings import is_rate, per_second
from .fields import DatabaseNow, ExactTextField, UTCDateTimeField

if TYPE_CHECKING:
    from .event_queryset import OutboxQuerySet


_LANE: Final = Q(stream__gte=f"{UNROUTED_LANE}:", stream__lt=f"{UNROUTED_LANE};")
ALONE: Final = Q(stream=None) | _LANE  # events that are due by themselves, not by a stream

BY: Final = 255  # characters of who replayed
EVENTS_PER_STATEMENT: Final = 100  # events that get due times of their own in one statement


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

    def take(self, count: int, now: datetime) -> list[datetime]:
        """Return the next due times, none before ``now``."""
        first = max(self.next_at or now, now)
        times = [first + place * self._interval for place in range(count)]
        if times:
            self.last_at, self.next_at = times[-1], times[-1] + self._interval
        return times


def replay_rows(rows: OutboxQuerySet, *, by: str, spacing: Spacing | None = None) -> int:
    """Replay these rows, which are dead, in one transaction; return how many. ``by``: who does.

    With a ``spacing`` they become due one after the other, in ascending order of their ids.
    """
    alias = rows._write_alias()
    with transaction.atomic(using=alias):
        ids = [*_locked(rows).order_by("pk").values_list("pk", flat=True)]
        times: dict[str, datetime] = {}
        if not ids:
            return 0
        now = rows._clock()
        if spacing is not None:
            times = dict(zip(ids, spacing.take(len(ids), now), strict=True))
        replayed = Entry(at=now, kind="replayed", by=by[:BY])
        for some, due in _due_times(ids, times):
            _reset(rows.filter(pk__in=some), due, replayed)
    return len(ids)


def _locked(rows: OutboxQuerySet) -> OutboxQuerySet:
    """Lock rows until the transaction ends; wait for those that another transaction has locked."""
    return rows.select_for_update() if rows._connection().features.has_select_for_update else rows


def _due_times(ids: list[str], times: Mapping[str, datetime]) -> Iterator[tuple[list[str], Any]]:
    """Yield some of the ids with the expression of their due times, until all are yielded."""
    if not times:
        yield ids, DatabaseNow()
        return
    for start in range(0, len(ids), EVENTS_PER_STATEMENT):
        some = ids[start : start + EVENTS_PER_STATEMENT]
        field = UTCDateTimeField()
        yield some, Case(*(When(pk=pk, then=Value(times[pk], field)) for pk in some))


def _reset(rows: OutboxQuerySet, due: Any, replayed: Entry) -> int:
    """Make dead events new and due at the time of an expression; those with a key, no earlier."""
    alone, is_now = ALONE, isinstance(due, DatabaseNow)
    first, added = addition(replayed)
    shorter = Substr("history", 1, Length("history") - 1)
    longer = Concat(shorter, Value(added), output_field=ExactTextField())
    return rows.update(
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
