"""Workers are started and stopped many times from several threads, and leave nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import psutil
import pytest
from django.db import connection, connections

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.worker import worker as worker_module
from django_outbox.worker.executor import Executor
from django_outbox.writing.on_commit import hot_queues
from tests.table import in_thread, listening, sessions, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CYCLES = 200
THREADS = 4
WITHIN = 240  # seconds; half a minute on an idle machine, and more than this is a deadlock
QUIET = {"DOORBELL": None, "POLL_INTERVAL": 60}  # a listener connection takes 0.2 s to end


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if there are more threads, file descriptors or database sessions than before."""
    cycle("default", idle)  # opens what is opened once per process
    cycle("other", idle)
    before = resources()
    yield
    wait_until(lambda: no_more_than(before), what=f"no more threads, files, sessions than {before}")
    assert not hot_queues.by_alias


def resources() -> tuple[int, int, int]:
    connections.close_all()  # SQLite keeps the files of closed connections while one is open
    connection.ensure_connection()
    return threading.active_count(), psutil.Process().num_fds(), sessions()


def no_more_than(before: tuple[int, int, int]) -> bool:
    return all(now <= then for now, then in zip(resources(), before, strict=True))


def cycle(alias: str, meanwhile: Callable[[], object]) -> bool:
    """Start and stop a worker; return False if another thread's worker is running."""
    worker = outbox.Worker(using=alias, workers=1)
    try:
        worker.start()
        meanwhile()
    except RuntimeError as error:
        assert "already has a worker" in str(error)  # noqa: PT017 - other errors shall escape
        return False
    finally:
        assert worker.stop()
    return True


def idle() -> None:
    """Do nothing, so that the worker stops at once."""


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down a start, so that other threads act in the middle of it."""
    delay(monkeypatch, worker_module, "is_in_memory")
    delay(monkeypatch, Executor, "start")


def delay(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    call = getattr(owner, name)

    def slowly(*args: Any) -> Any:
        time.sleep(0.003)  # makes the race likely; nothing is waited for
        return call(*args)

    monkeypatch.setattr(owner, name, slowly)


def in_threads(*works: Callable[[], object]) -> list[Any]:
    """Run all works at the same time; return their results."""
    together = threading.Barrier(len(works))

    def begin(work: Callable[[], object]) -> object:
        together.wait(WITHIN)
        return work()

    futures = [in_thread(partial(begin, work)) for work in works]
    return [future.result(WITHIN) for future in futures]


@pytest.mark.timeout(WITHIN + 60)
def test_w1_many_cycles_from_several_threads(settings: Any, nothing_left: None) -> None:
    settings.OUTBOX = QUIET
    until, ticket = time.monotonic() + WITHIN, count()
    delivered: list[str] = []

    def deliver() -> None:
        before = len(delivered)
        write(25)
        wait_until(lambda: len(delivered) > before, what="the number delivered")

    def go_on() -> tuple[int, int]:
        started = refused = 0
        while (number := next(ticket)) < CYCLES:
            alias = ("other", "default")[number % 2]
            while not cycle(alias, deliver if number % 50 == 1 else idle):
                refused += 1
                assert time.monotonic() < until, "a worker was left running"
            started += 1
        return started, refused

    with listening(lambda event: delivered.append(event.event_id)):
        done = in_threads(*[go_on] * THREADS)
    assert sum(started for started, _ in done) == CYCLES
    assert sum(refused for _, refused in done) > 0, "they never met"
    assert not OutboxEvent.objects.exclude(locked_by=None).exists()
    assert statuses()["DONE"] == len(delivered) == len({*delivered}) >= CYCLES / 50
    assert {*OutboxEvent.objects.values_list("attempts", "rescues")} == {(0, 0)}


def test_one_worker_started_and_stopped_by_all_at_once(
    settings: Any, nothing_left: None, slow_start: None
) -> None:
    """Once a stop has returned, nothing runs and nothing can start, in whatever order they came."""
    settings.OUTBOX = QUIET

    def start(worker: outbox.Worker) -> None:
        try:
            worker.start()
        except RuntimeError as error:
            assert "was stopped" in str(error)  # noqa: PT017 - other errors shall escape

    for turn in range(50):
        worker = outbox.Worker(workers=1)
        works = [partial(start, worker), worker.stop, worker.stop]
        # Usually the last one created runs first.
        in_threads(*works if turn % 2 else reversed(works))
        assert not [each for each in threading.enumerate() if each.name.startswith("outbox-")]
        assert worker.stop()
        with pytest.raises(RuntimeError, match="was stopped"):
            worker.start()
