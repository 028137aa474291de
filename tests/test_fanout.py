"""Several listeners of one event: each has a row of its own, with all that happens to it."""

from __future__ import annotations

import asyncio
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
from tests.table import PLACED, history, lease_ends_in, listening, now, statuses, write
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

ONCE = outbox.Fixed(0, max_attempts=1)
SOON = outbox.Fixed(0, max_attempts=4)

Work = Callable[[outbox.Event], Any]


class Listener:
    """Records the events that it gets and calls ``work`` with each."""

    def __init__(self, name: str, work: Work, **options: Any) -> None:
        self.name, self.work, self.options = name, work, options
        self.seen: list[outbox.Event] = []

    @property
    def ids(self) -> list[str]:
        return [event.event_id for event in self.seen]

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


def rows_of(event_id: str) -> dict[str, OutboxEvent]:
    """Return the rows of an event by the names of their listeners."""
    rows = OutboxEvent.objects.of_event(event_id)
    return {str(each.listener).removeprefix(PLACED).strip(): each for each in rows}


def outcomes(event_id: str) -> dict[str, tuple[str, int]]:
    """Return status and attempts by the names of an event's listeners."""
    rows = rows_of(event_id)
    return {name: (Status(each.status).name, each.attempts) for name, each in rows.items()}


# -- each has its own ------------------------------------------------------------------------------


@both
def test_each_that_dies_keeps_its_own_error_whole(outside: bool) -> None:
    (event_id,) = write()

    def at_length(event: outbox.Event) -> None:
        raise LookupError(f"{event.listener} {'x' * 1000}")

    with registered(
        Listener("", at_length, retry=ONCE),
        Listener("mail", at_length, retry=ONCE),
        Listener("slow", fails_first(1), retry=SOON),
    ):
        drain(2)
    assert outcomes(event_id) == {"": ("DEAD", 1), "mail": ("DEAD", 1), "slow": ("DONE", 1)}
    for name in ("", "mail"):
        found = rows_of(event_id)[name]
        said = f"LookupError: {found.listener} {'x' * 1000}"
        assert str(found.last_error).startswith(f"{said}\nTraceback")
        assert [each.listener for each in history(found.id)] == [found.listener]


@both
def test_each_policy_sees_its_own_executions(outside: bool) -> None:
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
        (event_id,) = write()
        drain(3)
        assert outcomes(event_id) == {"": ("DONE", 0), "two": ("DEAD", 2), "four": ("RETRY", 3)}
        drain()
    assert (two.attempts, four.attempts) == ([0, 1], [0, 1, 2, 3])
    assert asked == {"two": [1], "four": [1, 2, 3]}
    assert outcomes(event_id)["four"] == ("DEAD", 4)


@both
def test_each_gets_a_payload_of_its_own(outside: bool) -> None:
    """A listener that changes its payload does not affect the next one."""
    write(payload={"lines": [1]})
    first = Listener("", lambda event: event.payload["lines"].append(2))
    second = Listener("mail", nothing)
    with registered(first, second):
        drain()
    assert [event.payload for event in second.seen] == [{"lines": [1]}]


@pytest.mark.parametrize("written_first", [False, True], ids=["at the write", "at the claim"])
@pytest.mark.django_db
def test_293_each_that_matches_is_called_once(written_first: bool) -> None:
    """Of those without a name, only the most specific one matches."""
    called: list[str] = []

    def note(event: outbox.Event) -> None:
        called.append(event.listener)

    matching = [
        ("*", {"name": "all"}),
        ("order.*", {"name": "orders"}),
        ("order.*", {}),
        (PLACED, {"name": "second"}),
        (PLACED, {}),
        (PLACED, {"name": "exact", "aggregate_type": "shop.Order"}),
        (PLACED, {"name": "other", "aggregate_type": "shop.Cart"}),
    ]
    fields: dict[str, Any] = {"aggregate_type": "shop.Order", "aggregate_id": "1"}
    if written_first:
        write(**fields)
    with ExitStack() as stack:
        for event_type, options in matching:
            stack.enter_context(listening(Listener("", note), event_type, **options))
        if not written_first:
            write(**fields)
        assert outbox.drain() == 5
        assert outbox.drain() == 0
    assert sorted(called) == [
        "* all",
        "order.* orders",
        PLACED,
        f"{PLACED} second",
        f"{PLACED}[shop.Order] exact",
    ]


@both
def test_a_drain_counts_and_limits_deliveries(outside: bool) -> None:
    with registered(Listener("", nothing), Listener("mail", nothing)):
        write()
        assert outbox.drain(limit=1) == 1
        assert statuses() == {"NEW": 1, "DONE": 1}
        assert outbox.drain() == 1
    assert statuses() == {"DONE": 2}


