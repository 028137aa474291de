"""Deploys with real signals: a stop releases what runs, and only a crash counts as a rescue."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxStream
from tests.fleet import Fleet, Line, children, wait_for_end_of, wait_until
from tests.table import lease_ends_in, row, statuses, stream_due_in, write

pytestmark = pytest.mark.django_db(transaction=True)
LONG = {"seconds": 600}
# No lease ends during a test, unless the test is about that.
OUTBOX: dict[str, Any] = {"DRAIN_TIMEOUT": 0.3, "LEASE": 600, "POLL_INTERVAL": 1, "LOCK_WAIT": 1}
SOON_OVER = 5  # seconds of a lease that a killed worker leaves


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    yield fleet
    fleet.kill_all()
    print(fleet.log.read_text()[-6000:])  # noqa: T201 - pytest shows it if the test failed


def start(fleet: Fleet, *arguments: str, **changed: Any) -> psutil.Popen:
    """Start a worker with some settings changed; wait until it handles signals."""
    more = {"OUTBOX_TEST_SETTINGS": json.dumps({**OUTBOX, **changed})} if changed else {}
    worker = fleet.start(*arguments, **more)
    wait_until(lambda: fleet.logged(f" {worker.pid} INFO worker started"), what="the worker")
    return worker


def starts(fleet: Fleet, event_id: str) -> list[Line]:
    return [each for each in fleet.lines() if each.id == event_id and each.phase == "start"]


def wait_for_start(fleet: Fleet, event_id: str, times: int = 1) -> Line:
    return wait_until(lambda: starts(fleet, event_id)[times - 1 :], what=f"start {times}")[0]


def facts(event_id: str) -> tuple[Any, ...]:
    """Return owner, attempts, rescues and status."""
    found = row(event_id)
    return found.locked_by, found.attempts, found.rescues, found.status


HANDED_BACK = (None, 0, 0, Status.NEW)


# -- a stop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hurry", [False, True], ids=["drain", "second signal"])
def test_what_still_runs_is_due_a_second_later(fleet: Fleet, hurry: bool) -> None:
    worker = start(fleet, DRAIN_TIMEOUT=300 if hurry else 0.3)
    both = [*write(1, payload=LONG), *write(1, key="a", payload=LONG)]
    for each in both:
        wait_for_start(fleet, each)
    threads = worker.num_threads()
    worker.terminate()
    if hurry:
        wait_until(lambda: worker.num_threads() < threads, what="a thread fewer")
        assert statuses() == {"NEW": 2}
        worker.terminate()
    assert wait_for_end_of(worker) == 1
    assert [facts(each) for each in both] == [HANDED_BACK] * 2
    assert OutboxStream.objects.get(pk=":a").locked_by is None
    assert stream_due_in("a") <= 1
    assert lease_ends_in(both[0]) <= 1
    lines = fleet.logged("event handed back")
    for each in both:
        (line,) = [line for line in lines if f"event_id={each} " in line]
        assert "event_type=order.placed listener='order.placed'" in line
        assert "WARNING" in line


# -- --max-events ----------------------------------------------------------------------------------


def spent(fleet: Fleet) -> tuple[psutil.Popen, str, list[str]]:
    """Return a worker past its ``--max-events``, the running event's id, and three waiting ids."""
    worker = start(fleet, "--max-events", "1", "--workers", "2", DRAIN_TIMEOUT=0.2, LEASE=SOON_OVER)
    gate = fleet.log.parent / "gate"
    (running,) = write(1, "order.gated", payload={"gate": str(gate)})
    wait_for_start(fleet, running)
    threads = worker.num_threads()
    write(1, payload={})
    wait_until(lambda: statuses().get("DONE") == 1)
    waiting = write(3, payload={})
    wait_until(lambda: worker.num_threads() < threads, what="the drain")
    return worker, running, waiting


def test_a_spent_worker_waits_for_what_runs_without_a_limit(fleet: Fleet) -> None:
    worker, running, waiting = spent(fleet)
    other = start(fleet)
    wait_until(lambda: {row(each).status for each in waiting} == {Status.DONE}, what="the rest")
    renewed = row(running).available_at
    assert renewed is not None
    wait_until(lambda: row(running).available_at > renewed, what="a renewal")  # type: ignore[operator]
    assert worker.poll() is None  # long after its DRAIN_TIMEOUT
    (fleet.log.parent / "gate").touch()
    assert wait_for_end_of(worker) == 0
    assert facts(running) == (None, 0, 0, Status.DONE)
    assert fleet.end(other) == 0


# -- processes under a supervisor ----------------------------------------------------------------


@pytest.fixture
def supervised(fleet: Fleet) -> tuple[psutil.Popen, str, psutil.Process]:
    """Return a supervisor of two workers, the id of a running event, and the child that runs it."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell makes its background jobs ignore it
    settings = {"OUTBOX_TEST_SETTINGS": json.dumps({**OUTBOX, "LEASE": SOON_OVER})}
    supervisor = fleet.start("--processes", "2", "--workers", "1", **settings)
    wait_until(lambda: len(fleet.logged("INFO worker started")) == 2, what="two workers")
    (event_id,) = write(1, payload=LONG)
    return supervisor, event_id, psutil.Process(wait_for_start(fleet, event_id).pid)


def test_a_signal_to_a_child_drains_it_and_it_is_replaced(
    fleet: Fleet, supervised: tuple[psutil.Popen, str, psutil.Process]
) -> None:
    supervisor, event_id, child = supervised
    child.terminate()
    again = wait_for_start(fleet, event_id, 2)
    assert again.pid != child.pid
    wait_until(lambda: len(children(supervisor)) == 2, what="a replacement")
    assert child.pid not in {each.pid for each in children(supervisor)}
    assert row(event_id).rescues == 0
    assert fleet.logged(f"worker process ended pid={child.pid} code=1")
    assert not fleet.logged("rescued")
    wait_until(lambda: len(fleet.logged("INFO worker started")) == 3, what="a third worker")
    assert fleet.end(supervisor) == 1
    assert facts(event_id) == HANDED_BACK
