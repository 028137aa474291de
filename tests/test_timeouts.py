"""Timeouts of sync listeners: a thread that hangs is written off and its event is retried."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections

import django_outbox as outbox
from django_outbox import signals
from django_outbox.delivery import timeouts
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from django_outbox.sql.values import LeaseKind
from tests.table import (
    PLACED,
    claim,
    in_thread,
    insert,
    keyed,
    listening,
    now,
    row,
    statuses,
    write,
)
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SOON = {"POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1}
AT_ONCE = outbox.Fixed(delay=0.01)
ONCE = outbox.Fixed(delay=0.01, max_attempts=1)
SHORT = 0.2  # seconds of a timeout
NOT_SQLITE = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="an open SQLite transaction keeps every writer out"
)


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


class Hanging:
    """A listener whose first calls hang until ``wake()``; it records each call and its thread."""

    def __init__(
        self, calls: int = 1, *, first: Callable[[Any], Any] = lambda event: None,
        then: Callable[[Any], Any] = lambda event: None,
    ) -> None:  # fmt: skip
        self.hangs, self.first, self.then = calls, first, then
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
            assert self._awake.wait(60)
        self.ended.append(number)
        return self.then(event)

    def wake(self) -> None:
        self._awake.set()

    @property
    def first_thread_has_ended(self) -> bool:
        return not self.threads[0].is_alive()


@contextmanager
def hanging(calls: int = 1, **options: Any) -> Iterator[Hanging]:
    """Register a ``Hanging`` listener; calls that still hang at the end of the block wake up."""
    given = {name: options.pop(name) for name in ("first", "then") if name in options}
    listener = Hanging(calls, **given)
    options = {"timeout": SHORT, "retry": AT_ONCE, **options}
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


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []

    def receiver(**facts: Any) -> None:
        found.append(facts)

    signal.connect(receiver)
    try:
        yield found
    finally:
        signal.disconnect(receiver)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [each.getMessage() for each in caplog.records]
    return [each for each in texts if each.startswith("listener runs longer than its timeout")]


# -- written off -----------------------------------------------------------------------------------


def test_a_listener_past_its_timeout_is_written_off_and_its_event_tried_again() -> None:
    """A replacement thread retries within two seconds of the timeout; that costs one attempt."""
    with hanging() as listener, outbox.Worker(workers=1):
        (event_id,) = write()
        began = time.monotonic()
        ended(DONE=1)
        assert time.monotonic() - began < 2 + SHORT
        assert not listener.first_thread_has_ended
    found = row(event_id)
    assert (found.attempts, found.rescues, found.locked_by) == (1, 0, None)
    assert listener.attempts == [0, 1]
    assert str(found.last_error).startswith("django_outbox.exceptions.ListenerTimeout: tests.")
    assert f"ran longer than {SHORT} s; its thread was written off" in str(found.last_error)


def test_the_default_timeout_is_that_of_listeners_without_one(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LISTENER_TIMEOUT": SHORT}
    with hanging(timeout=None) as listener, outbox.Worker(workers=1):
        (event_id,) = write()
        ended(DONE=1)
    assert (row(event_id).attempts, listener.attempts) == (1, [0, 1])


def test_a_listeners_own_timeout_comes_before_the_default(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LISTENER_TIMEOUT": SHORT}
    seen: list[int] = []

    def takes_a_second(event: outbox.Event) -> None:
        seen.append(event.attempts)
        time.sleep(1)  # the listener's work

    with listening(takes_a_second, timeout=30), outbox.Worker(workers=1):
        (event_id,) = write()
        ended(DONE=1)
    assert (row(event_id).attempts, seen) == (0, [0])


def test_the_default_timeout_is_that_of_async_listeners_too(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LISTENER_TIMEOUT": SHORT}

    async def endless(event: outbox.Event) -> None:
        await asyncio.sleep(60)

    with listening(endless, retry=ONCE), outbox.Worker(workers=1):
        (event_id,) = write()
        ended(DEAD=1)
    assert f"ran longer than {SHORT} s; cancelled" in str(row(event_id).last_error)


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [(outbox.Fixed(0.01, max_attempts=2), 2), (outbox.Fixed(0, give_up_on=(Exception,)), 1)],
    ids=["attempts", "give up"],
)
def test_the_retry_policy_decides_on_a_timeout(policy: Any, attempts: int) -> None:
    with hanging(5, retry=policy), outbox.Worker(workers=1):
        (event_id,) = write()
        ended(DEAD=1)
    assert row(event_id).attempts == attempts


@pytest.mark.parametrize(
    "says",
    [lambda event: None, lambda event: outbox.Dead("no"), lambda event: 1 / 0, leave],
    ids=["done", "dead", "raises", "writes"],
)
def test_what_a_written_off_call_says_is_ignored(says: Callable[[Any], Any]) -> None:
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
        hanging(first=connect, then=first_only) as listener,
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


def test_a_transaction_that_a_written_off_listener_left_open_is_undone() -> None:
    def leave_open(event: outbox.Event) -> None:
        if not event.attempts:
            connections["default"].set_autocommit(False)
            leave(event)

    with hanging(then=leave_open) as listener, outbox.Worker(workers=1):
        write()
        ended(DONE=1)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended, what="the thread's end")
    assert effects() == []


def test_a_renewed_lease_keeps_what_runs_within_its_timeout(settings: Any) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 0.6, "DRAIN_TIMEOUT": 0.5}
    with hanging(timeout=30) as listener, outbox.Worker(workers=2):
        (event_id,) = write()
        wait_until(lambda: listener.attempts)
        since = now()
        wait_until(lambda: (now() - since).total_seconds() > 1.5)
        assert listener.attempts == [0]
        listener.wake()
        ended(DONE=1)
    assert row(event_id).attempts == 0


def test_a_thread_that_could_not_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the system's thread limit no event is lost: the worker tries again a moment later."""
    real, refused = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("outbox-default-worker") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        real(thread)

    with hanging() as listener, outbox.Worker(workers=1):
        monkeypatch.setattr(threading.Thread, "start", start)
        (event_id,) = write()
        ended(DONE=1)
    assert (refused, listener.attempts) == (["outbox-default-worker-0"] * 2, [0, 1])
    assert row(event_id).attempts == 1


