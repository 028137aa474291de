"""Which events and received messages are past their retention."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

from django.db.models import Q

from ..conf import Settings
from ..listeners.outcomes import Status
from .queryset import Batch, TableQuerySet

if TYPE_CHECKING:
    from . import OutboxInbox  # noqa: F401 - named in a string below


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
