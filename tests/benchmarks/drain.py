"""Drain of a backlog: one worker with default settings beside the same statements on the driver."""

from __future__ import annotations

import threading
import time

from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent

from . import raw

PAYLOAD = {  # about 300 bytes as JSON
    "sku": "teapot",
    "quantity": 3,
    "address": {"street": "x" * 40, "zip": "12345"},
    "lines": [{"number": n, "text": f"item {n}", "price": 1.5} for n in range(5)],
}
EVENT_TYPE = "benchmark.drain"


def run(events: int, repeats: int) -> dict[str, list[float]]:
    """Return events per second of both, in pairs: reference, worker, reference, worker …"""
    figures: dict[str, list[float]] = {"reference": [], "worker": []}
    for _ in range(repeats):
        fill(events)
        figures["reference"].append(raw.drain(events))
        fill(events)
        figures["worker"].append(drain_by_worker(events))
    return figures


def fill(events: int) -> None:
    """Empty the table and write a backlog."""
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {OutboxEvent._meta.db_table}")
    for start in range(0, events, 1000):
        with transaction.atomic():
            outbox.write_many(
                outbox.Event(event_type=EVENT_TYPE, payload=PAYLOAD)
                for _ in range(min(1000, events - start))
            )
    with connection.cursor() as cursor:
        vacuum = {"postgresql": "VACUUM ANALYZE outbox_event", "sqlite": "ANALYZE"}
        cursor.execute(vacuum.get(connection.vendor, "ANALYZE TABLE outbox_event"))


def drain_by_worker(events: int) -> float:
    """Start a worker and take the rate between the first and the last hundredth of the backlog."""
    marks: dict[int, float] = {}
    seen, lock, over = [0], threading.Lock(), threading.Event()

    def listen(event: outbox.Event) -> None:
        with lock:
            seen[0] += 1
            if seen[0] in (events // 100, events - events // 100):
                marks[seen[0]] = time.perf_counter()
            if seen[0] == events:
                over.set()

    registered = outbox.listener(EVENT_TYPE)(listen)
    worker = outbox.Worker(purge=False)
    try:
        worker.start()
        if not over.wait(300):
            raise TimeoutError(f"{seen[0]} of {events} events were delivered in 300 s")
    finally:
        worker.stop()
        from django_outbox import registry

        registry.remove(registered)
    left, right = sorted(marks)
    return (right - left) / (marks[right] - marks[left])
