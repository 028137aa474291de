"""The indexes of due rows by queue; on PostgreSQL, they are created while writers go on."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name
from django_outbox.models.fields import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False  # PostgreSQL creates no index concurrently inside a transaction

    dependencies = [("django_outbox", "0006_queues")]

    operations = [
        AddIndexConcurrently(
            model_name="outboxevent",
            index=django_outbox.models.fields.PendingIndex(
                fields=["queue", "available_at", "event_id"],
                name=index_name("outbox_event_queue"),
                where=models.Q(("available_at__isnull", False)),
            ),
        ),
        AddIndexConcurrently(
            model_name="outboxstream",
            index=django_outbox.models.fields.PendingIndex(
                fields=["queue", "due_at"],
                name=index_name("outbox_stream_queue"),
                where=models.Q(("due_at__isnull", False)),
            ),
        ),
    ]
