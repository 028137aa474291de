"""What is paused; the name follows OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name, table_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0003_dead_index")]

    operations = [
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
            ],
            options={
                "verbose_name": "outbox pause",
                "verbose_name_plural": "outbox pauses",
                "db_table": table_name("outbox_pause"),
                "default_permissions": ("view",),
                "permissions": [
                    ("pause_outboxpause", "Can pause delivery"),
                    ("resume_outboxpause", "Can resume delivery"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("kind", "name"), name=index_name("outbox_pause_once")
                    )
                ],
            },
        )
    ]