def test_a_stop_does_not_wait_for_what_was_written_off() -> None:
    with hanging(2, retry=outbox.Fixed(60)) as listener:
        worker = outbox.Worker(workers=2)
        worker.start()
        ids = write(2)
        ended(RETRY=2)
        began = time.monotonic()
        assert worker.stop(timeout=30) is True
        assert time.monotonic() - began < 5
        assert [row(each).locked_by for each in ids] == [None, None]
        listener.wake()
    assert [row(each).attempts for each in ids] == [1, 1]


def test_what_is_written_off_during_a_drain_is_settled_first() -> None:
    with hanging(timeout=1, retry=outbox.Fixed(60)) as listener:
        worker = outbox.Worker(workers=1)
        worker.start()
        (event_id,) = write()
        wait_until(lambda: listener.attempts)
        assert worker.stop(timeout=30) is True
        found = row(event_id)
        assert (found.status, found.attempts, found.locked_by) == (Status.RETRY, 1, None)


def test_300_calls_that_return_at_the_moment_of_their_timeouts() -> None:
    """Either the thread or the watchdog ends a call: no settle is lost or made twice."""
    calls: Counter[str] = Counter()
    late: Counter[str] = Counter()

    def near(event: outbox.Event) -> None:
        calls[event.event_id] += 1
        assert event.attempts == calls[event.event_id] - 1, "attempts are exact"
        if event.attempts == 0:  # about half of these are written off
            time.sleep(random.uniform(0.05, 0.45))

    def note(**facts: Any) -> None:
        if facts["outcome"] == "retry":
            late[facts["event"].event_id] += 1

    signals.event_settled.connect(note)
    try:
        with listening(near, timeout=0.1, retry=AT_ONCE), outbox.Worker(workers=16) as worker:
            ids = write(300)
            wait_until(lambda: statuses() == {"DONE": 300}, within=60, what=f"{statuses()}")
            hang = worker._dispatchers[0]._hanging
            wait_until(lambda: not hang(), what="the ends of written-off threads")
            assert len([each for each in threading.enumerate() if "-worker-" in each.name]) == 16
    finally:
        signals.event_settled.disconnect(note)
    found = dict(OutboxEvent.objects.values_list("event_id", "attempts"))
    assert {each: calls[each] - 1 for each in ids} == found
    assert {each: late[each] for each in ids} == found
    assert 0 < sum(found.values()) < 300
    assert max(found.values()) == 1


# -- the fallback ----------------------------------------------------------------------------------


