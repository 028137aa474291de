"""Queues: where an event or a stream waits.

The new columns have a constant default, so that no row is rewritten. The indexes of version 0.1
stay, for its workers during the deploy.
"""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.models.fields import AddColumn


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0005_lease")]

    operations = [
        AddColumn(
            model_name="outboxevent",
            name="queue",
            field=django_outbox.models.fields.ExactCharField(
                db_default="default", default="default", max_length=64, verbose_name="queue"
            ),
        ),
        AddColumn(
            model_name="outboxstream",
            name="queue",
            field=django_outbox.models.fields.ExactCharField(
                db_default="default", default="default", max_length=64
            ),
        ),
        migrations.AddField(
            model_name="outboxpause",
            name="until",
            field=django_outbox.models.fields.UTCDateTimeField(
                blank=True, null=True, verbose_name="until"
            ),
        ),
        migrations.AddField(
            model_name="outboxpause",
            name="pause_seconds",
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AlterField(
            model_name="outboxpause",
            name="kind",
            field=django_outbox.models.fields.ExactCharField(
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
    ]
