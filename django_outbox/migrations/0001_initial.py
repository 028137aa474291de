"""All tables of the outbox; names follow OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

from django.db import migrations, models

from django_outbox.conf import index_name, table_name
from django_outbox.models.fields import (
    ExactCharField,
    ExactTextField,
    PendingIndex,
    SmallIntegerField,
    UTCDateTimeField,
)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="OutboxLease",
            fields=[
                ("name", ExactCharField(max_length=64, primary_key=True)),
                ("locked_by", ExactCharField(max_length=128, null=True)),
                ("locked_until", UTCDateTimeField(null=True)),
                ("state", ExactTextField(null=True)),
            ],
            options={"db_table": table_name("outbox_lease"), "default_permissions": ()},
        ),
        migrations.CreateModel(
            name="OutboxWorker",
            fields=[
                ("id", ExactCharField(max_length=128, primary_key=True)),
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
                ("id", ExactCharField(max_length=49, primary_key=True)),
                ("event_id", ExactCharField(max_length=36)),
                ("listener", ExactCharField(max_length=255, null=True)),
                ("routes", ExactTextField(null=True)),
                ("event_type", ExactCharField(max_length=128)),
                (
                    "aggregate_type",
                    ExactCharField(db_default="__GLOBAL__", default="__GLOBAL__", max_length=64),
                ),
                ("aggregate_id", ExactCharField(max_length=128, null=True)),
                ("tenant_id", ExactCharField(max_length=64, null=True)),
                ("payload", ExactTextField()),
                ("headers", ExactTextField(null=True)),
                ("status", SmallIntegerField(db_default=0, default=0)),
                ("attempts", models.IntegerField("attempts", db_default=0, default=0)),
                ("rescues", SmallIntegerField(db_default=0, default=0)),
                ("occurred_at", UTCDateTimeField()),
                ("created_at", UTCDateTimeField()),
                ("deliver_at", UTCDateTimeField(null=True)),
                ("first_due_at", UTCDateTimeField(null=True)),
                ("available_at", UTCDateTimeField(null=True)),
                ("done_at", UTCDateTimeField(null=True)),
                ("last_error", ExactTextField(null=True)),
                ("cause", ExactCharField(max_length=200, null=True)),
                ("history", ExactTextField(null=True)),
                ("result", ExactTextField(null=True)),
                ("locked_by", ExactCharField(max_length=128, null=True)),
                ("locked_at", UTCDateTimeField(null=True)),
                ("key", ExactCharField(max_length=255, null=True)),
                ("stream", ExactCharField(max_length=320, null=True)),
                ("seq", models.BigIntegerField("seq", null=True)),
                ("unique_key", ExactCharField(max_length=255, null=True)),
                ("queue", ExactCharField(db_default="default", default="default", max_length=64)),
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
                        where=models.Q(available_at__isnull=False),
                    ),
                    PendingIndex(
                        fields=["available_at", "id"], name=index_name("outbox_event_due")
                    ),
                    PendingIndex(
                        fields=["stream", "seq"],
                        name=index_name("outbox_event_stream"),
                        plain_fields=("stream", "status", "seq"),
                        where=models.Q(status__in=[0, 2, 3], stream__isnull=False),
                    ),
                    PendingIndex(
                        fields=["unique_key"],
                        name=index_name("outbox_event_unique"),
                        unique=True,
                        where=models.Q(unique_key__isnull=False),
                    ),
                    PendingIndex(
                        fields=["id"],
                        name=index_name("outbox_event_dead"),
                        plain_fields=None,
                        where=models.Q(status=3),
                    ),
                    PendingIndex(
                        fields=["id"],
                        name=index_name("outbox_event_lost"),
                        plain_fields=None,
                        where=models.Q(rescues__gte=1),
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
                ("kind", ExactCharField(max_length=16)),
                ("state", ExactCharField(default="done", max_length=8)),
                ("about", ExactTextField(default="")),
                ("by", ExactCharField(default="", max_length=255)),
                ("started_at", UTCDateTimeField()),
                ("ended_at", UTCDateTimeField(null=True)),
                ("stopped_by", ExactCharField(default="", max_length=255)),
                ("filters", ExactTextField(null=True)),
                ("rate", ExactTextField(null=True)),
                ("limit", models.IntegerField("at most", null=True)),
                ("matched", models.IntegerField("matched", null=True)),
                ("done", models.IntegerField("deliveries", default=0)),
                ("skipped", models.IntegerField("skipped", default=0)),
                ("after", ExactCharField(default="", max_length=49)),
                ("next_at", UTCDateTimeField(null=True)),
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
                ("kind", ExactCharField(max_length=16)),
                ("name", ExactCharField(max_length=255)),
                ("reason", ExactTextField(default="")),
                ("paused_at", UTCDateTimeField()),
                ("paused_by", ExactCharField(default="", max_length=255)),
                ("until", UTCDateTimeField(null=True)),
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
                ("stream", ExactCharField(max_length=320, primary_key=True)),
                ("key", ExactCharField(max_length=255)),
                ("lane", ExactCharField(db_default="", default="", max_length=64)),
                ("seq", models.BigIntegerField()),
                ("due_at", UTCDateTimeField(null=True)),
                ("rescues", SmallIntegerField(db_default=0, default=0)),
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
                        where=models.Q(due_at__isnull=False),
                    ),
                    PendingIndex(fields=["due_at"], name=index_name("outbox_stream_due")),
                ],
            },
        ),
    ]
