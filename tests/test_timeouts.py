"""Timeouts of sync listeners: a thread that hangs is written off and its event is retried."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections, transaction

import django_outbox as outbox
from django_outbox import signals
from django_outbox.delivery import call
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.worker.executor import Executor
from tests.surroundings import heard
from tests.table import (
    PLACED,
    claimed,
    events_of,
    in_thread,
    insert,
    listening,
    row,
    statuses,
    write,
)
from tests.testapp.models import Effect
from tests.waiting import Gate, MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# A lease outlasts what the tests add to the clock.
SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1, "LEASE": 3600}
AT_ONCE = outbox.Fixed(delay=0.01)
ONCE = outbox.Fixed(delay=0.01, max_attempts=1)
TIMEOUT = 60.0  # seconds; a call that hangs moves the clock past it, no other call takes that long


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each check of the watchdog that has ended."""
    watch, ended = Executor.watch, list[None]()

    def note(executor: Executor) -> None:
        watch(executor)
        ended.append(None)

    monkeypatch.setattr(Executor, "watch", note)
    return ended


class Hanging:
    """A listener whose first calls hang until ``wake()``; it records each call and its thread.

    A call that hangs moves the clock past its timeout.
    """

    def __init__(
        self,
        clock: MovedClock,
        calls: int = 1,
        *,
        first: Callable[[Any], Any] = lambda event: None,
        then: Callable[[Any], Any] = lambda event: None,
    ) -> None:
        self.clock, self.hangs, self.first, self.then = clock, calls, first, then
        self.attempts: list[int] = []
        self.threads: list[threading.Thread] = []
        self.ended: list[int] = []  # numbers of the calls that returned, in order
        self._awake = threading.Event()

    def __call__(self, event: outbox.Event, failure: Any = None) -> Any:
        number = len(self.attempts)
        self.attempts.append(event.attempts)
        self.threads.append(threading.current_thread())
        if number < self.hangs:
            self.first(event)
            self.clock.advance(2 * TIMEOUT)
            assert self._awake.wait(60)
        self.ended.append(number)
        return self.then(event)

    def wake(self) -> None:
        self._awake.set()

    @property
    def first_thread_has_ended(self) -> bool:
        return not self.threads[0].is_alive()


@contextmanager
def hanging(clock: MovedClock, calls: int = 1, **options: Any) -> Iterator[Hanging]:
    """Register a ``Hanging`` listener; calls that still hang at the end of the block wake up."""
    given = {name: options.pop(name) for name in ("first", "then") if name in options}
    listener = Hanging(clock, calls, **given)
    options = {"timeout": TIMEOUT, "retry": AT_ONCE, **options}
    with listening(listener, **options):
        try:
            yield listener
        finally:
            listener.wake()


def leave(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=0, phase=f"{event.attempts}")


def effects() -> list[str]:
    return [*Effect.objects.values_list("phase", flat=True).order_by("pk")]


def ended(**expected: int) -> None:
    wait_until(lambda: statuses() == expected, what=f"{expected}")


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [each.getMessage() for each in caplog.records]
    return [each for each in texts if each.startswith("listener runs longer than its timeout")]


# -- written off -----------------------------------------------------------------------------------


def test_a_listener_past_its_timeout_is_written_off_and_its_event_tried_again(
    clock: MovedClock,
) -> None:
    """A replacement thread retries it while the call still hangs; that costs one attempt."""
    with hanging(clock) as listener, outbox.Worker(workers=1):
        (event_id,) = write()
        ended(DONE=1)
        assert not listener.first_thread_has_ended
    found = row(event_id)
    assert (found.attempts, found.rescues, found.locked_by) == (1, 0, None)
    assert listener.attempts == [0, 1]
    assert str(found.last_error).startswith("django_outbox.exceptions.ListenerTimeout: tests.")
    assert f"ran longer than {TIMEOUT} s; its thread was written off" in str(found.last_error)


def test_a_listeners_own_timeout_comes_before_the_default(settings: Any, clock: MovedClock) -> None:
    """The timeout of one call passes, that of the other call does not."""
    settings.OUTBOX = {**SOON, "LISTENER_TIMEOUT": TIMEOUT}
    patient = Gate()
    with (
        listening(patient, "order.patient", timeout=10 * TIMEOUT),
        hanging(clock, timeout=None) as listener,
        outbox.Worker(workers=2),
    ):
        try:
            (event_id,) = write(event_type="order.patient")
            wait_until(lambda: patient.entered)
            write()
            ended(DONE=1, NEW=1)
            assert listener.attempts == [0, 1]
        finally:
            patient.open.set()
        ended(DONE=2)
    assert (row(event_id).attempts, patient.entered) == (0, [event_id])


