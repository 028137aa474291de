"""The tables and their verbs; the claim itself is SQL of ``dialects``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from django.db import DatabaseError, connections, models, router
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from . import dialects
from .conf import Settings, current, index_name, table_name
from .dialects.fields import (
    DatabaseNow,
    ExactCharField,
    ExactTextField,
    PendingIndex,
    UTCDateTimeField,
)
from .events import GLOBAL, LENGTHS
from .outcomes import UNSETTLED, Status
from .signals import announce, events_purged, events_replayed

ACTIVE: Final = "__outbox_active__"  # the stream row that is single_node's lease


class OutboxQuerySet(models.QuerySet["OutboxEvent"]):
    """Adjectives read, verbs act, questions answer; all by the database's clock."""

    def pending(self) -> OutboxQuerySet:
        """Events not finished yet."""
        return self.filter(status__in=UNSETTLED)

    def leased(self) -> OutboxQuerySet:
        """Events that a worker holds at this moment."""
        return self.filter(locked_by__isnull=False, available_at__gt=DatabaseNow())

    def due(self) -> OutboxQuerySet:
        """Events that the next claim may take, oldest first."""
        return self.filter(available_at__lte=DatabaseNow()).order_by("available_at", "event_id")

    def done(self) -> OutboxQuerySet:
        return self.filter(status=Status.DONE)

    def dead(self) -> OutboxQuerySet:
        """Events that ended without success, oldest first."""
        return self.filter(status=Status.DEAD).order_by("done_at", "event_id")

    def replay(self) -> int:
        """Make the dead events among these due again as if new; return how many."""
        rows = self._dead_rows()
        count = 0
        for pk, progress in rows.exclude(progress=None).values_list("pk", "progress"):
            count += self._replay(rows.filter(pk=pk), progress=_what_succeeded(progress))
        count += self._replay(rows.filter(progress=None))
        if count:
            announce(events_replayed, sender=self._write_alias(), count=count)
        return count

    def discard(self) -> int:
        """Delete the dead events among these; return how many."""
        return int(self._dead_rows()._raw_delete(self._write_alias()))

    def release(self) -> int:
        """Give the leases of these back: due now, no attempt counted; return how many.

        Whoever held one finds its settle refused. Meant for a worker that is known to be gone.
        """
        return (
            self._plain()
            .filter(status__in=UNSETTLED, locked_by__isnull=False)
            .update(available_at=DatabaseNow(), locked_by=None, locked_at=None)
        )

    def purge(self) -> int:
        """Delete every finished event past its retention, batch by batch; return how many."""
        count = sum(purge_batches(self._write_alias()))
        if count:
            announce(events_purged, sender=self._write_alias(), count=count)
        return count

    def expired(self) -> OutboxQuerySet:
        """Finished events past their retention: what the next purge deletes."""
        connection = connections[self._write_alias()]
        condition = _expired(current(), dialects.of(connection).clock(connection))
        return self.filter(condition) if condition else self.none()

    def counts_by_status(self) -> dict[str, int]:
        """Return the number of events per status name; it reads the whole table."""
        rows = self.order_by().values_list("status").annotate(count=models.Count("pk"))
        found = dict(rows)
        return {status.name: found.get(status.value, 0) for status in Status}

    def oldest_pending_age(self) -> float | None:
        """Return the seconds that the oldest due event has waited; None if nothing is due."""
        row = self.due().annotate(now=DatabaseNow()).values_list("available_at", "now").first()
        return max((row[1] - row[0]).total_seconds(), 0.0) if row else None

    def _replay(self, rows: OutboxQuerySet, **values: str | None) -> int:
        return rows.update(
            status=Status.NEW,
            attempts=0,
            rescues=0,
            available_at=DatabaseNow(),
            first_due_at=DatabaseNow(),
            done_at=None,
            last_error=None,
            locked_by=None,
            locked_at=None,
            **values,
        )

    def _plain(self) -> OutboxQuerySet:
        """The same rows without order or slice, as UPDATE and DELETE need them."""
        if self.query.is_sliced:
            return self.model.objects.using(self._write_alias()).filter(
                pk__in=[*self.values_list("pk", flat=True)]
            )
        return self.using(self._write_alias()).order_by()

    def _dead_rows(self) -> OutboxQuerySet:
        return self._plain().filter(status=Status.DEAD)

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)