def test_the_fallback_of_a_written_off_listener_runs_in_the_thread_that_replaces_it() -> None:
    failures: list[outbox.Failure] = []
    threads: list[threading.Thread] = []

    def fallback(event: outbox.Event, failure: outbox.Failure) -> None:
        assert event.payload == {"n": 0}
        failures.append(failure)
        threads.append(threading.current_thread())

    spoil = lambda event: event.payload.update(n=99)  # noqa: E731
    with hanging(first=spoil, retry=ONCE) as listener, outbox.Worker(workers=1):
        registry.fallback(listener, fallback)
        (event_id,) = write()
        ended(DONE=1)
        assert threads[0] is not listener.threads[0]
        assert not listener.first_thread_has_ended
    assert row(event_id).attempts == 1
    assert [type(each.exception) for each in failures] == [outbox.ListenerTimeout]
    assert failures[0].attempts == 1


def test_a_fallback_sees_the_context_that_a_hung_listener_set() -> None:
    """A fallback in a replacement thread gets the same context as one in the same thread."""
    said: ContextVar[str] = ContextVar("said", default="nothing")
    heard_of: list[str] = []

    def fallback(event: outbox.Event, failure: outbox.Failure) -> None:
        heard_of.append(said.get())
        said.set("too late")

    with (
        hanging(
            first=lambda event: said.set("hello"), then=lambda event: heard_of.append(said.get()),
            retry=ONCE,
        ) as listener,
        outbox.Worker(workers=1),
    ):  # fmt: skip
        registry.fallback(listener, fallback)
        write()
        ended(DONE=1)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
    assert heard_of == ["hello", "hello"]


def test_a_fallback_that_hangs_is_written_off_and_the_event_dead() -> None:
    fallback = Hanging()

    def listen(event: outbox.Event) -> None:
        raise LookupError("sold out")

    with listening(listen, timeout=SHORT, retry=ONCE), outbox.Worker(workers=1):
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


def test_listener_and_fallback_may_both_hang() -> None:
    fallback = Hanging()
    with hanging(retry=ONCE) as listener, outbox.Worker(workers=1) as worker:
        registry.fallback(listener, fallback)
        try:
            (event_id,) = write()
            ended(DEAD=1)
            assert worker._dispatchers[0]._hanging() == 2
            write()  # the worker still has one usable thread
            wait_until(lambda: len(listener.attempts) == 2)
        finally:
            fallback.wake()
    assert str(row(event_id).last_error).count("ListenerTimeout: ") >= 2


# -- fan-out ---------------------------------------------------------------------------------------


def test_the_others_of_a_fan_out_go_on_in_the_thread_that_replaces_it() -> None:
    """A hung listener does not hold the others up, and only it is retried."""
    seen: list[tuple[str, int]] = []

    def note(event: outbox.Event) -> None:
        seen.append((event.listener.rpartition(" ")[2], event.attempts))

    def last(event: outbox.Event) -> None:
        note(event)

    with (
        listening(note, name="a"),
        hanging(2, name="b", retry=outbox.Fixed(0), first=note) as hangs,
        listening(last, name="c"),
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        assert hangs.attempts == [0, 1, 2]
    assert seen == [("a", 0), ("b", 0), ("c", 0), ("b", 1)]
    assert row(event_id).attempts == 2


def test_an_atomic_listener_after_a_hung_one_commits_its_progress() -> None:
    with (
        hanging(name="a") as hangs,
        listening(leave, name="b", atomic=True),
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        hangs.wake()
        wait_until(lambda: hangs.first_thread_has_ended)
    assert effects() == ["0"]
    assert (row(event_id).attempts, hangs.attempts) == (1, [0, 1])


def test_a_coroutine_in_a_thread_is_cancelled_and_its_thread_kept() -> None:
    calls: list[int] = []

    async def endless(event: outbox.Event) -> None:
        calls.append(event.attempts)
        if not event.attempts:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.6)  # a cancelled coroutine may take a moment to clean up

    with (
        heard(signals.listener_overdue) as overdue,
        listening(endless, name="a", timeout=SHORT, retry=AT_ONCE),
        listening(lambda event: None, name="b"),
        outbox.Worker(workers=1) as worker,
    ):
        (event_id,) = write()
        ended(DONE=1)
        assert worker._dispatchers[0]._abandoned == []
    assert calls == [0, 1]
    assert "ListenerTimeout" in str(row(event_id).last_error)
    assert "cancelled" in str(row(event_id).last_error)
    assert len(overdue) == 1


def test_a_coroutine_that_blocks_its_thread_is_written_off_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "CANCELLATION_GRACE", 0.3)
    block = Hanging()

    async def blocks(event: outbox.Event) -> None:
        block(event)

    with (
        listening(blocks, name="a", timeout=SHORT, retry=AT_ONCE),
        listening(lambda event: None, name="b"),
        outbox.Worker(workers=1),
    ):
        try:
            (event_id,) = write()
            ended(DONE=1)
        finally:
            block.wake()
        wait_until(lambda: block.first_thread_has_ended)
    assert block.attempts == [0, 1]
    assert row(event_id).attempts == 1


