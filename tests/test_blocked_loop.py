"""A listener that blocks the event loop is reported by name, and nothing else hangs with it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.worker import event_loop
from django_outbox.worker.event_loop import BlockedLoopWatch
from tests.fleet import wait_until
from tests.reach.children import Site
from tests.table import PLACED, in_thread, listening, statuses, write
from tests.test_health import PORT, ask, port_of, wait_for

database = pytest.mark.django_db(transaction=True)


class Blocker:
    """A listener that blocks the event loop, directly or in a task of its own."""

    def __init__(self) -> None:
        self.go_on, self.task = threading.Event(), ""

    async def __call__(self, event: outbox.Event) -> None:
        self._block()

    async def by_a_task(self, event: outbox.Event) -> None:
        await asyncio.create_task(self._later(), name="mine")

    async def _later(self) -> None:
        await asyncio.sleep(0)
        self._block()

    def _block(self) -> None:
        task = asyncio.current_task()
        assert task
        self.task = task.get_name()
        self.go_on.wait(60)


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[tuple[str, str]]:
    found = [(each.levelname, each.getMessage()) for each in caplog.records]
    return [each for each in found if each[1].startswith(start)]


def pass_until(fact: Callable[[], Any], clock: Clock) -> None:
    """Let the time of the watch pass, all of it busy, until it has seen ``fact``."""

    def seen() -> Any:
        clock.pass_(0.05, used=0.05)
        return fact()

    wait_until(seen, what="a report")


# -- what blocks the loop --------------------------------------------------------------------------


async def idle(event: outbox.Event) -> None:
    """Do nothing."""


def alone(blocker: Blocker) -> Any:
    return listening(blocker, PLACED, timeout=60)


def second(blocker: Blocker) -> Any:
    return listening(blocker, PLACED, name="second")


def in_a_task(blocker: Blocker) -> Any:
    return listening(blocker.by_a_task, PLACED)


@database
@pytest.mark.parametrize("registered", [alone, second, in_a_task])
def test_a_blocked_loop_is_reported_with_what_blocks_it(
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    registered: Callable[[Blocker], Any],
) -> None:
    settings.OUTBOX = {"STUCK_AFTER": 1000}
    blocker = Blocker()
    with (
        caplog.at_level(logging.INFO, "django_outbox"),
        listening(idle, "order.*", name="idle"),
        registered(blocker),
        outbox.Worker() as worker,
    ):
        try:
            wait_until(lambda: worker.health().is_ready, what="a worker that is ready")
            (event_id,) = write()
            wait_until(lambda: blocker.task, what="a block")
            pass_until(lambda: lines(caplog, "event loop blocked"), clock)
            assert worker.health().is_ready
            clock.pass_(1000, used=1000)
            wait_until(lambda: lines(caplog, "event loop stuck"), what="an error")
            unready = worker.health().unready
            assert len(unready) == 1
            assert unready[0].startswith("outbox-default-loop has been blocked for ")
        finally:
            blocker.go_on.set()
        wait_until(lambda: statuses() == {"DONE": 2}, what="DONE")
        wait_until(lambda: lines(caplog, "event loop runs again"), what="the end")
        assert worker.health().is_ready
    (warning,) = lines(caplog, "event loop blocked")
    (error,) = lines(caplog, "event loop stuck")
    assert (warning[0], error[0]) == ("WARNING", "ERROR")
    for _, line in (warning, error):
        assert f"event_id={event_id} event_type=order.placed" in line
        assert f"listener='{PLACED}{' second' * (registered is second)}'" in line
        assert f"task={blocker.task!r}" in line
        assert "threading.py:" in line.split("at=")[1]
    assert 1 <= float(warning[1].split("seconds=")[1].split(" ")[0]) < 1000
    ((_, end),) = lines(caplog, "event loop runs again")
    assert float(end.split("seconds=")[1]) >= 1000


# -- what still works ------------------------------------------------------------------------------


@database
def test_a_stop_under_a_blocked_loop_ends_in_time_and_releases_what_waited(settings: Any) -> None:
    settings.OUTBOX = {"DRAIN_TIMEOUT": 0.3, "ASYNC_CONCURRENCY": 1}
    blocker = Blocker()
    with listening(blocker):
        worker = outbox.Worker()
        worker.start()
        try:
            write(1)
            wait_until(lambda: blocker.task, what="a block")
            write(4)
            wait_until(
                lambda: worker._gates.by_queue["default"].ready.waiting_for_loop == 4,
                what="four that wait",
            )
            assert in_thread(worker.stop).result(30) is False  # while the loop is blocked
            free = outbox.models.OutboxEvent.objects.filter(locked_by=None).count()
            assert free >= 4
        finally:
            blocker.go_on.set()
    assert "DONE" not in statuses()


# -- processes -------------------------------------------------------------------------------------


@database
def test_a_process_with_a_blocked_loop_is_live_not_ready_and_recovers(
    site: Site, tmp_path: Path
) -> None:
    until = tmp_path / "go on"
    with site.worker(*PORT, STUCK_AFTER=6) as child:
        port = port_of(child)
        wait_for(port, "/ready", 200)
        (event_id,) = write(1, "reach.blocking", payload={"until": str(until)})
        stuck = wait_for(port, "/ready", 503)
        assert stuck.reasons.startswith("outbox-default-loop has been blocked for ")
        assert event_id not in stuck.reasons
        assert ask(port, "/live").code == 200  # type: ignore[union-attr]
        for start in ("event loop blocked", "event loop stuck"):
            child.says(
                rf"{start} seconds=\d+\.\d event_id={event_id} event_type=reach\.blocking "
                r"listener='reach\.blocking' task='\S+' at=\S*listeners\.py:\d+"
            )
        write(3, "reach.noted")
        wait_until(lambda: statuses() == {"NEW": 1, "DONE": 3}, what="the plain ones")
        until.touch()
        wait_for(port, "/ready", 200)
        wait_until(lambda: statuses() == {"DONE": 4}, what="all DONE")
        child.says(r"event loop runs again seconds=\d+")
        assert child.stop() == 0


# -- how the watch measures time -------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = self.used = 100.0

    def pass_(self, seconds: float, *, used: float = 0.0) -> None:
        self.now, self.used = self.now + seconds, self.used + used


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    replaced = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: clock.used)
    monkeypatch.setattr(event_loop, "time", replaced)
    return clock


class Loop:
    """A loop that runs its callbacks only when ``answer`` is called."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.due.append(call)

    def answer(self) -> None:
        while self.due:
            self.due.pop()()


