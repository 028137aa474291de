"""Which events and messages are past their retention, and the worker's purge of the events.

It deletes expired rows by ranges of ids, and now and then scans all other ids. Ids are ordered by
time, and no event ends before it is written. So no event with an id above that of an instant ended
before the instant. Ids that writers choose themselves may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from django.db.models import Q

from ..conf import DAY, Settings, current
from ..events import least_id
from ..listeners.outcomes import Status
from .queryset import Batch, TableQuerySet, scan

if TYPE_CHECKING:
    from . import OutboxInbox  # noqa: F401 - named in a string below


USUAL_SETTLE_TIME: Final = timedelta(hours=1)  # from an event's id until its end, as a rule
MAX_CLOCK_LEAD: Final = timedelta(seconds=DAY)  # how far a writer's clock is ahead, at most


def ages(settings: Settings) -> set[float]:
    """Return the seconds after which events are past their retention; empty if all are kept."""
    done, unique, dead = settings.RETENTION_DONE, settings.RETENTION_UNIQUE, settings.RETENTION_DEAD
    if settings.MODE == "writer_only":
        unique = dead = None
    elif done is None:
        unique = None
    elif unique is not None:
        unique = max(done, unique)
    return {age for age in (done, unique, dead) if age is not None}


def expired_condition(settings: Settings, now: datetime) -> Q:
    """Return the condition of rows that are past their retention; empty if all are kept."""
    if settings.MODE == "writer_only":  # no worker settles rows there: only age counts
        age = settings.RETENTION_DONE
        return Q() if age is None else Q(created_at__lt=now - timedelta(seconds=age))
    expired = Q()
    for status, retention in (
        (Status.DONE, settings.RETENTION_DONE),
        (Status.DEAD, settings.RETENTION_DEAD),
    ):
        if retention is not None:
            expired |= Q(status=status, done_at__lt=now - timedelta(seconds=retention))
    if expired:
        forgotten = Q(unique_key=None) | ~Q(status=Status.DONE)
        if settings.RETENTION_UNIQUE is not None:
            kept = now - timedelta(seconds=settings.RETENTION_UNIQUE)
            forgotten |= Q(done_at__lt=kept)
        expired &= forgotten
    return expired


class InboxQuerySet(TableQuerySet["OutboxInbox"]):
    """Received messages, by the database's clock.

    Example::

        OutboxInbox.objects.filter(source="payments").count()
        OutboxInbox.objects.purge()
    """

    table = "outbox_inbox"

    def expired_condition(self, settings: Settings) -> Q:
        """Return the condition of messages past their retention; empty if all are kept."""
        age = settings.RETENTION_INBOX
        return Q() if age is None else Q(received_at__lt=self._clock() - timedelta(seconds=age))

    def _purged(self, settings: Settings) -> Iterator[Batch]:
        # Primary keys rise with the time of receipt: behind such a batch, nothing has expired.
        return takewhile(lambda batch: batch.expired, super()._purged(settings))


def purge_events(alias: str, *, since: datetime | None) -> Iterator[int]:
    """Purge events that expired after ``since``, when the last run began; None: all older ones too.

    Yield the size of each delete, which may be 0. Of the ids that a run has passed, only the last
    hour is read again. ``scan_events`` purges events that ended more than an hour after their id.
    """
    from . import OutboxEvent

    settings, every = current(), OutboxEvent.objects.using(alias)
    every_age, now = ages(settings), every._clock()
    if since is None:
        every_age = {*sorted(every_age)[:1]}  # its range includes the others
    for seconds in sorted(every_age, reverse=True):
        age = timedelta(seconds=seconds)
        low = "" if since is None else least_id(since - age - USUAL_SETTLE_TIME)
        until, expired = least_id(now - age), every.expired_condition(settings)
        batches = scan(every, expired, after=low, until=until, size=settings.PURGE_BATCH_SIZE)
        yield from (batch.deleted for batch in batches)


def scan_events(alias: str, *, after: str, most: int) -> Batch | None:
    """Purge among the next events by primary key, at most ``most``; return None if none is left.

    Skip ids that are too recent for any event to have expired. A later scan reads them.
    """
    from . import OutboxEvent

    settings, every = current(), OutboxEvent.objects.using(alias)
    if not (every_age := ages(settings)):
        return None
    now, expired = every._clock(), every.expired_condition(settings)
    too_recent, beyond = (
        least_id(now - timedelta(seconds=min(every_age))),
        least_id(now + MAX_CLOCK_LEAD),
    )
    size = min(settings.PURGE_BATCH_SIZE, most)
    older = scan(every, expired, after=after, until=too_recent, size=size)
    beyond = max(after, beyond)
    return next(older, None) or next(scan(every, expired, after=beyond, size=size), None)


def scan_streams(alias: str, *, after: str, most: int) -> Batch | None:
    """Purge among the next streams by primary key, at most ``most``; None if none is left."""
    from . import OutboxStream

    settings, every = current(), OutboxStream.objects.using(alias)
    size = min(settings.PURGE_BATCH_SIZE, most)
    return next(scan(every, every.expired_condition(settings), after=after, size=size), None)