@pytest.mark.parametrize(
    "says",
    [lambda event: None, lambda event: outbox.Dead("no"), lambda event: 1 / 0, leave],
    ids=["done", "dead", "raises", "writes"],
)
def test_what_a_written_off_call_says_is_ignored(
    says: Callable[[Any], Any], clock: MovedClock
) -> None:
    """Its thread closes its connections and ends; it settles nothing and sends no signal."""

    def first_only(event: outbox.Event) -> Any:
        return says(event) if not event.attempts else None

    used: list[Any] = []

    def connect(event: outbox.Event) -> None:
        Effect.objects.count()
        used.append(connections["default"])

    with (
        heard(signals.event_settled) as settled,
        heard(signals.event_decided) as decided,
        hanging(clock, first=connect, then=first_only) as listener,
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        assert used[0].connection is not None
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended, what="the thread's end")
        assert used[0].connection is None
        ended(DONE=1)
    assert listener.ended == [1, 0]
    assert row(event_id).attempts == 1
    assert [each["outcome"] for each in settled] == ["retry", "done"]
    assert [each["outcome"] for each in decided] == ["retry", "done"]


def test_a_thread_that_could_not_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch, clock: MovedClock
) -> None:
    """At the system's thread limit no event is lost: the worker tries again a moment later."""
    real, refused = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("outbox-default-worker") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        real(thread)

    with hanging(clock) as listener, outbox.Worker(workers=1):
        monkeypatch.setattr(threading.Thread, "start", start)
        (event_id,) = write()
        ended(DONE=1)
    assert (refused, listener.attempts) == (["outbox-default-worker-0"] * 2, [0, 1])
    assert row(event_id).attempts == 1


def test_a_stop_does_not_wait_for_what_was_written_off(clock: MovedClock) -> None:
    with hanging(clock, 2, retry=outbox.Fixed(60)) as listener:
        worker = outbox.Worker(workers=2)
        worker.start()
        ids = write(2)
        ended(RETRY=2)
        assert worker.stop(timeout=60) is True  # not False, which it is after that time
        assert [row(each).locked_by for each in ids] == [None, None]
        listener.wake()
    assert [row(each).attempts for each in ids] == [1, 1]


def test_what_is_written_off_during_a_drain_is_settled_first(clock: MovedClock) -> None:
    gate = Gate()
    with listening(gate, timeout=TIMEOUT, retry=outbox.Fixed(3600)):
        worker = outbox.Worker(workers=1)
        worker.start()
        try:
            (event_id,) = write()
            wait_until(lambda: gate.entered)
            stopping = in_thread(lambda: worker.stop(timeout=60))
            wait_until(lambda: "draining" in str(worker.health().unready), what="the drain")
            clock.advance(2 * TIMEOUT)
            assert stopping.result(60) is True
            found = row(event_id)
        finally:
            gate.open.set()
    assert (found.status, found.attempts, found.locked_by) == (Status.RETRY, 1, None)


def test_a_call_is_ended_once_by_its_thread_or_by_the_watchdog() -> None:
    """So a call that returns at the moment of its timeout is neither settled twice nor lost."""
    with listening(lambda event: None, timeout=TIMEOUT):
        insert(1000)
        leases = events_of(claimed(limit=1000).rows)
        (listener,) = registry.route("", PLACED)
        owner: Any = SimpleNamespace(alias="default", lead=leases[0])
        calls = [call.Call(owner, listener, [each]) for each in leases]

        def make(each: call.Call) -> bool:
            with suppress(call.CallAbandoned):
                each.make()
                return True
            return False

        returned = in_thread(lambda: [make(each) for each in calls])
        abandoned = []
        for each in calls:
            while each.ends_at == math.inf:
                pass
            abandoned.append(each.end())
    assert {sum(each) for each in zip(returned.result(60), abandoned, strict=True)} == {1}


# -- the fallback ----------------------------------------------------------------------------------


