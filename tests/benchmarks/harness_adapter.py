"""``python -m tests.benchmarks.harness_adapter``: an adapter for a public harness of job queues.

The harness, hardbyte/postgresql-job-queue-benchmarking, starts one process for each system, kills
it, breaks its database, and reads what it reports: one JSON object a line on standard output. As
the others do there, this process writes jobs at a fixed rate and works them off itself. It reads
its orders from the environment: ``DATABASE_URL``, ``PRODUCER_RATE``, ``WORKER_COUNT`` and so on.
``PRODUCER_PACING=local`` is the pacing that it knows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import django
from django.core.management import call_command
from django.db import Error, connection, transaction

import django_outbox as outbox

from .figures import percentile

SYSTEM, JOB = "django_outbox", "harness.job"
TABLES = ["public.outbox_event", "public.outbox_stream"]
WINDOW = 30.0  # seconds that a percentile covers
IDLE = 0.1  # seconds
RETRY = 0.2  # seconds after an error of the database


def number(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


class Adapter:
    """A producer, a worker, and a sampler."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.instance = number("BENCH_INSTANCE_ID", 0)
        self.every = number("SAMPLE_EVERY_S", 5)  # seconds between two samples
        self.work = number("JOB_WORK_MS", 1) / 1000
        self.batch = number("PRODUCER_BATCH_MAX", 1)
        self.pause = number("PRODUCER_BATCH_MS", 10) / 1000
        self.padding = "x" * number("JOB_PAYLOAD_BYTES", 256)
        self.rate = float(number("PRODUCER_RATE", 800))
        self.enqueued = self.completed = 0
        self.counting = threading.Lock()
        self.latencies: deque[tuple[float, float]] = deque(maxlen=32_768)  # when; milliseconds

    # -- jobs ------------------------------------------------------------------------------------

    def job(self, event: outbox.Event) -> None:
        now = time.time()
        self.latencies.append((now, 1000 * (now - event.payload["at"])))
        if self.work:
            time.sleep(self.work)  # the job's work
        with self.counting:
            self.completed += 1

    def produce(self) -> None:
        """Write at the rate, by the time that has really passed, until told to stop."""
        credit, last = 0.0, time.monotonic()
        while not self.stopping.wait(self.pause):
            self.rate, now = self.read_rate(), time.monotonic()
            credit, last = credit + self.rate * (now - last), now
            while credit >= 1 and not self.stopping.is_set():
                count = min(self.batch, int(credit))
                try:
                    self.write(count)
                except Error as error:
                    print(f"the producer failed: {error}", file=sys.stderr)
                    connection.close()
                    self.stopping.wait(RETRY)
                else:
                    credit -= count
                    self.enqueued += count

    def read_rate(self) -> float:
        """Return the rate, which the harness raises by a file in some phases."""
        with suppress(KeyError, OSError, ValueError):
            return float(Path(os.environ["PRODUCER_RATE_CONTROL_FILE"]).read_text())
        return self.rate

    def write(self, count: int) -> None:
        payload = {"at": time.time(), "padding": self.padding}
        with transaction.atomic():
            if count == 1:
                outbox.write(JOB, payload)
            else:
                outbox.write_many(
                    [outbox.Event(event_type=JOB, payload=payload) for _ in range(count)]
                )

    # -- reports ---------------------------------------------------------------------------------

    def describe(self) -> None:
        say(
            {
                "kind": "descriptor",
                "system": SYSTEM,
                "event_tables": TABLES,
                "extensions": [],
                "version": outbox.__version__,
                "schema_version": "current",
                "db_name": connection.settings_dict["NAME"],
                "started_at": clock(),
                "instance_id": self.instance,
            }
        )

    def sample(self) -> None:
        """Report at whole multiples of the interval, so that all systems' samples line up."""
        self.stopping.wait(self.every - time.time() % self.every)
        before, last = (self.enqueued, self.completed), time.monotonic()
        while not self.stopping.wait(self.every - time.time() % self.every or self.every):
            now, counts = time.monotonic(), (self.enqueued, self.completed)
            enqueued, completed = (
                (new - old) / (now - last) for new, old in zip(counts, before, strict=True)
            )
            before, last = counts, now
            since = time.time() - WINDOW
            recent = [each for at, each in [*self.latencies] if at >= since] or [0.0]
            self.report("enqueue_rate", enqueued, self.every)
            self.report("completion_rate", completed, self.every)
            for percent in (50, 95, 99):
                self.report(f"claim_p{percent}_ms", percentile(recent, percent), WINDOW)
            if self.instance == 0:  # the others would report the same
                self.report("producer_target_rate", self.rate, 0)
                with suppress(Error):
                    self.report("queue_depth", waiting(), 0)

    def report(self, metric: str, value: float, window: float) -> None:
        say(
            {
                "t": clock(),
                "system": SYSTEM,
                "kind": "adapter",
                "subject_kind": "adapter",
                "subject": "",
                "metric": metric,
                "value": value,
                "window_s": window,
                "instance_id": self.instance,
            }
        )

    def run(self) -> None:
        outbox.listener(JOB)(self.job)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: self.stopping.set())
        migrate()
        self.describe()
        threads = [threading.Thread(target=closing(each)) for each in (self.produce, self.sample)]
        with outbox.Worker():
            for thread in threads:
                thread.start()
            while not self.stopping.wait(IDLE):
                pass
            for thread in threads:
                thread.join()


def waiting() -> int:
    """Return how many jobs are due and not claimed."""
    from django_outbox.models import OutboxEvent

    try:
        return OutboxEvent.objects.pending().filter(locked_by=None).count()
    except Error:
        connection.close()
        raise


def migrate() -> None:
    """Make the tables; of several processes that start at once, the first one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(77)")
        try:
            call_command("migrate", "django_outbox", verbosity=0)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(77)")


def closing(work: Callable[[], None]) -> Callable[[], None]:
    """Return a thread's function that closes its connection at the end."""

    def run() -> None:
        try:
            work()
        finally:
            connection.close()

    return run


def say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def clock() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.benchmarks.settings")
    os.environ.setdefault("OUTBOX_TEST_DB", "postgres")
    workers = {"WORKERS": number("WORKER_COUNT", 32)}
    os.environ.setdefault("OUTBOX_BENCH_SETTINGS", json.dumps(workers))
    django.setup()
    Adapter().run()
