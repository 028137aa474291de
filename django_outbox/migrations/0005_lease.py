"""Who purges; the name follows OUTBOX["TABLE_PREFIX"] and OUTBOX["SCHEMA"]."""

import django_outbox.models.fields
from django.db import migrations

from django_outbox.conf import table_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0004_pause")]

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
        )
    ]
