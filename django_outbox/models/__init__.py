"""The models and their queryset methods; the SQL that claims events is in package ``sql``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, connections, models, router
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..conf import current, index_name, table_name
from ..events import (
    GLOBAL,
    LANE_LENGTH,
    LENGTHS,
    RECEIVED_LENGTHS,
    ROW_ID_LENGTH,
    STREAM_LENGTH,
    event_label,
)
from ..listeners.history import CAUSE_LENGTH
from ..listeners.options import TITLE_LENGTH
from ..queue_settings import DEFAULT_QUEUE, MAX_QUEUE_NAME
from ..sql import dialect_of
from .event_queryset import OutboxQuerySet
from .fields import (
    ExactCharField,
    ExactTextField,
    PendingIndex,
    SmallIntegerField,
    UTCDateTimeField,
)
from .operation import OutboxOperation
from .pause_queryset import PauseQuerySet
from .retention import InboxQuerySet
from .statistics import OutboxStatistics, write_statistics
from .stream_queryset import StreamQuerySet


class OutboxEvent(models.Model):
    """The delivery of an event to one listener. Change it by queryset methods, not ``save()``."""

    class Status(models.IntegerChoices):
        NEW = 0, _("new")
        DONE = 1, _("done")
        RETRY = 2, _("retry")
        DEAD = 3, _("dead")

    id = ExactCharField(max_length=ROW_ID_LENGTH, primary_key=True)
    event_id = ExactCharField(_("event id"), max_length=LENGTHS["event_id"])
    listener = ExactCharField(_("listener"), max_length=TITLE_LENGTH, null=True)
    routes = ExactTextField(_("routes"), null=True)  # digests of all its listeners
    event_type = ExactCharField(_("event type"), max_length=LENGTHS["event_type"])
    aggregate_type = ExactCharField(
        _("aggregate type"), max_length=LENGTHS["aggregate_type"], default=GLOBAL, db_default=GLOBAL
    )
    aggregate_id = ExactCharField(_("aggregate id"), max_length=LENGTHS["aggregate_id"], null=True)
    tenant_id = ExactCharField(_("tenant id"), max_length=LENGTHS["tenant_id"], null=True)
    payload = ExactTextField(_("payload"))
    headers = ExactTextField(_("headers"), null=True)
    status = SmallIntegerField(
        _("status"), choices=Status.choices, default=Status.NEW, db_default=Status.NEW
    )
    attempts = models.IntegerField(_("attempts"), default=0, db_default=0)
    rescues = SmallIntegerField(_("rescues"), default=0, db_default=0)
    occurred_at = UTCDateTimeField(_("occurred at"))
    created_at = UTCDateTimeField(_("created at"))
    deliver_at = UTCDateTimeField(_("deliver at"), null=True)
    first_due_at = UTCDateTimeField(_("first due at"), null=True)
    available_at = UTCDateTimeField(_("due at"), null=True)
    done_at = UTCDateTimeField(_("done at"), null=True)
    last_error = ExactTextField(_("last error"), null=True)
    cause = ExactCharField(_("cause"), max_length=CAUSE_LENGTH, null=True)
    history = ExactTextField(_("history"), null=True)  # JSON; see listeners.history
    result = ExactTextField(_("result"), null=True)
    locked_by = ExactCharField(_("locked by"), max_length=128, null=True)
    locked_at = UTCDateTimeField(_("locked at"), null=True)
    key = ExactCharField(_("key"), max_length=LENGTHS["key"], null=True)
    stream = ExactCharField(_("stream"), max_length=STREAM_LENGTH, null=True)
    seq = models.BigIntegerField(_("seq"), null=True)
    unique_key = ExactCharField(_("unique key"), max_length=LENGTHS["unique_key"], null=True)
    queue = ExactCharField(
        _("queue"), max_length=MAX_QUEUE_NAME, default=DEFAULT_QUEUE, db_default=DEFAULT_QUEUE
    )

    objects = OutboxQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_event")
        verbose_name = _("outbox delivery")
        verbose_name_plural = _("outbox deliveries")
        permissions = [
            ("replay_outboxevent", "Can replay outbox deliveries"),
            ("discard_outboxevent", "Can discard outbox deliveries"),
        ]
        indexes = [
            PendingIndex(
                fields=["queue", "available_at", "id"],
                where=Q(available_at__isnull=False),
                name=index_name("outbox_event_queue"),
            ),
            # For reports about all queues. A partial index of queues is short enough for them.
            PendingIndex(fields=["available_at", "id"], name=index_name("outbox_event_due")),
            PendingIndex(
                fields=["stream", "seq"],
                where=Q(stream__isnull=False, status__in=[0, 2, 3]),
                plain_fields=("stream", "status", "seq"),
                name=index_name("outbox_event_stream"),
            ),
            PendingIndex(
                fields=["unique_key"],
                where=Q(unique_key__isnull=False),
                unique=True,
                name=index_name("outbox_event_unique"),
            ),
            # For admin and commands only. MySQL has none: it finds dead events by the key index.
            PendingIndex(
                fields=["id"],
                where=Q(status=3),
                plain_fields=None,
                name=index_name("outbox_event_dead"),
            ),
            # For admin and commands only. MySQL has none: replays and claims deadlock on it.
            PendingIndex(
                fields=["id"],
                where=Q(rescues__gte=1),
                plain_fields=None,
                name=index_name("outbox_event_lost"),
            ),
        ]

    def __str__(self) -> str:
        return event_label(self)


def missing_table(alias: str | None) -> str | None:
    """Return what to do about a missing table; None if all exist or the database is down."""
    connection = connections[alias or router.db_for_write(OutboxEvent)]
    try:
        table = dialect_of(connection).missing_table()
    except DatabaseError:
        return None  # the database is down; the worker waits for it
    finally:
        if not connection.in_atomic_block:
            connection.close()
    return table and (
        f"The database {connection.alias!r} has no table {table!r}. "
        f"Run: manage.py migrate django_outbox --database {connection.alias}"
    )


class OutboxStream(models.Model):
    """The events of one key; ``seq`` is its version, ``due_at`` its due time or lease end."""

    stream = ExactCharField(max_length=STREAM_LENGTH, primary_key=True)  # lane and key
    key = ExactCharField(max_length=LENGTHS["key"])
    lane = ExactCharField(max_length=LANE_LENGTH, default="", db_default="")
    seq = models.BigIntegerField()
    due_at = UTCDateTimeField(null=True)
    rescues = SmallIntegerField(default=0, db_default=0)  # workers that were lost with it
    locked_by = ExactCharField(max_length=128, null=True)
    locked_at = UTCDateTimeField(null=True)
    queue = ExactCharField(
        max_length=MAX_QUEUE_NAME, default=DEFAULT_QUEUE, db_default=DEFAULT_QUEUE
    )

    objects = StreamQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_stream")
        verbose_name = _("outbox stream")
        verbose_name_plural = _("outbox streams")
        indexes = [
            PendingIndex(
                fields=["queue", "due_at"],
                where=Q(due_at__isnull=False),
                name=index_name("outbox_stream_queue"),
            ),
            PendingIndex(  # as that of events
                fields=["due_at"], name=index_name("outbox_stream_due")
            ),
        ]

    def __str__(self) -> str:
        return str(self.key)


class OutboxWorker(models.Model):
    """A live worker process, for display and a fair share; correctness never depends on it."""

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
        return str(self.id)


def live_workers(alias: str, *, but: str = "") -> list[dict[str, Any]]:
    """Return what the rows of live workers say: those with a heartbeat in the last LEASE."""
    connection = connections[alias]
    lately = dialect_of(connection).clock() - timedelta(seconds=current().LEASE)
    rows = OutboxWorker.objects.using(alias).filter(heartbeat_at__gt=lately).exclude(pk=but)
    return [json.loads(info) for info in rows.values_list("info", flat=True) if info]


class OutboxLease(models.Model):
    """The lease of work that one worker at a time does for all, and the progress of that work."""

    name = ExactCharField(max_length=64, primary_key=True)
    locked_by = ExactCharField(max_length=128, null=True)
    locked_until = UTCDateTimeField(null=True)
    state = ExactTextField(null=True)  # JSON

    class Meta:
        db_table = table_name("outbox_lease")
        default_permissions = ()  # only workers use it

    def __str__(self) -> str:
        return str(self.name)


class OutboxInbox(models.Model):
    """A received message, recorded so that an idempotent consumer acts on it only once."""

    id = models.BigAutoField(primary_key=True)
    source = ExactCharField(max_length=RECEIVED_LENGTHS["source"])
    message_id = ExactCharField(max_length=RECEIVED_LENGTHS["message_id"])
    received_at = UTCDateTimeField()

    objects = InboxQuerySet.as_manager()

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


class OutboxPause(models.Model):
    """What is paused, or a queue's open circuit breaker: its events wait, no attempt is counted."""

    class Kind(models.TextChoices):
        EVENT_TYPE = "event_type", _("event type")
        LISTENER = "listener", _("listener")
        STREAM = "stream", _("stream")
        QUEUE = "queue", _("queue")
        BREAKER = "breaker", _("circuit breaker")

    id = models.BigAutoField(primary_key=True)
    kind = ExactCharField(_("kind"), max_length=16, choices=Kind.choices)
    name = ExactCharField(_("name"), max_length=255)
    reason = ExactTextField(_("reason"), default="", blank=True)
    paused_at = UTCDateTimeField(_("paused at"))
    paused_by = ExactCharField(_("paused by"), max_length=255, default="", blank=True)
    until = UTCDateTimeField(_("until"), null=True, blank=True)  # of a breaker: its next probe
    pause_seconds = models.FloatField(null=True, blank=True)  # of a breaker; doubled by a probe

    objects = PauseQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_pause")
        verbose_name = _("outbox pause")
        verbose_name_plural = _("outbox pauses")
        default_permissions = ("view",)
        permissions = [
            ("pause_outboxpause", "Can pause delivery"),
            ("resume_outboxpause", "Can resume delivery"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["kind", "name"], name=index_name("outbox_pause_once"))
        ]

    def __str__(self) -> str:
        return f"{self.Kind(self.kind).label} {self.name}"
