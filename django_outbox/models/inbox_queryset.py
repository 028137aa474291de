"""Queryset methods of the inbox table, which purge received messages past their retention."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.db import connections, models, router, transaction

from ..conf import Settings, current
from ..sql import dialect_of
from .retention import unlocked

if TYPE_CHECKING:
    from . import OutboxInbox  # noqa: F401 - named in a string below


class InboxQuerySet(models.QuerySet["OutboxInbox"]):
    """Received messages, by the database's clock."""

    def expired(self, settings: Settings | None = None) -> InboxQuerySet:
        """Return messages past their retention, which the next purge deletes."""
        limit = self._limit(settings or current())
        return self.none() if limit is None else self.filter(received_at__lt=limit)

    def purge(self) -> int:
        """Delete all messages past their retention, not only these; return how many."""
        return sum(self.purge_batches())

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Purge all, not only these; yield the size of each delete, which commits by itself.

        A size may be 0. ``settings`` replaces the project's settings for retention and batch size.
        Primary keys rise with the time of receipt. So the scan stops at the first batch without an
        expired message, and needs no extra index.
        """
        settings = settings or current()
        every, limit = self.model.objects.using(self._write_alias()), self._limit(settings)
        size, low = settings.PURGE_BATCH_SIZE, 0
        while limit is not None:
            ahead = every.filter(pk__gt=low).order_by("pk").values_list("pk", "received_at")
            ids = [pk for pk, at in ahead[:size] if at < limit]
            if not ids:
                return
            low = ids[-1]
            yield every.filter(pk__in=ids)._delete_unlocked()

    def _delete_unlocked(self) -> int:
        connection = connections[self._write_alias()]
        with transaction.atomic(using=connection.alias):
            ids = unlocked(self, connection)
            dialect = dialect_of(connection)
            return dialect.delete(connection, "outbox_inbox", column="id", ids=ids)

    def _limit(self, settings: Settings) -> datetime | None:
        """Return the instant before which messages are purged; None if they are all kept."""
        age, connection = settings.RETENTION_INBOX, connections[self._write_alias()]
        if age is None:
            return None
        return dialect_of(connection).clock(connection) - timedelta(seconds=age)

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]
