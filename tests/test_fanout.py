"""Several listeners of one event: each has its own retries, due time, transaction and outcome."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import transaction
from django.db.models import F

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests import samples
from tests.surroundings import both, outside_alone
from tests.table import PLACED, insert, lease_ends_in, listening, now, row, statuses, write
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

ONCE = outbox.Fixed(0, max_attempts=1)
SOON = outbox.Fixed(0, max_attempts=4)
FAR = outbox.Fixed(600, max_attempts=4)

Work = Callable[[outbox.Event], Any]


class Listener:
    """Records the events that it gets and calls ``work`` with each."""

    def __init__(self, name: str, work: Work, **options: Any) -> None:
        self.name, self.work, self.options = name, work, options
        self.seen: list[outbox.Event] = []

    def __call__(self, event: outbox.Event) -> Any:
        self.seen.append(event)
        return self.work(event)

    @property
    def attempts(self) -> list[int]:
        return [event.attempts for event in self.seen]


def nothing(event: outbox.Event) -> None:
    """Succeed."""


def fails(event: outbox.Event) -> None:
    raise LookupError(f"no {event.listener}")


def fails_first(times: int) -> Work:
    def work(event: outbox.Event) -> None:
        if event.attempts < times:
            raise LookupError(f"not yet {event.listener}")

    return work


def effect(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=0, phase=event.listener)


@contextmanager
def registered(*listeners: Listener) -> Iterator[None]:
    with ExitStack() as stack:
        for each in listeners:
            stack.enter_context(listening(each, name=each.name, **each.options))
        yield


def drain(times: int = 1) -> None:
    for _ in range(times):
        outbox.drain()


def progress(event_id: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(row(event_id).progress or "{}")
    return found


def states(event_id: str) -> dict[str, str]:
    return {title: entry["state"] for title, entry in progress(event_id).items()}


# -- the outcome of the event ----------------------------------------------------------------------


@both
def test_a_dead_event_tells_the_error_of_a_listener_that_died(outside: bool) -> None:
    """``last_error`` is not the later error of a listener that succeeded in the end."""
    (event_id,) = write()
    hopeless = Listener("", fails, retry=ONCE)
    slow = Listener("mail", fails_first(1), retry=SOON)
    with registered(hopeless, slow):
        drain()
        assert f"not yet {PLACED} mail" in str(row(event_id).last_error)
        drain()
    assert statuses() == {"DEAD": 1}
    assert str(row(event_id).last_error) == f"LookupError: no {PLACED}"


# -- retries and due times -------------------------------------------------------------------------


@both
def test_each_policy_sees_its_own_executions_and_the_row_the_most(outside: bool) -> None:
    (event_id,) = write()
    asked: dict[str, list[int]] = {"two": [], "four": []}

    def policy(name: str, limit: int) -> Any:
        class Policy:
            max_attempts = limit

            def should_retry(self, error: BaseException) -> bool:
                return True

            def delay(self, attempt: int) -> float:
                asked[name].append(attempt)
                return 0.0

        return Policy()

    two = Listener("two", fails, retry=policy("two", 2))
    four = Listener("four", fails, retry=policy("four", 4))
    with registered(Listener("", nothing), two, four):
        drain(3)
        assert statuses() == {"RETRY": 1}
        assert row(event_id).attempts == 3
        drain()
    assert (two.attempts, four.attempts) == ([0, 1], [0, 1, 2, 3])
    assert asked == {"two": [1], "four": [1, 2, 3]}
    assert statuses() == {"DEAD": 1}
    assert row(event_id).attempts == 4


@both
def test_each_gets_a_payload_of_its_own(outside: bool) -> None:
    """A listener that changes its payload does not affect the next one."""
    write(payload={"lines": [1]})
    first = Listener("", lambda event: event.payload["lines"].append(2))
    second = Listener("mail", nothing)
    with registered(first, second):
        drain()
    assert [event.payload for event in second.seen] == [{"lines": [1]}]


@pytest.mark.django_db
def test_293_they_are_called_from_the_most_specific_to_the_least() -> None:
    write(aggregate_type="shop.Order", aggregate_id="1")
    order: list[str] = []

    def note(event: outbox.Event) -> None:
        order.append(event.listener)

    titles = [
        ("*", {"name": "all"}),
        ("order.*", {"name": "orders"}),
        (PLACED, {"name": "second"}),
        (PLACED, {"name": "third"}),
        (PLACED, {}),
        (PLACED, {"name": "exact", "aggregate_type": "shop.Order"}),
    ]
    with ExitStack() as stack:
        for event_type, options in titles:
            call = Listener("", note)
            stack.enter_context(listening(call, event_type, **options))
        drain()
    assert order == [
        f"{PLACED}[shop.Order] exact",
        f"{PLACED} second",
        f"{PLACED} third",
        PLACED,
        "order.* orders",
        "* all",
    ]


# -- replay ----------------------------------------------------------------------------------------


@both
def test_a_replay_runs_only_what_has_not_succeeded(outside: bool) -> None:
    (event_id,) = write()
    good, bad = Listener("", effect), Listener("mail", fails, retry=outbox.Fixed(0, max_attempts=2))
    with registered(good, bad):
        drain(2)
        assert statuses() == {"DEAD": 1}
        assert OutboxEvent.objects.dead().replay() == 1
        assert states(event_id) == {PLACED: "done"}
        drain()
        assert statuses() == {"RETRY": 1}
        bad.work = nothing
        drain()
    assert bad.attempts == [0, 1, 0, 1]  # it has all its attempts again
    assert statuses() == {"DONE": 1}
    assert len(good.seen) == 1


# -- deploys ---------------------------------------------------------------------------------------


@both
def test_a_listener_that_is_added_gets_what_is_pending(outside: bool) -> None:
    write()
    old, failing = Listener("", nothing), Listener("mail", fails_first(1), retry=SOON)
    new = Listener("audit", nothing)
    with registered(old, failing):
        drain()
    with registered(old, failing, new):
        drain()
    assert (len(old.seen), len(failing.seen), len(new.seen)) == (1, 2, 1)
    assert statuses() == {"DONE": 1}


@both
def test_a_listener_that_is_removed_is_not_waited_for(outside: bool) -> None:
    write()
    good, gone = Listener("", fails_first(1), retry=SOON), Listener("mail", fails, retry=FAR)
    with registered(good, gone):
        drain()
    with registered(good):
        OutboxEvent.objects.update(available_at=now())
        drain()
    assert (len(good.seen), len(gone.seen)) == (2, 1)
    assert statuses() == {"DONE": 1}


@both
def test_an_event_whose_last_listener_is_gone_is_unroutable(outside: bool, settings: Any) -> None:
    settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
    (event_id,) = write()
    with registered(Listener("", nothing), Listener("mail", fails, retry=SOON)):
        drain()
    drain()
    assert statuses() == {"DEAD": 1}
    assert "UnroutableEvent" in str(row(event_id).last_error)
    assert states(event_id)[PLACED] == "done"  # so a replay will not run it again


# -- the column progress ---------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        '{"order.placed": 1}',
        '{"order.placed": {}}',
        '{"order.placed": {"state": "finished"}}',
        '{"order.placed": {"state": "done", "at": "x"}}',
        '{"order.placed": {"state": "done", "at": "2026-01-01T00:00:00"}}',
        "\\ud800",
    ],
)
def test_damaged_progress_has_every_listener_run(damaged: str) -> None:
    insert(progress=damaged)
    first, second = Listener("", nothing), Listener("mail", nothing)
    with registered(first, second):
        drain()
    assert (len(first.seen), len(second.seen)) == (1, 1)
    assert statuses() == {"DONE": 1}


# -- in a worker -----------------------------------------------------------------------------------


@outside_alone
def test_a_stop_starts_no_further_listener_and_keeps_what_is_done(settings: Any) -> None:
    settings.OUTBOX = {"DRAIN_TIMEOUT": 10}
    inside, go_on = threading.Event(), threading.Event()

    def waits(event: outbox.Event) -> None:
        inside.set()
        assert go_on.wait(15)

    first, second = Listener("a", waits), Listener("b", nothing)
    with registered(first, second):
        worker = outbox.Worker()
        worker.start()
        (event_id,) = write()
        assert inside.wait(15)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        wait_until(worker._dispatchers[0]._stopping.is_set)
        go_on.set()
        stopping.join(15)
        assert (len(first.seen), len(second.seen)) == (1, 0)
        assert states(event_id) == {f"{PLACED} a": "done"}
        found = row(event_id)
        assert (found.status, found.locked_by, found.attempts) == (Status.NEW, None, 0)
        drain()
    assert (len(first.seen), len(second.seen)) == (1, 1)
    assert statuses() == {"DONE": 1}


# -- async -----------------------------------------------------------------------------------------


class Crowd(Listener):
    """An async listener that counts how many of its calls run at the same time."""

    inside = most = 0

    async def __call__(self, event: outbox.Event) -> Any:
        self.seen.append(event)
        Crowd.inside += 1
        Crowd.most = max(Crowd.most, Crowd.inside)
        await asyncio.sleep(0.05)
        Crowd.inside -= 1
        return self.work(event)


@outside_alone
def test_those_that_are_all_async_occupy_no_thread(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 1, "ASYNC_CONCURRENCY": 50}
    Crowd.most = 0
    first = Crowd("a", fails_first(1), retry=outbox.Fixed(0.01))
    second = Crowd("b", nothing)
    with registered(first, second), outbox.Worker():
        ids = write(50)
        wait_until(lambda: statuses() == {"DONE": 50}, what="50 DONE")
    assert (len(first.seen), len(second.seen)) == (100, 50)
    assert Crowd.most > 10  # calls in the one thread would reach 1
    assert {title for each in ids for title in states(each)} == {f"{PLACED} a", f"{PLACED} b"}


# -- the documentation -----------------------------------------------------------------------------


@both
def test_the_samples_of_the_how_to(outside: bool) -> None:
    Order.objects.create(sku="B-7", quantity=0)
    warehouse, mail = Mock(), Mock()
    mail.send.side_effect = [ConnectionError("no answer"), None]
    given = {"warehouse": warehouse, "mail": mail, "Order": Order, "F": F}
    with samples.run("how-to/listen.md#Let several listeners share an event", **given):
        (event_id,) = write(payload={"sku": "B-7", "customer": "ann@example.org"})
        drain()
        assert statuses() == {"RETRY": 1}
        assert 25 < lease_ends_in(event_id) < 95
        OutboxEvent.objects.update(available_at=now())
        drain()
    assert statuses() == {"DONE": 1}
    warehouse.reserve.assert_called_once_with("B-7", idempotency_key=event_id)
    assert mail.send.call_count == 2
    assert Order.objects.get().quantity == 1
    assert states(event_id) == {
        PLACED: "done",
        f"{PLACED} mail": "done",
        "order.* statistics": "done",
    }


@both
def test_29_who_succeeded_is_not_run_again_when_another_fails(outside: bool) -> None:
    (event_id,) = write()
    good, bad = Listener("", effect), Listener("mail", fails_first(2), retry=SOON)
    with registered(good, bad):
        drain()
        assert statuses() == {"RETRY": 1}
        assert states(event_id) == {PLACED: "done", f"{PLACED} mail": "due"}
        drain(2)
    assert statuses() == {"DONE": 1}
    assert len(good.seen) == Effect.objects.count() == 1
    assert bad.attempts == [0, 1, 2]


@both
def test_with_retention_of_nothing_the_row_goes_when_all_are_done(
    outside: bool, settings: Any
) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0}
    write()
    with registered(Listener("", nothing), Listener("mail", fails_first(1), retry=SOON)):
        drain()
        assert statuses() == {"RETRY": 1}
        drain()
    assert not OutboxEvent.objects.exists()


@outside_alone
def test_a_lease_that_is_lost_between_two_listeners_stops_the_second(settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 0.9, "DRAIN_TIMEOUT": 0.5}

    def loses_it(event: outbox.Event) -> None:
        OutboxEvent.objects.filter(pk=event.event_id).update(
            locked_by="thief", available_at=now() + timedelta(seconds=60)
        )
        wait_until(lambda: not current(worker), what="a late lease")

    first, second = Listener("a", loses_it), Listener("b", nothing)
    with registered(first, second):
        worker = outbox.Worker()
        with worker:
            (event_id,) = write()
            wait_until(lambda: first.seen)
            wait_until(lambda: not worker._held.running(), what="the delivery's end")
    assert second.seen == []
    assert row(event_id).locked_by == "thief"


def current(worker: outbox.Worker) -> bool:
    return all(worker._held.is_current(each) for each in worker._held.running())


@both
def test_an_atomic_one_commits_its_own_part(outside: bool) -> None:
    """Its effects stay although another listener fails, and are not repeated."""
    (event_id,) = write()
    booked = Listener("book", effect, atomic=True)
    bad = Listener("mail", fails_first(2), retry=SOON)
    with registered(bad, booked):
        drain(3)
    assert [*Effect.objects.values_list("phase", flat=True)] == [f"{PLACED} book"]
    assert statuses() == {"DONE": 1}
    assert len(booked.seen) == 1
    assert row(event_id).attempts == 2


@both
def test_an_atomic_one_that_fails_leaves_nothing_and_harms_no_other(outside: bool) -> None:
    write()

    def after_all(event: outbox.Event) -> None:
        effect(event)
        raise LookupError

    bad = Listener("book", after_all, atomic=True, retry=ONCE)
    with registered(Listener("a", effect), bad, Listener("z", effect)):
        drain()
    assert {*Effect.objects.values_list("phase", flat=True)} == {f"{PLACED} a", f"{PLACED} z"}
    assert statuses() == {"DEAD": 1}


def leaves_open(event: outbox.Event) -> None:
    effect(event)
    transaction.atomic().__enter__()