# -- a call that was written off cannot commit -----------------------------------------------------


def test_a_written_off_atomic_listener_that_wakes_undoes_what_it_wrote() -> None:
    """On SQLite its retry must wait for it: an open transaction keeps every other writer out."""
    with (
        hanging(first=leave, then=leave, atomic=True) as listener,
        outbox.Worker(workers=1) as worker,
    ):
        (event_id,) = write()
        wait_until(lambda: worker._dispatchers[0]._hanging() == 1)
        if connection.vendor != "sqlite":
            ended(DONE=1)
            assert effects() == ["1"]
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
        ended(DONE=1)
    assert {*listener.ended} == {0, 1}
    assert effects() == ["1"]
    assert (row(event_id).status, row(event_id).attempts) == (Status.DONE, 1)


@NOT_SQLITE
@pytest.mark.parametrize("name", ["", "of several"])
def test_a_written_off_atomic_listener_that_wakes_while_its_retry_runs_undoes_what_it_wrote(
    name: str,
) -> None:
    running, go_on = threading.Event(), threading.Event()

    def second_waits(event: outbox.Event) -> None:
        if event.attempts:
            running.set()
            assert go_on.wait(60)
        leave(event)

    with ExitStack() as stack:
        options = {"name": name, "atomic": True, "timeout": 3}
        listener = stack.enter_context(hanging(then=second_waits, **options))
        if name:
            stack.enter_context(listening(lambda event: None, name="another"))
        stack.enter_context(outbox.Worker(workers=1))
        try:
            (event_id,) = write()
            assert running.wait(20)
            listener.wake()
            wait_until(lambda: listener.first_thread_has_ended)
            assert effects() == []
        finally:
            go_on.set()
        ended(DONE=1)
    assert effects() == ["1"]
    assert row(event_id).attempts == 1


