"""Queryset methods of the inbox table, which purge received messages past their retention."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ..conf import Settings, current
from .queryset import TableQuerySet

if TYPE_CHECKING:
    from . import OutboxInbox  # noqa: F401 - named in a string below


class InboxQuerySet(TableQuerySet["OutboxInbox"]):
    """Received messages, by the database's clock.

    Example::

        OutboxInbox.objects.filter(source="payments").count()
        OutboxInbox.objects.purge()
    """

    table = "outbox_inbox"

    def expired(self, settings: Settings | None = None) -> InboxQuerySet:
        """Return messages past their retention, which the next purge deletes."""
        limit = self._limit(settings or current())
        return self.none() if limit is None else self.filter(received_at__lt=limit)

    def purge(self) -> int:
        """Delete every expired message, whatever this is filtered by; return how many."""
        return sum(self.purge_batches())

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Do what ``purge`` does; yield the size of each delete, which commits by itself.

        A size may be 0. ``settings`` replaces the project's settings for retention and batch size.
        Primary keys rise with the time of receipt. So the scan stops at the first batch without an
        expired message, and needs no extra index.
        """
        settings = settings or current()
        every, limit = self._all_rows(), self._limit(settings)
        size, low = settings.PURGE_BATCH_SIZE, 0
        while limit is not None:
            ahead = every.filter(pk__gt=low).order_by("pk").values_list("pk", "received_at")
            ids = [pk for pk, at in ahead[:size] if at < limit]
            if not ids:
                return
            low = ids[-1]
            yield every.filter(pk__in=ids)._delete_unlocked()

    def _limit(self, settings: Settings) -> datetime | None:
        """Return the instant before which messages are purged; None if they are all kept."""
        age = settings.RETENTION_INBOX
        return None if age is None else self._clock() - timedelta(seconds=age)