def test_the_fallback_of_a_written_off_listener_runs_in_the_thread_that_replaces_it(
    clock: MovedClock,
) -> None:
    failures: list[outbox.Failure] = []
    threads: list[threading.Thread] = []

    def fallback(event: outbox.Event, failure: outbox.Failure) -> None:
        assert event.payload == {"n": 0}
        failures.append(failure)
        threads.append(threading.current_thread())

    spoil = lambda event: event.payload.update(n=99)  # noqa: E731
    with hanging(clock, first=spoil, retry=ONCE) as listener, outbox.Worker(workers=1):
        registry.fallback(listener, fallback)
        (event_id,) = write()
        ended(DONE=1)
        assert threads[0] is not listener.threads[0]
        assert not listener.first_thread_has_ended
    assert row(event_id).attempts == 1
    assert [type(each.exception) for each in failures] == [outbox.ListenerTimeout]
    assert failures[0].attempts == 1


def test_a_fallback_that_hangs_is_written_off_and_the_event_dead(clock: MovedClock) -> None:
    fallback = Hanging(clock)

    def listen(event: outbox.Event) -> None:
        raise LookupError("sold out")

    with listening(listen, timeout=TIMEOUT, retry=ONCE), outbox.Worker(workers=1):
        registry.fallback(listen, fallback)
        try:
            (event_id,) = write()
            ended(DEAD=1)
            said = str(row(event_id).last_error)
            assert said.startswith("LookupError: sold out")
            assert "The fallback: django_outbox.exceptions.ListenerTimeout: " in said
            assert "Hanging" in said
            assert "its thread was written off" in said
        finally:
            fallback.wake()
        wait_until(lambda: fallback.first_thread_has_ended)
    assert (row(event_id).status, row(event_id).attempts) == (Status.DEAD, 1)
    assert fallback.attempts == [0]


# -- async, in a thread ----------------------------------------------------------------------------


def test_a_coroutine_in_a_thread_is_cancelled_and_its_thread_kept(
    clock: MovedClock, rounds: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "CANCELLATION_GRACE", TIMEOUT)
    calls: list[int] = []
    over: list[bool] = []

    async def endless(event: outbox.Event) -> None:
        calls.append(event.attempts)
        if not event.attempts:
            clock.advance(TIMEOUT)
            try:
                await asyncio.Event().wait()
            finally:  # a cancelled coroutine may take a moment to clean up
                seen = len(rounds)
                while len(rounds) < seen + 2 and not over:  # noqa: ASYNC110 - set by threads
                    await asyncio.sleep(0.01)

    with (
        heard(signals.listener_overdue) as overdue,
        listening(endless, timeout=TIMEOUT, retry=AT_ONCE, atomic=True),
        outbox.Worker(workers=1) as worker,
    ):
        (event_id,) = write()
        try:
            ended(DONE=1)
            assert worker._executors[0]._abandoned == []
        finally:
            over.append(True)
    assert calls == [0, 1]
    assert "ListenerTimeout" in str(row(event_id).last_error)
    assert "cancelled" in str(row(event_id).last_error)
    assert len(overdue) == 1


# -- logs and signals ------------------------------------------------------------------------------


def test_one_warning_and_one_signal_name_event_listener_and_seconds(
    caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        heard(signals.listener_overdue) as overdue,
        hanging(clock) as listener,
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
    (line,) = reports(caplog)
    assert f"event_id={event_id} event_type={PLACED} listener='{PLACED}' seconds=12" in line
    (facts,) = overdue
    assert (facts["sender"], facts["event"].event_id) == ("default", event_id)
    assert facts["listener"].title == PLACED
    assert facts["seconds"] >= 2 * TIMEOUT


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_drain_cannot_write_its_own_thread_off_and_reports_when_the_call_returns(
    caplog: pytest.LogCaptureFixture, clock: MovedClock, inside: bool
) -> None:
    from contextlib import nullcontext

    from django.db import transaction

    def slow(event: outbox.Event) -> None:
        clock.advance(2 * TIMEOUT)

    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        heard(signals.listener_overdue) as overdue,
        listening(slow, timeout=TIMEOUT),
    ):
        (event_id,) = write()
        with transaction.atomic() if inside else nullcontext():
            assert outbox.drain() == 1
    assert len(reports(caplog)) == len(overdue) == 1
    assert (row(event_id).status, row(event_id).attempts) == (Status.DONE, 0)