@both
def test_29_who_succeeded_is_not_run_again_when_another_fails(outside: bool) -> None:
    good, bad = Listener("", effect), Listener("mail", fails_first(2), retry=SOON)
    with registered(good, bad):
        (event_id,) = write()
        assert outbox.drain() == 2
        assert outcomes(event_id) == {"": ("DONE", 0), "mail": ("RETRY", 1)}
        drain(2)
    assert statuses() == {"DONE": 2}
    assert len(good.seen) == Effect.objects.count() == 1
    assert bad.attempts == [0, 1, 2]


@both
def test_a_row_goes_when_its_listener_is_done_and_the_receipt_stays(
    outside: bool, settings: Any
) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0}
    (event_id,) = write()
    good = Listener("", nothing)
    with registered(good, Listener("mail", fails_first(1), retry=SOON)):
        drain()
        assert outcomes(event_id) == {"mail": ("RETRY", 1)}
        drain()
    assert len(good.seen) == 1  # the row that remained is not given to it again
    assert not OutboxEvent.objects.exists()


@both
def test_a_replay_calls_only_whom_it_is_for(outside: bool) -> None:
    (event_id,) = write()
    good, bad = Listener("", effect), Listener("mail", fails, retry=outbox.Fixed(0, max_attempts=2))
    with registered(good, bad):
        drain(2)
        assert outcomes(event_id) == {"": ("DONE", 0), "mail": ("DEAD", 2)}
        assert OutboxEvent.objects.dead().replay() == 1
        drain()
        assert outcomes(event_id)["mail"] == ("RETRY", 1)
        bad.work = nothing
        drain()
    assert bad.attempts == [0, 1, 0, 1]  # it has all its attempts again
    assert statuses() == {"DONE": 2}
    assert len(good.seen) == 1


# -- the order of a key, in each lane --------------------------------------------------------------


@both
@pytest.mark.parametrize("written_first", [False, True], ids=["at the write", "at the claim"])
def test_one_that_fails_holds_up_its_own_lane_alone(outside: bool, written_first: bool) -> None:
    ids = write(3, key="a") if written_first else []
    good, bad = Listener("", nothing), Listener("mail", fails_first(1), retry=SOON)
    with registered(good, bad):
        ids = ids or write(3, key="a")
        drain()
        assert (good.ids, bad.ids) == (ids, ids[:1])
        drain(3)
    assert good.ids == ids
    assert bad.ids == [ids[0], ids[0], ids[1], ids[1], ids[2], ids[2]]
    assert statuses() == {"DONE": 6}


@both
def test_listeners_with_one_name_share_a_lane_whatever_their_types(outside: bool) -> None:
    unnamed, mail = Listener("", nothing), Listener("mail", nothing)
    failing = Listener("mail", fails_first(1), retry=SOON)
    with (
        registered(Listener("", nothing), failing),
        listening(unnamed, "order.paid"),
        listening(mail, "order.paid", name="mail"),
    ):
        (placed,) = write(key="a")
        (paid,) = write(event_type="order.paid", key="a")
        drain()
        assert (failing.ids, mail.ids, unnamed.ids) == ([placed], [], [paid])
        drain()
    assert (failing.ids, mail.ids) == ([placed, placed], [paid])


@outside_alone
def test_a_worker_keeps_the_order_of_each_lane_while_one_fails(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 4}
    good = Listener("", nothing)
    bad = Listener("mail", fails_first(1), retry=outbox.Fixed(0.01))
    keys = "abc"
    ids = {key: write(4, key=key) for key in keys}  # by a process without listeners
    with registered(good, bad), outbox.Worker():
        for key in keys * 4:
            ids[key] += write(key=key)
        wait_until(lambda: statuses() == {"DONE": 48}, what="48 DONE")
    for key in keys:
        assert [event.event_id for event in good.seen if event.key == key] == ids[key]
        retried = [event for event in bad.seen if event.key == key and event.attempts]
        assert [event.event_id for event in retried] == ids[key]
    assert (len(good.seen), len(bad.seen)) == (24, 48)


# -- deploys ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("key", [None, "a"])
def test_a_listener_that_is_added_gets_what_waits(outside: bool, key: str | None) -> None:
    """Nobody is called twice, and what has ended before is not brought back."""
    old, failing = Listener("", nothing), Listener("mail", fails_first(1), retry=SOON)
    new = Listener("audit", nothing)
    with registered(old):
        write(key="ended")
        drain()
    with registered(old, failing):
        ids = write(2, key=key)
        drain()
    with registered(old, failing, new):
        drain(3)
    assert old.ids[1:] == ids
    assert new.ids == ids
    assert [failing.ids.count(each) for each in ids] == [2, 2]
    assert statuses() == {"DONE": 7}