@NOT_SQLITE
def test_an_atomic_listener_whose_undoing_fails_is_written_off_all_the_same() -> None:
    """The failed rollback raises an error in the thread, which does not count as an outcome."""
    failed: list[str] = []

    def breaks(event: outbox.Event) -> None:
        def fails() -> None:
            failed.append("rollback")
            raise ArithmeticError

        if not event.attempts:
            connections["default"]._rollback = fails

    with (
        heard(signals.event_decided) as decided,
        hanging(then=breaks, atomic=True) as listener,
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
    assert failed == ["rollback"]
    assert [each["outcome"] for each in decided] == ["retry", "done"]
    assert row(event_id).attempts == 1


@NOT_SQLITE
@pytest.mark.parametrize("name", ["", "of several"])
def test_the_same_worker_may_have_leased_the_event_again(name: str) -> None:
    """The row names this worker again, but the first call must not commit under the new lease."""
    running, go_on, again, finish = (threading.Event() for _ in range(4))
    calls: list[int] = []

    def hang_first(event: outbox.Event) -> None:
        calls.append(event.attempts)
        if len(calls) == 1:
            running.set()
            assert go_on.wait(60)
        else:
            again.set()
            assert finish.wait(60)
        leave(event)

    with ExitStack() as stack:
        stack.enter_context(listening(hang_first, name=name, atomic=True))
        if name:
            stack.enter_context(listening(lambda event: None, name="zz"))
        lost = stack.enter_context(heard(signals.lease_lost))
        stack.enter_context(outbox.Worker(workers=2))
        try:
            (event_id,) = write()
            assert running.wait(20)
            OutboxEvent.objects.filter(pk=event_id).update(
                attempts=1, status=Status.RETRY, locked_by=None, available_at=now()
            )
            assert again.wait(20)
            assert str(row(event_id).locked_by)
            go_on.set()
            wait_until(lambda: lost, what="a refusal")
            assert effects() == []
        finally:
            go_on.set()
            finish.set()
        ended(DONE=1)
    assert len(effects()) == 1


ROWS = [
    (LeaseKind.ROW, 0, None, True), (LeaseKind.ROW, 1, None, False),
    (LeaseKind.ROW, 0, "{}", False),
    (LeaseKind.STREAM, 0, None, True), (LeaseKind.STREAM, 1, None, False),
    (LeaseKind.STREAM, 0, "{}", False),
]  # fmt: skip
RETRY = Decision(status=Status.RETRY, delay=5.0, spent=1, outcome="retry")


def leased(kind: LeaseKind, **columns: Any) -> str:
    if kind is LeaseKind.ROW:
        (event_id,) = insert(**columns)
        claim()
        return event_id
    (event_id,) = keyed("a", **columns)
    from tests.conformance.test_stream_leases import take

    assert take() == ["a"]
    return event_id


@pytest.mark.parametrize(("kind", "attempts", "progress", "fits"), ROWS)
@pytest.mark.parametrize("decision", [DONE, RETRY], ids=["done", "retry"])
@pytest.mark.parametrize("delete", [False, True], ids=["mark", "delete"])
def test_a_settle_may_ask_for_the_row_as_it_was_read(
    kind: LeaseKind,
    attempts: int,
    progress: str | None,
    fits: bool,
    decision: Decision,
    delete: bool,
) -> None:
    event_id = leased(kind)
    count = dialect_of(connection).settle_all(
        connection, me="me", decisions=[(event_id, decision)], kind=kind, delete_done=delete,
        as_read=(attempts, progress),
    )  # fmt: skip
    assert count == fits
    assert OutboxEvent.objects.filter(pk=event_id, status=0, attempts=0).exists() != fits


@pytest.mark.parametrize(("kind", "attempts", "progress", "fits"), ROWS)
@pytest.mark.parametrize("was", [None, '{"a":{"state":"done"}}'], ids=["none", "some"])
def test_progress_is_only_kept_where_the_row_is_as_it_was_read(
    kind: LeaseKind, attempts: int, progress: str | None, fits: bool, was: str | None
) -> None:
    event_id = leased(kind, progress=was)
    read = was if progress is None else progress
    kept = dialect_of(connection).keep_progress(
        connection, me="me", event_id=event_id, progress='{"b":{"state":"done"}}', kind=kind,
        as_read=(attempts, read),
    )  # fmt: skip
    assert kept is fits
    assert ("b" in str(row(event_id).progress)) is fits


def test_several_atomic_listeners_each_read_what_the_one_before_wrote() -> None:
    def again(event: outbox.Event) -> None:
        leave(event)

    with (
        listening(leave, name="a", atomic=True),
        listening(again, name="b", atomic=True),
        outbox.Worker(workers=1),
    ):
        write(5)
        ended(DONE=5)
    assert effects() == ["0"] * 10


# -- streams ---------------------------------------------------------------------------------------


def put(key: str, count: int) -> list[str]:
    return write(count, key=key)


def test_a_written_off_event_keeps_its_followers_until_its_retry_is_done() -> None:
    order: list[int] = []

    def note(event: outbox.Event) -> None:
        order.append(event.payload["n"])

    with (
        hanging(first=note, then=note, retry=outbox.Fixed(0.5)) as listener,
        outbox.Worker(workers=4),
    ):
        ids = put("a", 4)
        ended(RETRY=1, NEW=3)
        assert order == [0]
        ended(DONE=4)
        assert order == [0, 0, 1, 2, 3]
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
    assert order == [0, 0, 1, 2, 3, 0]  # the last one is the first call, which returned late
    assert [row(each).attempts for each in ids] == [1, 0, 0, 0]


def test_no_follower_is_handed_to_a_thread_that_was_written_off() -> None:
    with hanging(retry=outbox.Fixed(60)) as listener, outbox.Worker(workers=1):
        put("a", 3)
        ended(RETRY=1, NEW=2)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
        assert listener.attempts == [0]
    assert statuses() == {"RETRY": 1, "NEW": 2}


# -- logs and signals ------------------------------------------------------------------------------


def test_one_warning_and_one_signal_name_event_listener_and_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        heard(signals.listener_overdue) as overdue,
        hanging() as listener,
        outbox.Worker(workers=1),
    ):
        (event_id,) = write()
        ended(DONE=1)
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
    (line,) = reports(caplog)
    assert f"event_id={event_id} event_type={PLACED} listener='{PLACED}' seconds=0." in line
    (facts,) = overdue
    assert (facts["sender"], facts["event"].event_id) == ("default", event_id)
    assert facts["listener"].title == PLACED
    assert SHORT <= facts["seconds"] < 2 + SHORT