# -- workers with few free threads -----------------------------------------------------------------


def test_a_worker_whose_threads_all_hang_says_that_only_a_new_process_helps(
    caplog: pytest.LogCaptureFixture, clock: MovedClock
) -> None:
    """It continues with new threads all the same, because it may be part of a web server."""
    with (
        caplog.at_level(logging.ERROR, "django_outbox"),
        hanging(clock, 2, retry=outbox.Fixed(60)) as listener,
        outbox.Worker(workers=2) as worker,
    ):
        write(1)
        wait_until(lambda: worker._executors[0]._hanging() == 1)
        assert worker.health().is_live
        assert not worker.lost_threads
        write(1)
        wait_until(lambda: not worker.health().is_live, what="death")
        reason = "2 threads hang in listeners past their timeouts"
        assert worker.health().dead == (reason,)
        wait_until(lambda: "as many threads hang as the worker has" in caplog.text)
        write(1)
        wait_until(lambda: statuses().get("DONE") == 1)
        listener.wake()
        wait_until(lambda: worker.health().is_ready, what=f"{worker.health()}")
    assert caplog.text.count("as many threads hang as the worker has") == 1


def test_a_pool_that_is_stuck_is_not_ready_and_one_error_names_the_events(
    settings: Any, caplog: pytest.LogCaptureFixture, clock: MovedClock, rounds: list[None]
) -> None:
    settings.OUTBOX = {**SOON, "STUCK_AFTER": TIMEOUT}
    gate = Gate()
    with (
        caplog.at_level(logging.ERROR, "django_outbox"),
        listening(gate),
        outbox.Worker(workers=2) as worker,
    ):
        try:
            first = write(1)
            wait_until(lambda: worker.health().is_ready and gate.entered)
            clock.advance(2 * TIMEOUT)
            assert worker.health().is_ready  # one busy thread of two is not a reason
            second = write(1)
            wait_until(lambda: len(gate.entered) == 2)
            assert worker.health().is_ready
            clock.advance(2 * TIMEOUT)
            assert worker.health().is_live
            assert "every thread has been in one call for" in str(worker.health().unready)
            seen = len(rounds)
            wait_until(lambda: len(rounds) > seen + 2, what="three rounds of the watchdog")
        finally:
            gate.open.set()
        wait_until(lambda: worker.health().is_ready, what="a free thread")
        ended(DONE=2)
    (line,) = [each.getMessage() for each in caplog.records if "every thread" in each.getMessage()]
    assert all(f"{each} ({PLACED})" in line for each in first + second)


def test_listener_and_fallback_may_both_hang(clock: MovedClock) -> None:
    fallback = Hanging(clock)
    with hanging(clock, retry=ONCE) as listener, outbox.Worker(workers=1) as worker:
        registry.fallback(listener, fallback)
        try:
            (event_id,) = write()
            ended(DEAD=1)
            assert worker._executors[0]._hanging() == 2
            write()  # the worker still has one usable thread
            wait_until(lambda: len(listener.attempts) == 2)
        finally:
            fallback.wake()
    assert str(row(event_id).last_error).count("ListenerTimeout: ") >= 2


def test_a_hung_listener_holds_up_no_other_of_its_event(clock: MovedClock) -> None:
    with (
        hanging(clock, name="a") as hangs,
        listening(leave, name="b", atomic=True),
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=2)
        hangs.wake()
        wait_until(lambda: hangs.first_thread_has_ended)
    assert effects() == ["0"]
    assert (row(event_id).listener, row(event_id).attempts) == (f"{PLACED} a", 1)
    assert hangs.attempts == [0, 1]


def test_no_event_waits_behind_a_call_that_lasts() -> None:
    """A thread takes several events of a quick listener at once; others deliver what it keeps."""
    gate, lasting = Gate(), (50, 90, 130)

    def call(event: outbox.Event) -> None:
        if event.payload["number"] in lasting:
            gate(event)

    with transaction.atomic(), listening(call):
        outbox.write_many(
            [outbox.Event(event_type=PLACED, payload={"number": each}) for each in range(200)]
        )
    others = OutboxEvent.objects.exclude(status=Status.DONE)
    with listening(call):
        try:
            with outbox.Worker(workers=4):
                wait_until(lambda: len(gate.entered) == others.count() == len(lasting))
                gate.open.set()
        finally:
            gate.open.set()
