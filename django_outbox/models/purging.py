"""The worker's purge: delete expired rows by ranges of ids, and now and then scan all other ids.

Ids are ordered by time, and no event ends before it is written. So no event with an id above that
of an instant ended before the instant. Ids that writers choose themselves may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from django.db import connections

from ..conf import DAY, current
from ..events import least_id
from ..sql import dialect_of
from . import OutboxEvent, OutboxStream
from .queryset import Batch, scan
from .retention import ages

USUAL_SETTLE_TIME: Final = timedelta(hours=1)  # from an event's id until its end, as a rule
MAX_CLOCK_LEAD: Final = timedelta(seconds=DAY)  # how far a writer's clock is ahead, at most


def purge_events(alias: str, *, since: datetime | None) -> Iterator[int]:
    """Purge events that expired after ``since``, when the last run began; None: all older ones too.

    Yield the size of each delete, which may be 0. Of the ids that a run has passed, only the last
    hour is read again. ``scan_events`` purges events that ended more than an hour after their id.
    """
    settings, every = current(), OutboxEvent.objects.using(alias)
    every_age, now = ages(settings), _clock(alias)
    if since is None:
        every_age = {*sorted(every_age)[:1]}  # its range includes the others
    for age in map(_seconds, sorted(every_age, reverse=True)):
        low = "" if since is None else least_id(since - age - USUAL_SETTLE_TIME)
        until, expired = least_id(now - age), every.expired_condition(settings)
        batches = scan(every, expired, after=low, until=until, size=settings.PURGE_BATCH_SIZE)
        yield from (batch.deleted for batch in batches)


def scan_events(alias: str, *, after: str, most: int) -> Batch | None:
    """Purge among the next events by primary key, at most ``most``; return None if none is left.

    Skip ids that are too recent for any event to have expired. A later scan reads them.
    """
    settings, every = current(), OutboxEvent.objects.using(alias)
    if not (every_age := ages(settings)):
        return None
    now, expired = _clock(alias), every.expired_condition(settings)
    too_recent, beyond = least_id(now - _seconds(min(every_age))), least_id(now + MAX_CLOCK_LEAD)
    size = min(settings.PURGE_BATCH_SIZE, most)
    older = scan(every, expired, after=after, until=too_recent, size=size)
    beyond = max(after, beyond)
    return next(older, None) or next(scan(every, expired, after=beyond, size=size), None)


def scan_streams(alias: str, *, after: str, most: int) -> Batch | None:
    """Purge among the next streams by primary key, at most ``most``; None if none is left."""
    settings, every = current(), OutboxStream.objects.using(alias)
    size = min(settings.PURGE_BATCH_SIZE, most)
    return next(scan(every, every.expired_condition(settings), after=after, size=size), None)


def _seconds(age: float) -> timedelta:
    return timedelta(seconds=age)


def _clock(alias: str) -> datetime:
    return dialect_of(connections[alias]).clock()
