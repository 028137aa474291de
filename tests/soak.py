"""``python -m tests.soak``: a worker process under a steady load, looked at from outside.

It prints threads, descriptors, memory and database sessions as they were after a warm-up and at the
end, and exits 1 if one of them grew. The database is chosen as for the tests.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import django
import psutil

WARM_UP = 30  # seconds
PAUSE = 5  # seconds between two looks
SLACK = {"threads": 1, "descriptors": 5, "memory": 5 * 1024 * 1024, "sessions": 1}


@dataclass(frozen=True)
class Look:
    threads: int
    descriptors: int
    memory: int  # bytes
    sessions: int  # on the database server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, default=100, help="events a second")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()

    from django.db import connections
    from django.test.utils import setup_databases, teardown_databases

    from tests import databases

    made = setup_databases(verbosity=0, interactive=False)
    try:
        aliases = {alias: connections[alias].settings_dict for alias in connections}
        command = [sys.executable, "-m", "django", "outbox_worker", "--no-purge"]
        environment = {**os.environ, **databases.environment(aliases)}
        worker = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return soak(psutil.Process(worker.pid), options.seconds, options.rate)
        finally:
            worker.send_signal(signal.SIGTERM)
            print("worker exit code", worker.wait(timeout=30))
    finally:
        teardown_databases(made, verbosity=0)


def soak(worker: psutil.Process, seconds: float, rate: float) -> int:
    started, first, written = time.monotonic(), None, 0
    looks: list[Look] = []
    while (elapsed := time.monotonic() - started) < seconds:
        written += write(int(rate * PAUSE))
        rest = PAUSE - (time.monotonic() - started - elapsed)
        time.sleep(max(rest, 0))  # the load is steady, and looked at in between
        looks.append(look(worker))
        if first is None and elapsed > WARM_UP:
            first = looks[-1]
    assert first is not None, f"a soak takes more than {WARM_UP} s"
    print(f"{written} events in {seconds:.0f} s; pending at the end: {pending()}")
    return verdict(first, looks[-1])


def verdict(first: Look, last: Look) -> int:
    grown = 0
    for name, before in asdict(first).items():
        now = asdict(last)[name]
        grown += now > before + SLACK[name]
        print(f"{name:<12} {before:>12,} after the warm-up {now:>12,} at the end")
    return 1 if grown else 0


def write(count: int) -> int:
    from django.db import transaction

    import django_outbox as outbox

    for _ in range(count):
        with transaction.atomic():
            outbox.write("process.quick", {"text": "x" * 200})
    return count


def pending() -> int:
    from django_outbox.models import OutboxEvent

    return OutboxEvent.objects.pending().count()


def look(worker: psutil.Process) -> Look:
    from django_outbox.models import OutboxEvent

    OutboxEvent.objects.done().delete()
    return Look(
        threads=worker.num_threads(),
        descriptors=worker.num_fds(),
        memory=worker.memory_info().rss,
        sessions=sessions(),
    )


def sessions() -> int:
    from django.db import connection

    queries: dict[str, Any] = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
    }
    if connection.vendor not in queries:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(queries[connection.vendor])
        return int(cursor.fetchone()[0])


if __name__ == "__main__":
    sys.exit(main())
