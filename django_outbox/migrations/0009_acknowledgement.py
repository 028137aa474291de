"""Acknowledged causes; the name follows OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

import django_outbox.models.fields
from django.db import migrations

from django_outbox.conf import table_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0008_attempt")]

    operations = [
        migrations.CreateModel(
            name="OutboxAcknowledgement",
            fields=[
                (
                    "digest",
                    django_outbox.models.fields.ExactCharField(
                        max_length=32, primary_key=True, serialize=False
                    ),
                ),
                ("until", django_outbox.models.fields.UTCDateTimeField(verbose_name="until")),
                ("at", django_outbox.models.fields.UTCDateTimeField(verbose_name="at")),
                (
                    "by",
                    django_outbox.models.fields.ExactCharField(
                        default="", max_length=255, verbose_name="by"
                    ),
                ),
            ],
            options={
                "verbose_name": "acknowledged cause",
                "verbose_name_plural": "acknowledged causes",
                "db_table": table_name("outbox_acknowledgement"),
                "default_permissions": (),
            },
        )
    ]