@pytest.fixture
def watched(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[BlockedLoopWatch, Loop, Any]:
    watch, loop = BlockedLoopWatch("loop", stuck_after=5), Loop()
    monkeypatch.setattr(asyncio, "current_task", lambda loop: None)

    def rounds(number: int, *, answering: bool) -> None:
        for _ in range(number):
            clock.pass_(0.25)
            watch.check(loop, threading.current_thread())  # type: ignore[arg-type]
            if answering:
                loop.answer()

    return watch, loop, rounds


def test_a_process_that_was_stopped_is_not_taken_for_a_blocked_loop(
    clock: Clock, watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _, rounds = watched
    rounds(3, answering=True)
    rounds(1, answering=False)
    clock.pass_(3600)  # a SIGSTOP, which uses no processor time
    rounds(1, answering=False)
    rounds(1, answering=True)
    rounds(5, answering=True)
    assert not lines(caplog, "event loop")
    assert watch.unready_reason is None


def test_a_listener_that_keeps_every_thread_from_running_is_reported_when_it_lets_go(
    clock: Clock, watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, rounds = watched
    rounds(3, answering=True)
    rounds(1, answering=False)
    clock.pass_(4, used=4)  # a regular expression, for example, which holds the GIL
    rounds(1, answering=False)
    ((level, line),) = lines(caplog, "event loop blocked")
    assert (level, "seconds=4." in line) == ("WARNING", True)


def test_each_blockage_is_reported_once_and_anew(
    clock: Clock, watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch, loop, rounds = watched
    for _ in range(2):
        rounds(3, answering=True)
        rounds(40, answering=False)
        assert watch.unready_reason
        loop.answer()
        rounds(1, answering=True)
        assert watch.unready_reason is None
    assert [level for level, _ in lines(caplog, "event loop")] == [
        "WARNING",
        "ERROR",
        "WARNING",
    ] * 2
    rounds(4, answering=False)  # the limit is one second
    assert len(lines(caplog, "event loop")) == 6