class OutboxEvent(models.Model):
    """One event, from its transaction to its end. Rows are changed by verbs, never by ``save()``."""

    class Status(models.IntegerChoices):
        NEW = 0, _("new")
        DONE = 1, _("done")
        RETRY = 2, _("retry")
        DEAD = 3, _("dead")

    event_id = ExactCharField(_("event id"), max_length=LENGTHS["event_id"], primary_key=True)
    event_type = ExactCharField(_("event type"), max_length=LENGTHS["event_type"])
    aggregate_type = ExactCharField(
        _("aggregate type"),
        max_length=LENGTHS["aggregate_type"],
        default=GLOBAL,
        db_default=GLOBAL,
    )
    aggregate_id = ExactCharField(
        _("aggregate id"), max_length=LENGTHS["aggregate_id"], null=True, blank=True
    )
    tenant_id = ExactCharField(
        _("tenant id"), max_length=LENGTHS["tenant_id"], null=True, blank=True
    )
    payload = ExactTextField(_("payload"))
    headers = ExactTextField(_("headers"), null=True, blank=True)
    status = models.SmallIntegerField(
        _("status"), choices=Status.choices, default=Status.NEW, db_default=Status.NEW
    )
    attempts = models.IntegerField(_("attempts"), default=0, db_default=0)
    rescues = models.SmallIntegerField(_("rescues"), default=0, db_default=0)
    occurred_at = UTCDateTimeField(_("occurred at"))
    created_at = UTCDateTimeField(_("created at"))
    deliver_at = UTCDateTimeField(_("deliver at"), null=True, blank=True)
    first_due_at = UTCDateTimeField(_("first due at"), null=True, blank=True)
    available_at = UTCDateTimeField(_("due at"), null=True, blank=True)
    done_at = UTCDateTimeField(_("done at"), null=True, blank=True)
    last_error = ExactTextField(_("last error"), null=True, blank=True)
    result = ExactTextField(_("result"), null=True, blank=True)
    locked_by = ExactCharField(_("locked by"), max_length=128, null=True, blank=True)
    locked_at = UTCDateTimeField(_("locked at"), null=True, blank=True)
    key = ExactCharField(_("key"), max_length=LENGTHS["key"], null=True, blank=True)
    seq = models.BigIntegerField(_("seq"), null=True, blank=True)
    unique_key = ExactCharField(
        _("unique key"), max_length=LENGTHS["unique_key"], null=True, blank=True
    )
    progress = ExactTextField(_("progress"), null=True, blank=True)

    objects = OutboxQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_event")
        verbose_name = _("outbox event")
        verbose_name_plural = _("outbox events")
        permissions = [
            ("replay_outboxevent", "Can replay outbox events"),
            ("discard_outboxevent", "Can discard outbox events"),
            ("edit_outboxevent", "Can edit and replay outbox events"),
        ]
        indexes = [
            PendingIndex(
                fields=["available_at", "event_id"],
                where=Q(available_at__isnull=False),
                name=index_name("outbox_event_due"),
            ),
            PendingIndex(
                fields=["key", "seq"],
                where=Q(key__isnull=False, status__in=[0, 2, 3]),
                plain_fields=("key", "done_at", "seq"),
                name=index_name("outbox_event_key"),
            ),
            PendingIndex(
                fields=["unique_key"],
                where=Q(unique_key__isnull=False),
                unique=True,
                name=index_name("outbox_event_unique"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id} ({self.aggregate_type} {self.aggregate_id})"


def _what_succeeded(progress: str) -> str | None:
    """Return the progress of a replayed row: listeners that are done are not run again."""
    try:
        entries = json.loads(progress)
        done = {title: each for title, each in entries.items() if each["state"] == "done"}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged: every listener runs
    return json.dumps(done) if done else None


def missing_table(alias: str | None) -> str | None:
    """Say what to do if the tables are not there; None if they are, or nobody can tell now."""
    connection = connections[alias or router.db_for_write(OutboxEvent)]
    try:
        with connection.cursor() as cursor:
            names = set(connection.introspection.table_names(cursor))
    except DatabaseError:
        return None  # the database is down; the worker waits for it
    finally:
        if not connection.in_atomic_block:
            connection.close()
    table = OutboxEvent._meta.db_table
    if table in names or table.startswith('"'):  # another schema is not listed
        return None
    return (
        f"The database {connection.alias!r} has no table {table!r}. "
        f"Run: manage.py migrate django_outbox --database {connection.alias}"
    )


def purge_batches(alias: str) -> Iterator[int]:
    """Delete finished events past their retention; yield the size of each delete.

    It walks the primary key upwards in ranges, so that it needs no index of its own and no batch
    reads more than its range. Each delete commits by itself.
    """
    settings = current()
    rows = OutboxEvent.objects.using(alias)
    expired = _expired(settings, dialects.of(connections[alias]).clock(connections[alias]))
    size, low = settings.PURGE_BATCH_SIZE, ""
    while expired and low is not None:
        ahead = rows.filter(pk__gt=low).order_by("pk").values_list("pk", flat=True)
        high = next(iter(ahead[size - 1 : size]), None)
        batch = rows.filter(expired, pk__gt=low, **({} if high is None else {"pk__lte": high}))
        ids = list(batch.values_list("pk", flat=True))
        if ids:
            yield rows.filter(expired, pk__in=ids).delete()[0]
        low = high


def _expired(settings: Settings, now: datetime) -> Q:
    """Return the condition of rows that are past their retention; empty if all are kept."""
    expired = Q()
    for status, retention in (
        (Status.DONE, settings.RETENTION_DONE),
        (Status.DEAD, settings.RETENTION_DEAD),
    ):
        if retention is not None:
            expired |= Q(status=status, done_at__lt=now - timedelta(seconds=retention))
    if settings.RETENTION_UNIQUE is not None and expired:
        kept = now - timedelta(seconds=settings.RETENTION_UNIQUE)
        expired &= Q(unique_key=None) | ~Q(status=Status.DONE) | Q(done_at__lt=kept)
    return expired


class OutboxStream(models.Model):
    """The events of one key; ``seq`` is its version, ``due_at`` its due time or lease end."""

    key = ExactCharField(max_length=LENGTHS["key"], primary_key=True)
    seq = models.BigIntegerField()
    due_at = UTCDateTimeField(null=True)
    locked_by = ExactCharField(max_length=128, null=True)
    locked_at = UTCDateTimeField(null=True)

    class Meta:
        db_table = table_name("outbox_stream")
        verbose_name = _("outbox stream")
        verbose_name_plural = _("outbox streams")
        indexes = [
            PendingIndex(
                fields=["due_at"],
                where=Q(due_at__isnull=False),
                name=index_name("outbox_stream_due"),
            )
        ]

    def __str__(self) -> str:
        return self.key


class OutboxWorker(models.Model):
    """A live worker process, for people to look at; nothing correct depends on it."""

    id = ExactCharField(max_length=128, primary_key=True)
    hostname = ExactCharField(max_length=255)
    pid = models.IntegerField()
    started_at = UTCDateTimeField()
    heartbeat_at = UTCDateTimeField()
    info = ExactTextField(null=True)

    class Meta:
        db_table = table_name("outbox_worker")
        verbose_name = _("outbox worker")
        verbose_name_plural = _("outbox workers")

    def __str__(self) -> str:
        return self.id


class OutboxInbox(models.Model):
    """A received message that was seen once (idempotent consumers)."""

    id = models.BigAutoField(primary_key=True)
    source = ExactCharField(max_length=128)
    message_id = ExactCharField(max_length=255)
    received_at = UTCDateTimeField()

    class Meta:
        db_table = table_name("outbox_inbox")
        verbose_name = _("received message")
        verbose_name_plural = _("received messages")
        constraints = [
            models.UniqueConstraint(
                fields=["source", "message_id"], name=index_name("outbox_inbox_once")
            )
        ]

    def __str__(self) -> str:
        return f"{self.source} {self.message_id}"
