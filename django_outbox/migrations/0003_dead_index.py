"""Dead events are found without reading the table; nearly free, for few events are dead."""

import django_outbox.models.fields
from django.db import migrations, models

from django_outbox.conf import index_name


class Migration(migrations.Migration):
    dependencies = [("django_outbox", "0002_statistics")]

    operations = [
        migrations.AddIndex(
            model_name="outboxevent",
            index=django_outbox.models.fields.PendingIndex(
                fields=["event_id"],
                name=index_name("outbox_event_dead"),
                plain_fields=None,
                where=models.Q(("status", 3)),
            ),
        )
    ]
