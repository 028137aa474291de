"""Real ``outbox_worker`` processes: stopped, killed, paused and cut off from their database."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.process.supervisor import STOPPING, Signals
from tests.fleet import Fleet, wait_for_end_of, wait_until
from tests.table import insert, row, statuses, write
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

OUTBOX = {
    "LISTENER_MODULE": "listeners",
    "LEASE": 5,
    "DRAIN_TIMEOUT": 1.2,
    "LOCK_WAIT": 1,
    "POLL_INTERVAL": 0.2,
    "POLL_BATCH_SIZE": 100,
    "COLD_QUEUE_CAPACITY": 100,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 100},
}


class Workers(Fleet):
    """A fleet whose settings can be changed for a single start."""

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        super().__init__(environment, directory, **OUTBOX)

    def start(self, *arguments: str, outbox: Any = None, **environment: str) -> psutil.Popen:
        changed = {"OUTBOX_TEST_SETTINGS": json.dumps({**OUTBOX, **outbox})} if outbox else {}
        return super().start(*arguments, **changed, **environment)


@pytest.fixture
def workers(database_env: dict[str, str], tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(database_env, tmp_path)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup they would ignore it, too
    yield workers
    signal.signal(signal.SIGHUP, hangup)
    workers.kill_all()
    sys.stdout.write(workers.log.read_text()[-6000:])  # pytest shows this if a test fails


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Gated listeners run until this file is touched."""
    return tmp_path / "gate"


def gated(gate: Path, count: int = 1) -> list[str]:
    return write(count, "process.gated", payload={"gate": str(gate)})


def quick(count: int = 1) -> list[str]:
    return insert(count, due=-1, event_type="process.quick")


def effects(phase: str) -> Counter[str]:
    return Counter(Effect.objects.filter(phase=phase).values_list("event_id", flat=True))


def wait_for_start(*ids: str, times: int = 1) -> None:
    wait_until(lambda: all(effects("start")[each] >= times for each in ids), what="the start")


def wait_until_all_done(within: float = 90) -> None:
    wait_until(lambda: [*statuses()] == ["DONE"], within=within, what=f"all done: {statuses()}")


def wait_until_it_stops(worker: psutil.Popen, threads: int) -> None:
    """Wait until the stop has begun: the claimer's thread ends at once."""
    wait_until(lambda: worker.num_threads() < threads, what="a thread fewer")


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOPPING, ids=["TERM", "INT", "HUP"])
def test_444_the_first_signal_drains(workers: Workers, gate: Path, number: int) -> None:
    running = gated(gate, 2)
    waiting = quick(20)
    OutboxEvent.objects.filter(pk__in=waiting).update(available_at=row(running[0]).available_at)
    worker = workers.start("--workers", "2", outbox={"DRAIN_TIMEOUT": 20, "LEASE": 30})
    wait_until(lambda: len(effects("start")) == 2 or len(effects("end")) == 20)
    wait_for_start(*running)
    threads = worker.num_threads()
    worker.send_signal(number)
    wait_until_it_stops(worker, threads)
    late = quick(5)
    gate.touch()
    assert wait_for_end_of(worker) == 0
    assert {row(each).status for each in running} == {Status.DONE}
    assert {row(each).status for each in late} == {Status.NEW}
    assert OutboxEvent.objects.exclude(locked_by=None).count() == 0
    assert OutboxEvent.objects.exclude(attempts=0).count() == 0
    pending = OutboxEvent.objects.pending().count()
    assert OutboxEvent.objects.due().count() == pending  # released, so due at once
    assert effects("end") == Counter(
        OutboxEvent.objects.done().values_list("event_id", flat=True)
    )  # each once


def test_444_the_second_signal_ends_it_at_once(workers: Workers, gate: Path) -> None:
    running = gated(gate, 2)
    worker = workers.start("--workers", "2", "--drain-timeout", "300", outbox={"LEASE": 300})
    wait_for_start(*running)
    waiting = quick(10)
    threads = worker.num_threads()
    worker.terminate()
    wait_until_it_stops(worker, threads)
    worker.terminate()
    assert wait_for_end_of(worker) == 1  # long before the drain times out
    assert OutboxEvent.objects.due().filter(pk__in=waiting, locked_by=None).count() == 10
    assert OutboxEvent.objects.exclude(locked_by=None).count() == 0  # handed back
    assert {(row(each).rescues, row(each).attempts) for each in running} == {(0, 0)}


def test_a_hangup_that_is_ignored_stays_so() -> None:
    former = {each: signal.getsignal(each) for each in STOPPING}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Signals().install(*STOPPING)
        ignored = [signal.getsignal(each) is signal.SIG_IGN for each in STOPPING]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert ignored == [False, False, True]


# -- the command -----------------------------------------------------------------------------------


def test_a_missing_table_is_told(workers: Workers) -> None:
    worker = workers.start(outbox={"TABLE_PREFIX": "absent_"})
    assert wait_for_end_of(worker) == 1
    (line,) = workers.logged("no table")
    assert "absent_outbox_event" in line
    assert "manage.py migrate django_outbox --database default" in line
    assert not workers.logged("Traceback")
