"""History of attempts; the name follows OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name, table_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0007_queue_indexes")]

    operations = [
        migrations.CreateModel(
            name="OutboxAttempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("event_id", django_outbox.models.fields.ExactCharField(max_length=36)),
                ("at", django_outbox.models.fields.UTCDateTimeField(verbose_name="at")),
                (
                    "kind",
                    django_outbox.models.fields.ExactCharField(
                        choices=[
                            ("failed", "failed"),
                            ("dead", "died"),
                            ("lost", "worker lost"),
                            ("replayed", "replayed"),
                        ],
                        max_length=16,
                        verbose_name="kind",
                    ),
                ),
                ("number", models.IntegerField(default=0, verbose_name="number")),
                (
                    "by",
                    django_outbox.models.fields.ExactCharField(
                        default="", max_length=255, verbose_name="by"
                    ),
                ),
                (
                    "listener",
                    django_outbox.models.fields.ExactTextField(default="", verbose_name="listener"),
                ),
                ("milliseconds", models.IntegerField(null=True, verbose_name="milliseconds")),
                (
                    "error",
                    django_outbox.models.fields.ExactTextField(default="", verbose_name="error"),
                ),
            ],
            options={
                "verbose_name": "outbox attempt",
                "verbose_name_plural": "outbox attempts",
                "db_table": table_name("outbox_attempt"),
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["event_id", "id"], name=index_name("outbox_attempt_event"))
                ],
            },
        )
    ]
