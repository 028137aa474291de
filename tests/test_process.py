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
from django.db import DatabaseError

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import engine_connection
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
KILLED = -signal.SIGKILL


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
    yield workers
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


def wait_until_it_runs(workers: Workers, worker: psutil.Popen) -> None:
    """Wait for the log line: claims may begin earlier, but signals are received only after it."""
    mine = f" {worker.pid} INFO worker started"
    wait_until(lambda: workers.logged(mine), what="the worker's start")


def pause(worker: psutil.Process) -> None:
    """Send SIGSTOP at a moment when the process holds no lock that would block the others."""

    def is_paused() -> bool:
        worker.suspend()
        own = engine_connection("default", lock_wait=0.3)
        table = own.ops.quote_name(OutboxEvent._meta.db_table)
        try:
            with own.cursor() as cursor:
                cursor.execute(f"UPDATE {table} SET tenant_id = 'paused'")
        except DatabaseError:
            worker.resume()
            return False
        finally:
            own.close()
        return True

    wait_until(is_paused)


def wait_until_it_stops(worker: psutil.Popen, threads: int) -> None:
    """Wait until the stop has begun: the claimer's thread ends at once."""
    wait_until(lambda: worker.num_threads() < threads, what="a thread fewer")


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
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


# -- lost workers ----------------------------------------------------------------------------------


def test_a_kill_loop_loses_nothing(workers: Workers) -> None:
    events, kills, threads = 600, 5, 4
    ids: list[str] = []
    alive = [workers.start("--workers", str(threads)) for _ in range(2)]
    for _ in range(kills):
        for each in alive:
            wait_until_it_runs(workers, each)
        before = Effect.objects.count()
        ids += quick(events // kills)
        wait_until(lambda goal=before + events // kills // 2: Effect.objects.count() >= goal)  # type: ignore[misc]
        victim = alive.pop(0)
        victim.kill()
        assert wait_for_end_of(victim) == KILLED
        alive.append(workers.start("--workers", str(threads)))
    for each in alive:
        wait_until_it_runs(workers, each)
    wait_until_all_done()
    assert [workers.end(each) for each in alive] == [0, 0]
    ends = effects("end")
    assert sorted(ends) == sorted(ids)  # 0 lost
    assert statuses() == {"DONE": events}  # 0 stuck, 0 dead
    assert OutboxEvent.objects.exclude(locked_by=None).count() == 0
    assert workers.logged("rescued")  # some kills hit leased events
    assert ends.total() - events <= kills * threads


def test_w16_a_paused_worker_cannot_settle_what_it_lost(workers: Workers, gate: Path) -> None:
    (event_id,) = gated(gate)
    paused = workers.start("--workers", "2")
    wait_for_start(event_id)
    pause(paused)
    other = workers.start()
    wait_for_start(event_id, times=2)  # the lease ended, and the other worker took the event
    gate.touch()
    wait_until_all_done()
    before = row(event_id).__dict__ | {"_state": 0}
    assert workers.end(other) == 0
    paused.resume()  # SIGCONT
    wait_until(lambda: workers.logged("lost leases"), what="the refused settle")
    assert row(event_id).__dict__ | {"_state": 0} == before
    quick(10)
    wait_until_all_done()
    assert {*Effect.objects.filter(phase="end").values_list("pid", flat=True)} == {
        paused.pid,
        other.pid,
    }
    assert workers.end(paused) == 0


# -- the command -----------------------------------------------------------------------------------


def test_a_missing_table_is_told(workers: Workers) -> None:
    worker = workers.start(outbox={"TABLE_PREFIX": "absent_"})
    assert wait_for_end_of(worker) == 1
    (line,) = workers.logged("no table")
    assert "absent_outbox_event" in line
    assert "manage.py migrate django_outbox --database default" in line
    assert not workers.logged("Traceback")
