"""Statistics for the dashboard: counted exactly, written alongside deliveries, and purged."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox.listeners.outcomes import DONE
from django_outbox.models import OutboxEvent, OutboxStatistics, OutboxWorker, live_workers
from django_outbox.models.statistics import OUTCOMES, RUN_COLUMNS, WAIT_COLUMNS, bucket
from django_outbox.worker import heartbeat
from django_outbox.worker.effects import perform
from django_outbox.worker.heartbeat import Statistics
from tests.fleet import Fleet
from tests.plans import analyze, large_steps
from tests.table import (
    PLACED,
    claimed,
    events_of,
    in_thread,
    insert,
    keyed,
    listening,
    now,
    purging,
    steal,
    write,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1}
COUNTED = (*OUTCOMES, "rescued")


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **SOON)
    try:
        yield fleet
    finally:
        fleet.kill_all()


def summed(**only: Any) -> dict[str, int]:
    """Return the summed counts of all rows, without zeros."""
    rows = OutboxStatistics.objects.filter(**only)
    found = rows.aggregate(**{name: Sum(name) for name in COUNTED})
    return {name: count for name, count in found.items() if count}


def spread(names: tuple[str, ...], **only: Any) -> list[int]:
    rows = OutboxStatistics.objects.filter(**only)
    found = rows.aggregate(**{name: Sum(name) for name in names})
    return [found[name] for name in names]


def settled() -> bool:
    return not OutboxEvent.objects.pending().exists()


def row_at(age: timedelta, **columns: Any) -> OutboxStatistics:
    given = {"owner": "me", "listener": PLACED, **columns}
    return OutboxStatistics.objects.create(started_at=now() - age, **given)


# --- counting -------------------------------------------------------------------------------------


def test_41_every_outcome_is_counted_once() -> None:
    answers = {
        "done": outbox.Done(),
        "retry": ValueError("no"),
        "dead": outbox.Dead("no"),
        "deferred": outbox.Defer(60),
    }

    def answer(event: outbox.Event) -> Any:
        found = answers[event.payload["answer"]]
        if isinstance(found, Exception):
            raise found
        return found

    with listening(answer, retry=outbox.Fixed(delay=60)):
        for count, name in enumerate(answers, start=1):
            for _ in range(count):
                write(payload={"answer": name})
        with outbox.Worker():
            soon = OutboxEvent.objects.filter(available_at__lte=now() + timedelta(seconds=45))
            wait_until(lambda: not soon.exists())  # neither due nor leased
    assert summed() == {"done": 1, "retry": 2, "dead": 3}
    assert summed(listener=PLACED) == summed()
    assert sum(spread(WAIT_COLUMNS)) == sum(spread(RUN_COLUMNS)) == 6


def test_41_waits_and_runs_are_measured_on_the_database_s_clock() -> None:
    insert(3, due=-20)
    keyed("k", 2)
    OutboxEvent.objects.filter(key="k").update(first_due_at=now() - timedelta(seconds=20))
    slow = threading.Event()

    with listening(lambda event: slow.wait(0.3) and None), outbox.Worker(workers=8):
        wait_until(settled)
    waits, runs = spread(WAIT_COLUMNS), spread(RUN_COLUMNS)
    assert waits[bucket(25)] == 5, waits
    assert sum(waits) == sum(runs) == 5
    assert sum(runs[bucket(0.26) :]) == 5, runs
    assert 5 * 300 <= spread(("run_ms",))[0] < 5 * 10_000


def test_41_time_in_the_queue_of_a_worker_is_waiting_too() -> None:
    slow = threading.Event()
    with listening(lambda event: slow.wait(0.3) and None):
        write(3)
        with outbox.Worker(workers=1):
            wait_until(settled)
    waits = spread(WAIT_COLUMNS)  # the second event waited for the first, the third for both
    assert sum(waits[bucket(0.3) :]) >= 2, waits
    assert sum(waits[bucket(0.6) :]) >= 1, waits


def test_41_what_was_taken_over_is_counted_as_rescued() -> None:
    (event_id,) = insert(due=-1)
    steal(event_id)
    insert()
    with listening(lambda event: None), outbox.Worker():
        wait_until(settled)
    assert summed() == {"done": 2, "rescued": 1}


def test_41_what_ends_dead_without_a_start_is_counted_and_not_timed() -> None:
    (event_id,) = insert(due=-1, rescues=4)
    steal(event_id)
    with listening(lambda event: None), outbox.Worker():
        wait_until(settled)
    assert summed() == {"dead": 1, "rescued": 1}
    assert sum(spread(WAIT_COLUMNS)) == sum(spread(RUN_COLUMNS)) == 0


def test_41_a_worker_writes_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent listeners have their own rows, all others share one, and no count is lost."""
    monkeypatch.setattr(heartbeat, "MAX_LISTENERS", 3)
    for number in range(10):
        insert(number + 1, event_type=f"order.{number}")
    with ExitStack() as stack:
        for number in range(10):
            stack.enter_context(listening(lambda event: None, f"order.{number}"))
        with outbox.Worker():
            wait_until(settled)
    assert summed()["done"] == 55
    rows = OutboxStatistics.objects.all()
    starts = rows.values("started_at").distinct().count()  # a new minute may have begun
    assert rows.count() <= 4 * starts


def test_41_an_idle_worker_writes_no_more_than_its_sign_of_life() -> None:
    with CaptureQueriesContext(connection) as asked:
        perform(connection, Statistics("me").write())
    assert not len(asked)


# --- several workers ------------------------------------------------------------------------------


