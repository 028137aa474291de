"""All tables of the outbox; names follow OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name, table_name


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="OutboxLease",
            fields=[
                (
                    "name",
                    django_outbox.models.fields.ExactCharField(
                        max_length=64, primary_key=True, serialize=False
                    ),
                ),
                (
                    "locked_by",
                    django_outbox.models.fields.ExactCharField(max_length=128, null=True),
                ),
                ("locked_until", django_outbox.models.fields.UTCDateTimeField(null=True)),
                ("state", django_outbox.models.fields.ExactTextField(null=True)),
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
                (
                    "id",
                    django_outbox.models.fields.ExactCharField(
                        max_length=128, primary_key=True, serialize=False
                    ),
                ),
                ("hostname", django_outbox.models.fields.ExactCharField(max_length=255)),
                ("pid", models.IntegerField()),
                ("started_at", django_outbox.models.fields.UTCDateTimeField()),
                ("heartbeat_at", django_outbox.models.fields.UTCDateTimeField()),
                ("info", django_outbox.models.fields.ExactTextField(null=True)),
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
                (
                    "event_id",
                    django_outbox.models.fields.ExactCharField(
                        max_length=36, primary_key=True, serialize=False, verbose_name="event id"
                    ),
                ),
                (
                    "event_type",
                    django_outbox.models.fields.ExactCharField(
                        max_length=128, verbose_name="event type"
                    ),
                ),
                (
                    "aggregate_type",
                    django_outbox.models.fields.ExactCharField(
                        db_default="__GLOBAL__",
                        default="__GLOBAL__",
                        max_length=64,
                        verbose_name="aggregate type",
                    ),
                ),
                (
                    "aggregate_id",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=128, null=True, verbose_name="aggregate id"
                    ),
                ),
                (
                    "tenant_id",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=64, null=True, verbose_name="tenant id"
                    ),
                ),
                ("payload", django_outbox.models.fields.ExactTextField(verbose_name="payload")),
                (
                    "headers",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, null=True, verbose_name="headers"
                    ),
                ),
                (
                    "status",
                    models.SmallIntegerField(
                        choices=[(0, "new"), (1, "done"), (2, "retry"), (3, "dead")],
                        db_default=0,
                        default=0,
                        verbose_name="status",
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0, default=0, verbose_name="attempts")),
                (
                    "rescues",
                    models.SmallIntegerField(db_default=0, default=0, verbose_name="rescues"),
                ),
                (
                    "occurred_at",
                    django_outbox.models.fields.UTCDateTimeField(verbose_name="occurred at"),
                ),
                (
                    "created_at",
                    django_outbox.models.fields.UTCDateTimeField(verbose_name="created at"),
                ),
                (
                    "deliver_at",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="deliver at"
                    ),
                ),
                (
                    "first_due_at",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="first due at"
                    ),
                ),
                (
                    "available_at",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="due at"
                    ),
                ),
                (
                    "done_at",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="done at"
                    ),
                ),
                (
                    "last_error",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, null=True, verbose_name="last error"
                    ),
                ),
                (
                    "cause",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=200, null=True, verbose_name="cause"
                    ),
                ),
                (
                    "history",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, null=True, verbose_name="history"
                    ),
                ),
                (
                    "result",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, null=True, verbose_name="result"
                    ),
                ),
                (
                    "locked_by",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=128, null=True, verbose_name="locked by"
                    ),
                ),
                (
                    "locked_at",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="locked at"
                    ),
                ),
                (
                    "key",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=255, null=True, verbose_name="key"
                    ),
                ),
                ("seq", models.BigIntegerField(blank=True, null=True, verbose_name="seq")),
                (
                    "unique_key",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, max_length=255, null=True, verbose_name="unique key"
                    ),
                ),
                (
                    "progress",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, null=True, verbose_name="progress"
                    ),
                ),
                (
                    "queue",
                    django_outbox.models.fields.ExactCharField(
                        db_default="default", default="default", max_length=64, verbose_name="queue"
                    ),
                ),
            ],
            options={
                "verbose_name": "outbox event",
                "verbose_name_plural": "outbox events",
                "db_table": table_name("outbox_event"),
                "permissions": [
                    ("replay_outboxevent", "Can replay outbox events"),
                    ("discard_outboxevent", "Can discard outbox events"),
                ],
                "indexes": [
                    django_outbox.models.fields.PendingIndex(
                        fields=["queue", "available_at", "event_id"],
                        name=index_name("outbox_event_queue"),
                        plain_fields=(),
                        unique=False,
                        where=models.Q(("available_at__isnull", False)),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["available_at", "event_id"],
                        name=index_name("outbox_event_due"),
                        plain_fields=(),
                        unique=False,
                        where=models.Q(("available_at__isnull", False)),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["key", "seq"],
                        name=index_name("outbox_event_key"),
                        plain_fields=("key", "status", "seq"),
                        unique=False,
                        where=models.Q(("key__isnull", False), ("status__in", [0, 2, 3])),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["unique_key"],
                        name=index_name("outbox_event_unique"),
                        plain_fields=(),
                        unique=True,
                        where=models.Q(("unique_key__isnull", False)),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["event_id"],
                        name=index_name("outbox_event_dead"),
                        plain_fields=None,
                        unique=False,
                        where=models.Q(("status", 3)),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["event_id"],
                        name=index_name("outbox_event_lost"),
                        plain_fields=None,
                        unique=False,
                        where=models.Q(("rescues__gte", 1)),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxInbox",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("source", django_outbox.models.fields.ExactCharField(max_length=128)),
                ("message_id", django_outbox.models.fields.ExactCharField(max_length=255)),
                ("received_at", django_outbox.models.fields.UTCDateTimeField()),
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
            name="OutboxPause",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "kind",
                    django_outbox.models.fields.ExactCharField(
                        choices=[
                            ("event_type", "event type"),
                            ("listener", "listener"),
                            ("stream", "stream"),
                            ("queue", "queue"),
                            ("breaker", "circuit breaker"),
                        ],
                        max_length=16,
                        verbose_name="kind",
                    ),
                ),
                (
                    "name",
                    django_outbox.models.fields.ExactCharField(max_length=255, verbose_name="name"),
                ),
                (
                    "reason",
                    django_outbox.models.fields.ExactTextField(
                        blank=True, default="", verbose_name="reason"
                    ),
                ),
                (
                    "paused_at",
                    django_outbox.models.fields.UTCDateTimeField(verbose_name="paused at"),
                ),
                (
                    "paused_by",
                    django_outbox.models.fields.ExactCharField(
                        blank=True, default="", max_length=255, verbose_name="paused by"
                    ),
                ),
                (
                    "until",
                    django_outbox.models.fields.UTCDateTimeField(
                        blank=True, null=True, verbose_name="until"
                    ),
                ),
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
                ("started_at", django_outbox.models.fields.UTCDateTimeField()),
                ("owner", django_outbox.models.fields.ExactCharField(max_length=128)),
                ("event_type", django_outbox.models.fields.ExactCharField(max_length=128)),
                ("done", models.IntegerField(default=0)),
                ("retry", models.IntegerField(default=0)),
                ("dead", models.IntegerField(default=0)),
                ("rescued", models.IntegerField(default=0)),
                ("wait_0", models.IntegerField(default=0)),
                ("wait_1", models.IntegerField(default=0)),
                ("wait_2", models.IntegerField(default=0)),
                ("wait_3", models.IntegerField(default=0)),
                ("wait_4", models.IntegerField(default=0)),
                ("wait_5", models.IntegerField(default=0)),
                ("wait_6", models.IntegerField(default=0)),
                ("wait_7", models.IntegerField(default=0)),
                ("wait_8", models.IntegerField(default=0)),
                ("wait_9", models.IntegerField(default=0)),
                ("wait_10", models.IntegerField(default=0)),
                ("wait_11", models.IntegerField(default=0)),
                ("wait_12", models.IntegerField(default=0)),
                ("wait_13", models.IntegerField(default=0)),
                ("wait_14", models.IntegerField(default=0)),
                ("wait_15", models.IntegerField(default=0)),
                ("wait_16", models.IntegerField(default=0)),
                ("run_0", models.IntegerField(default=0)),
                ("run_1", models.IntegerField(default=0)),
                ("run_2", models.IntegerField(default=0)),
                ("run_3", models.IntegerField(default=0)),
                ("run_4", models.IntegerField(default=0)),
                ("run_5", models.IntegerField(default=0)),
                ("run_6", models.IntegerField(default=0)),
                ("run_7", models.IntegerField(default=0)),
                ("run_8", models.IntegerField(default=0)),
                ("run_9", models.IntegerField(default=0)),
                ("run_10", models.IntegerField(default=0)),
                ("run_11", models.IntegerField(default=0)),
                ("run_12", models.IntegerField(default=0)),
                ("run_13", models.IntegerField(default=0)),
                ("run_14", models.IntegerField(default=0)),
                ("run_15", models.IntegerField(default=0)),
                ("run_16", models.IntegerField(default=0)),
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
                        fields=("owner", "started_at", "event_type"),
                        name=index_name("outbox_stats_once"),
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxStream",
            fields=[
                (
                    "key",
                    django_outbox.models.fields.ExactCharField(
                        max_length=255, primary_key=True, serialize=False
                    ),
                ),
                ("seq", models.BigIntegerField()),
                ("due_at", django_outbox.models.fields.UTCDateTimeField(null=True)),
                (
                    "locked_by",
                    django_outbox.models.fields.ExactCharField(max_length=128, null=True),
                ),
                ("locked_at", django_outbox.models.fields.UTCDateTimeField(null=True)),
                (
                    "queue",
                    django_outbox.models.fields.ExactCharField(
                        db_default="default", default="default", max_length=64
                    ),
                ),
            ],
            options={
                "verbose_name": "outbox stream",
                "verbose_name_plural": "outbox streams",
                "db_table": table_name("outbox_stream"),
                "indexes": [
                    django_outbox.models.fields.PendingIndex(
                        fields=["queue", "due_at"],
                        name=index_name("outbox_stream_queue"),
                        plain_fields=(),
                        unique=False,
                        where=models.Q(("due_at__isnull", False)),
                    ),
                    django_outbox.models.fields.PendingIndex(
                        fields=["due_at"],
                        name=index_name("outbox_stream_due"),
                        plain_fields=(),
                        unique=False,
                        where=models.Q(("due_at__isnull", False)),
                    ),
                ],
            },
        ),
    ]
