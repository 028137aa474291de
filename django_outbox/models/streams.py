"""The verbs of streams; what leases them is SQL of ``dialects``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from django.db import connections, models, router, transaction
from django.db.models import Exists, OuterRef, Q

from .. import dialects
from ..conf import DAY, Settings, current
from ..dialects.fields import DatabaseNow, IsIndexed
from ..events import ACTIVE
from ..outcomes import UNSETTLED, Status
from .retention import batches, unlocked
from .verbs import OutboxQuerySet

if TYPE_CHECKING:
    from . import OutboxEvent, OutboxStream  # noqa: F401 - named in a string below

BACKLOG: Final = 1000  # events of one stream that are counted, at most
LONG: Final = ("payload", "headers", "result", "progress")  # columns that no list shows
IDLE: Final = DAY  # seconds without events after which a stream is purged; writers are far then


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What stands first in a stream, and how much behind it."""

    head: OutboxEvent | None  # without its long texts
    backlog: int  # unsettled events, the head included if it is one; at most BACKLOG


class StreamQuerySet(models.QuerySet["OutboxStream"]):
    """Adjectives read, verbs act; all by the database's clock."""

    def due(self) -> StreamQuerySet:
        """Streams that the next claim may take, oldest first."""
        return self.real().filter(due_at__lte=DatabaseNow()).order_by("due_at")

    def leased(self) -> StreamQuerySet:
        """Streams that a worker holds at this moment."""
        return self.real().filter(locked_by__isnull=False, due_at__gt=DatabaseNow())

    def blocked(self) -> StreamQuerySet:
        """Streams whose head keeps its followers waiting: until its next try, or dead for good."""
        waiting = Q(locked_by=None, due_at__gt=DatabaseNow())
        if current().ON_DEAD == "block":
            waiting |= Q(locked_by=None, due_at=None, pk__in=self._dead_with_followers())
        return self.real().filter(waiting)

    def release(self) -> int:
        """Give the leases of these back: due now; return how many.

        Whoever held one finds its settle refused. Meant for a worker that is known to be gone.
        """
        held = self.real().filter(locked_by__isnull=False)
        return held.update(due_at=DatabaseNow(), locked_by=None, locked_at=DatabaseNow())

    def expired(self, settings: Settings | None = None) -> StreamQuerySet:
        """Streams that were idle for a day and of which no pending or dead event is left."""
        settings, alias = settings or current(), self._write_alias()
        limit = dialects.of(connections[alias]).clock(connections[alias]) - timedelta(seconds=IDLE)
        idle = Q(due_at=None, locked_at__lt=limit)
        if settings.MODE == "writer_only":  # nobody makes a stream idle there
            idle = Q(due_at__lt=limit)
        return self.real().filter(~Exists(self._events()), idle)

    def purge(self) -> int:
        """Delete every stream that is expired, batch by batch; return how many."""
        return sum(self.purge_batches())

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Purge all; yield the size of each delete, which commits by itself, be it 0.

        ``settings`` stand for those in force: their size of a batch. A writer makes the stream due
        again in the very row that is locked here, so none is deleted under an event.
        """
        settings = settings or current()
        every = self.model.objects.using(self._write_alias())
        expired = every.expired(settings)
        for batch in batches(every, settings.PURGE_BATCH_SIZE):
            yield expired.filter(batch)._delete_unlocked()

    def oldest_due_age(self) -> float | None:
        """Return the seconds that the oldest due stream has waited; None if none is due."""
        row = self.due().annotate(now=DatabaseNow()).values_list("due_at", "now").first()
        if row is None or row[0] is None:
            return None
        return max((row[1] - row[0]).total_seconds(), 0.0)

    def places(self, keys: Sequence[str]) -> dict[str, Place]:
        """Return what stands first in these streams; a few looks, however long they are."""
        from . import OutboxEvent

        alias = self._write_alias()
        connection = connections[alias]
        dialect, blocks = dialects.of(connection), current().ON_DEAD == "block"
        statuses = [*UNSETTLED, Status.DEAD] if blocks else UNSETTLED
        first = dialect.heads(connection, keys=keys, statuses=statuses) if keys else {}
        backlogs = dialect.backlogs(connection, keys=keys, most=BACKLOG) if keys else {}
        events = OutboxEvent.objects.using(alias).defer(*LONG).in_bulk([*first.values()])
        return {
            key: Place(head=events.get(first.get(key, "")), backlog=backlogs[key]) for key in keys
        }

    def _delete_unlocked(self) -> int:
        connection = connections[self._write_alias()]
        with transaction.atomic(using=connection.alias):
            keys = unlocked(self, connection)
            return dialects.of(connection).delete_streams(connection, keys=keys) if keys else 0

    def _events(self) -> OutboxQuerySet:
        """Events of the stream in the outer query that are pending or dead."""
        from . import OutboxEvent

        return OutboxEvent.objects.filter(IsIndexed("status"), key=OuterRef("pk"))

    def _dead_with_followers(self) -> models.QuerySet[OutboxEvent, str | None]:
        """Keys that have a dead event, which are few, and a pending one; idle ones may be many."""
        from . import OutboxEvent

        indexed = OutboxEvent.objects.filter(IsIndexed("status"), key__isnull=False)
        pending = indexed.filter(key=OuterRef("key")).pending()
        return indexed.dead().filter(Exists(pending)).order_by().values_list("key", flat=True)

    def real(self) -> StreamQuerySet:
        """Without the row that is no stream but the lease of "single_node"."""
        return self.using(self._write_alias()).exclude(pk=ACTIVE)

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]
