"""What only time shows: what grows, and what an open snapshot keeps from being cleaned up."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from django.db import connection

from django_outbox import Worker
from django_outbox.models import OutboxEvent
from tests.faults import oracle
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, SERVERS, scenario
from tests.sessions import sessions
from tests.waiting import wait_until


# Row W20.
@scenario(*ALL)
def leaks(rig: Rig) -> None:
    """A worker under a steady load leaks no threads, files, memory or sessions."""
    rig.environment |= {"PYTHONWARNINGS": "always::ResourceWarning"}
    rig.outbox |= {"RETENTION_DONE": 5.0, "PURGE_INTERVAL": 1.0}
    rig.purges = True
    warm, lasts = rig.pick(ci=(3.0, 3.0), full=(60.0, 3600.0))
    rate = rig.pick(ci=60, full=100)
    rig.start_workers(1)
    rig.wait_until_they_run()
    rig.start_writers(
        1, events=int(rate * (warm + lasts)), rate=rate, keys=20, keyed=0.3, fail=0.05
    )
    time.sleep(warm)  # until every thread has its connection
    before, memory = held(rig.workers[0]), rig.workers[0].memory_info().rss
    time.sleep(lasts)  # how long the load lasts
    after = held(rig.workers[0])
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    for what, number in after.items():
        rig.measure(f"{what} after the warm-up", before[what])
        rig.measure(f"{what} more at the end", number - before[what], most=5)
    growth = rig.workers[0].memory_info().rss / memory - 1
    rig.measure("memory that grew, part", growth, most=0.05, timed=True)
    rig.stop_workers()
    rig.measure("resources left open", len(rig.logged("ResourceWarning")), most=0)
    start_and_stop(rig, rig.pick(ci=5, full=1000))


def held(process: psutil.Process) -> dict[str, int]:
    return {"threads": process.num_threads(), "files": process.num_fds(), "sessions": sessions()}


def start_and_stop(rig: Rig, times: int) -> None:
    """Start a worker in this process and stop it, again and again."""
    logging.getLogger("django_outbox").setLevel(logging.WARNING)
    for _ in range(3):  # what the first ones import and open stays
        with Worker():
            pass
    before = held(psutil.Process())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(times):
            with Worker():
                pass
        gc.collect()
    left_open = sum(issubclass(each.category, ResourceWarning) for each in told)
    rig.measure(f"things not closed in {times} starts and stops", left_open, most=0)
    for what, number in held(psutil.Process()).items():
        more = number - before[what]
        rig.measure(f"{what} more after {times} starts and stops", more, most=2)


# Rows W20, W21, X11.
@scenario(*SERVERS)
def bloat(rig: Rig) -> None:
    """A snapshot stays open for long while events are delivered and purged.

    Keys are as many as a shop has orders. A key that is written to all the time becomes slow on
    PostgreSQL: whoever looks for its stream's row passes by every version since the snapshot.
    """
    rig.outbox |= {"RETENTION_DONE": 2.0, "PURGE_INTERVAL": 1.0, "PURGE_BATCH_SIZE": 5000}
    rig.purges = True
    steady, open_for, after = rig.pick(ci=(2.0, 2.0, 2.0), full=(700.0, 1200.0, 600.0))
    rate = rig.pick(ci=150, full=400)
    rig.start_workers(2)
    rig.wait_until_they_run()
    whole = steady + open_for + after
    rig.start_writers(4, events=int(rate * whole), rate=rate, keys=5000, keyed=0.3)
    rig.wait_for_delivery()
    began = time.monotonic()
    time.sleep(steady)
    size, opened = table_size(), time.monotonic()
    with rig.fault("snapshot"), snapshot():
        time.sleep(open_for)
        swollen = table_size()
    closed = time.monotonic()
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    wait_until(lambda: not OutboxEvent.objects.exists(), within=120, what="a purge of all")
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    spans = ((began, opened), (opened, closed), (closed + after / 2, closed + 10 * after))
    waits = [slow(evidence, runs, *span) for span in spans]
    first = waits[0] or 0.001
    rig.measure("table while the snapshot is open, times its size", swollen / size)
    rig.measure("table at the end, times its size", table_size() / size)
    # Files stay as large as they became; the room in them is used again.
    rig.measure("the same, times what it was then", table_size() / swollen, most=1.1, timed=True)
    rig.measure("99 % of the waits before it, s", waits[0])
    rig.measure("the same meanwhile, times", (waits[1] or 0) / first, most=3, timed=True)
    rig.measure("the same some time later, times", (waits[2] or 0) / first, most=1.5, timed=True)


@contextmanager
def snapshot() -> Iterator[None]:
    """A session that has read something and does not end its transaction."""
    own = connection.copy()
    with own.cursor() as cursor:
        if own.vendor == "postgresql":
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        else:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        cursor.execute("SELECT count(*) FROM outbox_event")
    try:
        yield
    finally:
        own.close()


def table_size() -> int:
    """The bytes of the event table and its indexes."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_total_relation_size('outbox_event')")
        else:
            cursor.execute("ANALYZE TABLE outbox_event")
            cursor.execute(
                "SELECT data_length + index_length FROM information_schema.tables "
                "WHERE table_schema = database() AND table_name = 'outbox_event'"
            )
        return int(cursor.fetchone()[0])


def slow(
    evidence: oracle.Evidence, runs: dict[str, list[oracle.Run]], since: float, until: float
) -> float | None:
    """The wait that 99 of 100 events written in that time did not exceed."""
    waits = sorted(
        each[0].start - evidence.intents[event_id].at
        for event_id, each in runs.items()
        if event_id in evidence.intents and since <= evidence.intents[event_id].at < until
    )
    return oracle.percentile(waits, 0.99)
