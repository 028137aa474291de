"""The numbers of the dashboard; its columns of counts are as many as its buckets."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name, table_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="OutboxStatistics",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("span", models.IntegerField()),
                ("started_at", django_outbox.models.fields.UTCDateTimeField()),
                ("owner", django_outbox.models.fields.ExactCharField(max_length=128)),
                ("event_type", django_outbox.models.fields.ExactCharField(max_length=128)),
                ("done", models.IntegerField(default=0)),
                ("retry", models.IntegerField(default=0)),
                ("deferred", models.IntegerField(default=0)),
                ("dead", models.IntegerField(default=0)),
                ("rescued", models.IntegerField(default=0)),
                ("lag", models.FloatField(null=True)),
                *[(f"wait_{number}", models.IntegerField(default=0)) for number in range(17)],
                *[(f"run_{number}", models.IntegerField(default=0)) for number in range(17)],
            ],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "db_table": table_name("outbox_statistics"),
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        fields=["span", "started_at"], name=index_name("outbox_stats_time")
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("owner", "span", "started_at", "event_type"),
                        name=index_name("outbox_stats_once"),
                    )
                ],
            },
        )
    ]