def test_41_the_rows_of_several_workers_add_up(fleet: Fleet) -> None:
    insert(300, event_type="order.followed")
    insert(20, payload='{"fails": true}')
    workers = [fleet.start(), fleet.start()]
    wait_until(lambda: OutboxWorker.objects.count() == 2, within=60, what="both workers at work")
    wait_until(settled, within=60)
    assert [fleet.end(each) for each in workers] == [0, 0]
    assert summed() == {"done": 320, "retry": 20}
    assert summed(listener=PLACED) == {"done": 20, "retry": 20}
    assert sum(spread(WAIT_COLUMNS)) == 340
    shares = Counter(fleet_line.pid for fleet_line in fleet.lines() if fleet_line.phase == "end")
    done = OutboxStatistics.objects.filter(done__gt=0)
    assert sorted(
        each["done"] for each in done.order_by().values("owner").annotate(done=Sum("done"))
    ) == sorted(shares.values())


def test_41_a_killed_worker_loses_no_more_than_its_last_interval(fleet: Fleet) -> None:
    worker = fleet.start()
    insert(30, event_type="order.followed")
    wait_until(settled)
    wait_until(lambda: summed() == {"done": 30}, within=40, what="the next write")
    insert(30, event_type="order.followed")
    wait_until(settled)
    worker.kill()
    worker.wait(20)
    assert 30 <= summed()["done"] <= 60


def test_41_workers_that_write_at_once_do_not_hinder_each_other() -> None:
    """Each worker has rows of its own, so no write waits for another's or deadlocks with it."""

    for kind in range(5):
        insert(event_type=f"order.{kind}")
    rows = events_of(claimed().rows)

    def write_often(owner: str) -> int:
        statistics, failures = Statistics(owner), 0
        for _ in range(15):
            statistics.add((each, DONE) for each in rows)
            perform(connection, statistics.write())
            failures += statistics.failures
        return failures

    owners = [f"worker-{number}" for number in range(4)]
    threads = [in_thread(partial(write_often, owner)) for owner in owners]
    assert [each.result(60) for each in threads] == [0] * 4
    assert summed() == {"done": 4 * 15 * 5}


# --- failing --------------------------------------------------------------------------------------


def rename(old: str, new: str) -> None:
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {quote(old)} RENAME TO {quote(new)}")


def test_41_without_its_table_events_are_delivered_and_counts_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a deploy that migrates later: the next write that succeeds includes all counts."""
    table = OutboxStatistics._meta.db_table
    statistics = Statistics("me")
    rename(table, "away")
    try:
        with caplog.at_level(logging.WARNING, "django_outbox"):
            with listening(lambda event: None), outbox.Worker() as worker:
                worker._settler._statistics = statistics
                insert(5)
                wait_until(settled)
            perform(connection, statistics.write())
    finally:
        rename("away", table)
    assert "statistics could not be updated; events are not affected" in caplog.text
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]
    assert summed() == {}
    perform(connection, statistics.write())
    assert summed() == {"done": 5}


# --- reading and purging --------------------------------------------------------------------------


def test_41_rows_are_added_up_by_listener() -> None:
    for owner in ("one", "two"):
        row_at(timedelta(minutes=5), owner=owner, done=3, wait_2=3, listener="a")
        row_at(timedelta(minutes=5), owner=owner, dead=1, run_1=1, listener="b")
        row_at(timedelta(hours=2), owner=owner, done=100)
    found = OutboxStatistics.objects.since(now() - timedelta(hours=1))
    kinds = found.by_listener(5)
    assert [(each["listener"], each["total"]) for each in kinds] == [("a", 6), ("b", 2)]
    assert (kinds[0]["wait_2"], kinds[1]["run_1"]) == (6, 2)
    assert len(found.by_listener(1)) == 1


def test_41_the_purge_keeps_three_hours() -> None:
    kept = row_at(timedelta(hours=3) - timedelta(minutes=1))
    row_at(timedelta(hours=3) + timedelta(minutes=1))
    purging(3600).run()
    assert [each.pk for each in OutboxStatistics.objects.all()] == [kept.pk]


def test_41_the_purge_goes_batch_by_batch(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "PURGE_BATCH_SIZE": 10}
    for number in range(25):
        row_at(timedelta(days=9), owner=f"worker-{number}")
    sizes = [*OutboxStatistics.objects.purge_batches()]
    assert sum(sizes) == 25
    assert max(sizes) == 10


def test_41_reading_and_trimming_use_the_index() -> None:
    clock = now()
    OutboxStatistics.objects.bulk_create(
        OutboxStatistics(
            started_at=clock - timedelta(minutes=number),
            owner=f"worker-{owner}",
            listener=PLACED,
            done=1,
        )
        for number in range(180)
        for owner in range(25)
    )
    analyze(OutboxStatistics)
    lately = OutboxStatistics.objects.since(clock - timedelta(minutes=10))
    works: dict[str, Callable[[], object]] = {
        "by listener": lambda: lately.by_listener(9),
        "purge": lambda: [*OutboxStatistics.objects.purge_batches()],
    }
    assert large_steps(works) == {}


# --- threads --------------------------------------------------------------------------------------


def test_the_row_of_a_worker_says_how_many_threads_of_a_queue_are_busy(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 1.5, "QUEUES": {"hooks": {"WORKERS": 2}}}
    go_on = threading.Event()
    insert(3)
    with listening(lambda event: go_on.wait(60) and None), outbox.Worker(workers=4):
        try:
            busy = {"default": [3, 4], "hooks": [0, 2]}
            wait_until(lambda: [each["threads"] for each in live_workers("default")] == [busy])
        finally:
            go_on.set()
