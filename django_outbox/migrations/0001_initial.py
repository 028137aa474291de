"""All tables of the outbox; names follow OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

from django.db import migrations, models

from django_outbox.conf import index_name, table_name
from django_outbox.models.fields import (
    ExactCharField,
    ExactTextField,
    PendingIndex,
    UTCDateTimeField,
)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="OutboxLease",
            fields=[
                ("name", ExactCharField(max_length=64, primary_key=True, serialize=False)),
                ("locked_by", ExactCharField(max_length=128, null=True)),
                ("locked_until", UTCDateTimeField(null=True)),
                ("state", ExactTextField(null=True)),
            ],
            options={
                "verbose_name": "outbox lease",
                "db_table": table_name("outbox_lease"),
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="OutboxWorker",
            fields=[
                ("id", ExactCharField(max_length=128, primary_key=True, serialize=False)),
                ("hostname", ExactCharField(max_length=255)),
                ("pid", models.IntegerField()),
                ("started_at", UTCDateTimeField()),
                ("heartbeat_at", UTCDateTimeField()),
                ("info", ExactTextField(null=True)),
            ],
            options={
                "verbose_name": "outbox worker",
                "verbose_name_plural": "outbox workers",
                "db_table": table_name("outbox_worker"),
            },
        ),
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[
                ("id", ExactCharField(max_length=49, primary_key=True, serialize=False)),
                ("event_id", ExactCharField("event id", max_length=36)),
                ("listener", ExactCharField("listener", blank=True, max_length=255, null=True)),
                ("routes", ExactTextField("routes", blank=True, null=True)),
                ("event_type", ExactCharField("event type", max_length=128)),
                (
                    "aggregate_type",
                    ExactCharField(
                        "aggregate type",
                        db_default="__GLOBAL__",
                        default="__GLOBAL__",
                        max_length=64,
                    ),
                ),
                (
                    "aggregate_id",
                    ExactCharField("aggregate id", blank=True, max_length=128, null=True),
                ),
                ("tenant_id", ExactCharField("tenant id", blank=True, max_length=64, null=True)),
                ("payload", ExactTextField("payload")),
                ("headers", ExactTextField("headers", blank=True, null=True)),
                (
                    "status",
                    models.SmallIntegerField(
                        "status",
                        choices=[(0, "new"), (1, "done"), (2, "retry"), (3, "dead")],
                        db_default=0,
                        default=0,
                    ),
                ),
                ("attempts", models.IntegerField("attempts", db_default=0, default=0)),
                ("rescues", models.SmallIntegerField("rescues", db_default=0, default=0)),
                ("occurred_at", UTCDateTimeField("occurred at")),
                ("created_at", UTCDateTimeField("created at")),
                ("deliver_at", UTCDateTimeField("deliver at", blank=True, null=True)),
                ("first_due_at", UTCDateTimeField("first due at", blank=True, null=True)),
                ("available_at", UTCDateTimeField("due at", blank=True, null=True)),
                ("done_at", UTCDateTimeField("done at", blank=True, null=True)),
                ("last_error", ExactTextField("last error", blank=True, null=True)),
                ("cause", ExactCharField("cause", blank=True, max_length=200, null=True)),
                ("history", ExactTextField("history", blank=True, null=True)),
                ("result", ExactTextField("result", blank=True, null=True)),
                ("locked_by", ExactCharField("locked by", blank=True, max_length=128, null=True)),
                ("locked_at", UTCDateTimeField("locked at", blank=True, null=True)),
                ("key", ExactCharField("key", blank=True, max_length=255, null=True)),
                ("stream", ExactCharField("stream", blank=True, max_length=320, null=True)),
                ("seq", models.BigIntegerField("seq", blank=True, null=True)),
                ("unique_key", ExactCharField("unique key", blank=True, max_length=255, null=True)),
                (
                    "queue",
                    ExactCharField("queue", db_default="default", default="default", max_length=64),
                ),
            ],
            options={
                "verbose_name": "outbox delivery",
                "verbose_name_plural": "outbox deliveries",
                "db_table": table_name("outbox_event"),
                "permissions": [
                    ("replay_outboxevent", "Can replay outbox deliveries"),
                    ("discard_outboxevent", "Can discard outbox deliveries"),
                ],
                "indexes": [
                    PendingIndex(
                        fields=["queue", "available_at", "id"],
                        name=index_name("outbox_event_queue"),
                        where=models.Q(("available_at__isnull", False)),
                    ),
                    PendingIndex(
                        fields=["available_at", "id"],
                        name=index_name("outbox_event_due"),
                        where=None,
                    ),
                    PendingIndex(
                        fields=["stream", "seq"],
                        name=index_name("outbox_event_stream"),
                        plain_fields=("stream", "status", "seq"),
                        where=models.Q(("status__in", [0, 2, 3]), ("stream__isnull", False)),
                    ),
                    PendingIndex(
                        fields=["unique_key"],
                        name=index_name("outbox_event_unique"),
                        unique=True,
                        where=models.Q(("unique_key__isnull", False)),
                    ),
                    PendingIndex(
                        fields=["id"],
                        name=index_name("outbox_event_dead"),
                        plain_fields=None,
                        where=models.Q(("status", 3)),
                    ),
                    PendingIndex(
                        fields=["id"],
                        name=index_name("outbox_event_lost"),
                        plain_fields=None,
                        where=models.Q(("rescues__gte", 1)),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxInbox",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("source", ExactCharField(max_length=128)),
                ("message_id", ExactCharField(max_length=255)),
                ("received_at", UTCDateTimeField()),
            ],
            options={
                "verbose_name": "received message",
                "verbose_name_plural": "received messages",
                "db_table": table_name("outbox_inbox"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("source", "message_id"), name=index_name("outbox_inbox_once")
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxOperation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "kind",
                    ExactCharField(
                        "what",
                        choices=[
                            ("replay", "replay"),
                            ("discard", "discard"),
                            ("run_now", "run now"),
                            ("skip", "skip"),
                            ("cancel", "cancel"),
                            ("reschedule", "reschedule"),
                            ("release", "release"),
                            ("deliver_to", "give to a listener"),
                            ("pause", "pause"),
                            ("resume", "resume"),
                            ("breaker_opened", "circuit breaker opened"),
                            ("breaker_closed", "circuit breaker closed"),
                        ],
                        max_length=16,
                    ),
                ),
                (
                    "state",
                    ExactCharField(
                        "state",
                        choices=[("open", "running"), ("done", "done"), ("stopped", "stopped")],
                        default="done",
                        max_length=8,
                    ),
                ),
                ("about", ExactTextField("of what", blank=True, default="")),
                ("by", ExactCharField("by", blank=True, default="", max_length=255)),
                ("started_at", UTCDateTimeField("began")),
                ("ended_at", UTCDateTimeField("ended", blank=True, null=True)),
                (
                    "stopped_by",
                    ExactCharField("stopped by", blank=True, default="", max_length=255),
                ),
                ("filters", ExactTextField(blank=True, null=True)),
                ("rate", ExactTextField("rate", blank=True, null=True)),
                ("limit", models.IntegerField("at most", blank=True, null=True)),
                ("matched", models.IntegerField("matched", blank=True, null=True)),
                ("done", models.IntegerField("deliveries", default=0)),
                ("skipped", models.IntegerField("skipped", default=0)),
                ("after", ExactCharField(blank=True, default="", max_length=49)),
                ("next_at", UTCDateTimeField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "outbox operation",
                "verbose_name_plural": "outbox operations",
                "db_table": table_name("outbox_operation"),
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["state"], name=index_name("outbox_operation_open")),
                    models.Index(fields=["started_at"], name=index_name("outbox_operation_time")),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxPause",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "kind",
                    ExactCharField(
                        "kind",
                        choices=[
                            ("event_type", "event type"),
                            ("listener", "listener"),
                            ("stream", "stream"),
                            ("queue", "queue"),
                            ("breaker", "circuit breaker"),
                        ],
                        max_length=16,
                    ),
                ),
                ("name", ExactCharField("name", max_length=255)),
                ("reason", ExactTextField("reason", blank=True, default="")),
                ("paused_at", UTCDateTimeField("paused at")),
                ("paused_by", ExactCharField("paused by", blank=True, default="", max_length=255)),
                ("until", UTCDateTimeField("until", blank=True, null=True)),
                ("pause_seconds", models.FloatField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "outbox pause",
                "verbose_name_plural": "outbox pauses",
                "db_table": table_name("outbox_pause"),
                "permissions": [
                    ("pause_outboxpause", "Can pause delivery"),
                    ("resume_outboxpause", "Can resume delivery"),
                ],
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("kind", "name"), name=index_name("outbox_pause_once")
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxStatistics",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("started_at", UTCDateTimeField()),
                ("owner", ExactCharField(max_length=128)),
                ("listener", ExactCharField(max_length=255)),
                ("done", models.IntegerField(default=0)),
                ("retry", models.IntegerField(default=0)),
                ("dead", models.IntegerField(default=0)),
                ("rescued", models.IntegerField(default=0)),
                ("run_ms", models.BigIntegerField(default=0)),
                *(
                    (f"{kind}_{number}", models.IntegerField(default=0))
                    for kind in ("wait", "run")
                    for number in range(17)
                ),
            ],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "db_table": table_name("outbox_statistics"),
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["started_at"], name=index_name("outbox_stats_time"))
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("owner", "started_at", "listener"),
                        name=index_name("outbox_stats_once"),
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxStream",
            fields=[
                ("stream", ExactCharField(max_length=320, primary_key=True, serialize=False)),
                ("key", ExactCharField(max_length=255)),
                ("lane", ExactCharField(db_default="", default="", max_length=64)),
                ("seq", models.BigIntegerField()),
                ("due_at", UTCDateTimeField(null=True)),
                ("rescues", models.SmallIntegerField(db_default=0, default=0)),
                ("locked_by", ExactCharField(max_length=128, null=True)),
                ("locked_at", UTCDateTimeField(null=True)),
                ("queue", ExactCharField(db_default="default", default="default", max_length=64)),
            ],
            options={
                "verbose_name": "outbox stream",
                "verbose_name_plural": "outbox streams",
                "db_table": table_name("outbox_stream"),
                "indexes": [
                    PendingIndex(
                        fields=["queue", "due_at"],
                        name=index_name("outbox_stream_queue"),
                        where=models.Q(("due_at__isnull", False)),
                    ),
                    PendingIndex(
                        fields=["due_at"], name=index_name("outbox_stream_due"), where=None
                    ),
                ],
            },
        ),
    ]