@both
def test_a_listener_that_is_removed_holds_up_no_other(outside: bool, settings: Any) -> None:
    """Its row waits for a process that has it; after the grace period it is discarded."""
    settings.OUTBOX = {"UNROUTABLE_GRACE": 600}
    good, gone = Listener("", fails_first(1), retry=SOON), Listener("mail", fails, retry=SOON)
    with registered(good, gone):
        (event_id,) = write()
        drain()
    with registered(good):
        drain()
        assert outcomes(event_id) == {"": ("DONE", 1), "mail": ("NEW", 1)}
        settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
        OutboxEvent.objects.pending().update(available_at=now())
        drain()
    assert outcomes(event_id) == {"": ("DONE", 1), "mail": ("DONE", 1)}
    assert "UnroutableEvent" in str(rows_of(event_id)["mail"].last_error)
    assert (len(good.seen), len(gone.seen)) == (2, 1)


RENAMED = {"formerly": [f"{PLACED} letters", PLACED]}


@both
@pytest.mark.parametrize("route", ["writer", "worker"])
@pytest.mark.parametrize("key", [None, "a"])
def test_a_renamed_listener_is_called_once_whoever_wrote_and_tried(
    outside: bool, settings: Any, key: str | None, route: str
) -> None:
    """Its row is neither lost nor doubled by a process of before or after the rename."""
    settings.OUTBOX = {"ROUTE": route, "UNROUTABLE_GRACE": 0.01}
    old = Listener("letters", fails_first(1), retry=SOON)
    new, audit = Listener("mail", nothing, **RENAMED), Listener("audit", nothing)
    with registered(old):
        ids = write(key=key)
        drain()
    with registered(new, audit):
        ids += write(key=key)
        drain(2)
    assert (old.ids, sorted(new.ids), sorted(audit.ids)) == (ids[:1], ids, ids)
    assert sorted(new.attempts) == [0, 1]
    assert {event.listener for event in new.seen} == {f"{PLACED} mail"}
    assert statuses() == {"DONE": 4}


@both
@pytest.mark.parametrize("key", [None, "a"])
def test_a_process_of_before_a_rename_gives_the_old_listener_no_row(
    outside: bool, settings: Any, key: str | None
) -> None:
    old, new = Listener("letters", nothing), Listener("mail", nothing, **RENAMED)
    with registered(new):
        ids = write(2, key=key)
    with registered(old):
        drain()
    assert statuses() == {"NEW": 2}
    with registered(new):
        outbox.drain(at=now() + timedelta(minutes=5))
    assert (old.ids, new.ids) == ([], ids)
    assert statuses() == {"DONE": 2}


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
        write(50)
        wait_until(lambda: statuses() == {"DONE": 100}, what="100 DONE")
    assert (len(first.seen), len(second.seen)) == (100, 50)
    assert Crowd.most > 10  # calls in the one thread would reach 1


# -- the documentation -----------------------------------------------------------------------------


@both
def test_the_samples_of_the_how_to(outside: bool) -> None:
    Order.objects.create(sku="B-7", quantity=0)
    warehouse, mail = Mock(), Mock()
    mail.send.side_effect = [ConnectionError("no answer"), None]
    given: dict[str, Any] = {"warehouse": warehouse, "mail": mail, "Order": Order, "F": F}
    with samples.run("how-to/listen.md#Let several listeners share an event", **given):
        (event_id,) = write(payload={"sku": "B-7", "customer": "ann@example.org"})
        drain()
        expected = {"": ("DONE", 0), "mail": ("RETRY", 1), "order.* statistics": ("DONE", 0)}
        assert outcomes(event_id) == expected
        assert 25 < lease_ends_in(rows_of(event_id)["mail"].id) < 95
        OutboxEvent.objects.pending().update(available_at=now())
        drain()
    assert statuses() == {"DONE": 3}
    warehouse.reserve.assert_called_once_with("B-7", idempotency_key=event_id)
    assert mail.send.call_count == 2
    assert Order.objects.get().quantity == 1


# -- transactions ----------------------------------------------------------------------------------


@both
def test_an_atomic_one_commits_its_own_part(outside: bool) -> None:
    """Its effects stay although another listener fails, and are not repeated."""
    (event_id,) = write()
    booked = Listener("book", effect, atomic=True)
    bad = Listener("mail", fails_first(2), retry=SOON)
    with registered(bad, booked):
        drain(3)
    assert [*Effect.objects.values_list("phase", flat=True)] == [f"{PLACED} book"]
    assert outcomes(event_id) == {"book": ("DONE", 0), "mail": ("DONE", 2)}
    assert len(booked.seen) == 1


@both
def test_an_atomic_one_that_fails_leaves_nothing_and_harms_no_other(outside: bool) -> None:
    (event_id,) = write()

    def after_all(event: outbox.Event) -> None:
        effect(event)
        raise LookupError

    bad = Listener("book", after_all, atomic=True, retry=ONCE)
    with registered(Listener("a", effect), bad, Listener("z", effect)):
        drain()
    assert {*Effect.objects.values_list("phase", flat=True)} == {f"{PLACED} a", f"{PLACED} z"}
    assert outcomes(event_id) == {"a": ("DONE", 0), "book": ("DEAD", 1), "z": ("DONE", 0)}


def leaves_open(event: outbox.Event) -> None:
    effect(event)
    transaction.atomic().__enter__()