def test_an_async_listener_past_its_timeout_is_told_alike(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(event: outbox.Event) -> None:
        await sync_to_async(Effect.objects.count)()
        await asyncio.sleep(60)

    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        heard(signals.listener_overdue) as overdue,
        listening(endless, timeout=SHORT, retry=ONCE),
        outbox.Worker(workers=1),
    ):
        write()
        ended(DEAD=1)
    assert len(reports(caplog)) == 1
    assert [each["listener"].title for each in overdue] == [PLACED]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_drain_cannot_write_its_own_thread_off_and_reports_when_the_call_returns(
    caplog: pytest.LogCaptureFixture, inside: bool
) -> None:
    from contextlib import nullcontext

    from django.db import transaction

    def slow(event: outbox.Event) -> None:
        time.sleep(2 * SHORT)  # the listener's work

    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        heard(signals.listener_overdue) as overdue,
        listening(slow, timeout=SHORT),
    ):
        (event_id,) = write()
        with transaction.atomic() if inside else nullcontext():
            assert outbox.drain() == 1
    assert len(reports(caplog)) == len(overdue) == 1
    assert (row(event_id).status, row(event_id).attempts) == (Status.DONE, 0)


# -- workers with few free threads -----------------------------------------------------------------


def test_a_worker_whose_threads_all_hang_says_that_only_a_new_process_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It continues with new threads all the same, because it may be part of a web server."""
    with (
        caplog.at_level(logging.ERROR, "django_outbox"),
        hanging(2, retry=outbox.Fixed(60)) as listener,
        outbox.Worker(workers=2) as worker,
    ):
        write(1)
        wait_until(lambda: worker._dispatchers[0]._hanging() == 1)
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
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {**SOON, "STUCK_AFTER": 0.5}
    with (
        caplog.at_level(logging.ERROR, "django_outbox"),
        hanging(2, timeout=None) as listener,
        outbox.Worker(workers=2) as worker,
    ):
        first = write(1)
        wait_until(lambda: worker.health().is_ready and listener.attempts)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 1)  # one busy thread of two is not a reason
        assert worker.health().is_ready
        second = write(1)
        wait_until(lambda: not worker.health().is_ready, what="trouble")
        assert worker.health().is_live
        assert "every thread has been in one call for" in str(worker.health().unready)
        wait_until(lambda: "every thread is in a call" in caplog.text)
        rounds = time.monotonic()
        wait_until(lambda: time.monotonic() > rounds + 0.6)  # two rounds of the watchdog
        listener.wake()
        wait_until(lambda: worker.health().is_ready, what="a free thread")
        ended(DONE=2)
    (line,) = [each.getMessage() for each in caplog.records if "every thread" in each.getMessage()]
    assert all(f"{each} ({PLACED})" in line for each in first + second)


def test_a_pool_that_works_is_not_stuck(settings: Any) -> None:
    """The thread is busy for a long time, but each call is short."""
    settings.OUTBOX = {**SOON, "STUCK_AFTER": 1.0}
    names = "abcdefgh"
    with ExitStack() as stack:
        for name in names:
            call = lambda event: time.sleep(0.25)  # noqa: E731 - the listener's work
            stack.enter_context(listening(call, name=name))
        worker = stack.enter_context(outbox.Worker(workers=1))
        wait_until(lambda: worker.health().is_ready)
        write(1)
        seen: list[bool] = []
        wait_until(
            lambda: seen.append(worker.health().is_ready) or statuses() == {"DONE": 1}  # type: ignore[func-returns-value]
        )
    assert all(seen)


def test_the_thread_of_a_replacement_keeps_its_own_connections() -> None:
    """The hung thread uses one database connection, its replacement another."""
    used: list[int] = []

    def ask(event: outbox.Event) -> None:
        Effect.objects.count()
        used.append(id(connections["default"].connection))

    with hanging(first=ask, then=ask) as listener, outbox.Worker(workers=1):
        write()
        ended(DONE=1)
        assert len({*used}) == 2
        listener.wake()
        wait_until(lambda: listener.first_thread_has_ended)
        in_thread(lambda: write(1)).result(20)
        ended(DONE=2)
    assert used[1] == used[-1]
