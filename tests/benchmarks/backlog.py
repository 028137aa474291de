"""A backlog of events, written once and copied by the database itself from then on."""

from __future__ import annotations

from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent

PAYLOAD = {  # about 300 bytes as JSON
    "sku": "teapot",
    "quantity": 3,
    "address": {"street": "x" * 40, "zip": "12345"},
    "lines": [{"number": n, "text": f"item {n}", "price": 1.5} for n in range(4)],
}

TABLE = OutboxEvent._meta.db_table
COPY = "benchmark_backlog"
VACUUM = {"postgresql": "VACUUM ANALYZE {}", "sqlite": "ANALYZE {}", "mysql": "ANALYZE TABLE {}"}


class Backlog:
    """So many due events; ``fill`` makes the table hold them and nothing else."""

    def __init__(self, events: int, event_type: str = "benchmark.count") -> None:
        self.events = events
        empty()
        for start in range(0, events, 1000):
            with transaction.atomic():
                outbox.write_many(
                    outbox.Event(event_type=event_type, payload=PAYLOAD)
                    for _ in range(min(1000, events - start))
                )
        execute(f"DROP TABLE IF EXISTS {COPY}")
        execute(f"CREATE TABLE {COPY} AS SELECT * FROM {TABLE}")

    def fill(self) -> None:
        empty()
        execute(f"INSERT INTO {TABLE} SELECT * FROM {COPY} ORDER BY event_id")
        execute(VACUUM[connection.vendor].format(TABLE))


def empty() -> None:
    execute(f"DELETE FROM {TABLE}" if connection.vendor == "sqlite" else f"TRUNCATE {TABLE}")


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)
