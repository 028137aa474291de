"""Drains on each database: what they claim, share, and undo with savepoints."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.table import claim, in_thread, insert, lease_ends_in, listening, row, statuses, write
from tests.test_drain import both, inside, nothing, outside_alone
from tests.testapp.models import Effect, Order
from tests.waiting import MovedClock, wait_until


def leaves_an_effect(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase="end")


# -- what it does ----------------------------------------------------------------------------------


@both
def test_returns_the_number_of_deliveries(outside: bool) -> None:
    assert outbox.drain() == 0
    write(7)
    with listening(leaves_an_effect):
        assert outbox.drain() == 7
        assert outbox.drain() == 0
    assert statuses() == {"DONE": 7}
    assert Effect.objects.count() == 7


@both
def test_oldest_due_first(outside: bool) -> None:
    seen: list[str] = []
    (second,) = insert(due=-10)
    (first,) = insert(due=-20)
    (third,) = insert(due=-5)
    with listening(lambda event: seen.append(event.event_id)):
        outbox.drain()
    assert seen == [first, second, third]


@both
def test_what_another_holds_is_left_and_what_was_lost_is_taken(outside: bool) -> None:
    (held,) = insert(due=-1)
    claim("another")
    (lost,) = insert(due=-1, locked_by="lost")
    with listening(nothing):
        assert outbox.drain() == 1
    assert row(held).locked_by == "another"
    assert row(lost).status == Status.DONE


# -- what a listener does wrong --------------------------------------------------------------------


@both
def test_a_listeners_integrity_error_is_its_own(outside: bool) -> None:
    """Only that delivery fails; the surrounding transaction and the next event are unharmed."""

    def fails_in_the_database(event: outbox.Event) -> None:
        if event.payload["n"] == 1:
            OutboxEvent.objects.create(event_id=event.event_id)
        leaves_an_effect(event)

    Order.objects.create(sku="before")
    write(3)
    with listening(fails_in_the_database, retry=outbox.Fixed(max_attempts=1)):
        assert outbox.drain() == 3
    assert Order.objects.count() == 1
    assert Effect.objects.count() == 2
    assert statuses() == {"DONE": 2, "DEAD": 1}
    assert "IntegrityError" in (OutboxEvent.objects.dead().get().last_error or "")


@both
def test_an_integrity_error_that_was_swallowed_spoils_nothing_either(outside: bool) -> None:
    def swallows(event: outbox.Event) -> None:
        if event.payload["n"] == 0:
            try:
                OutboxEvent.objects.create(event_id=event.event_id)
            except IntegrityError:
                return
        leaves_an_effect(event)

    write(2)
    with listening(swallows):
        assert outbox.drain() == 2
    assert statuses() == {"DONE": 2}
    assert Effect.objects.count() == 1


@both
def test_a_leaked_transaction_is_undone_and_the_next_is_clean(outside: bool) -> None:
    depths: list[int] = []

    def leaks(event: outbox.Event) -> None:
        depths.append(len(connection.atomic_blocks))
        transaction.atomic().__enter__()
        leaves_an_effect(event)

    def drain_and_go_on() -> None:
        start = (connection.in_atomic_block, len(connection.atomic_blocks))
        assert outbox.drain() == 2
        assert (connection.in_atomic_block, len(connection.atomic_blocks)) == start
        write(event_type="order.later")  # the caller's connection still works

    write(2)
    with listening(leaks):
        if outside:  # in a thread, so a broken connection harms no other test
            in_thread(drain_and_go_on).result(30)
        else:
            drain_and_go_on()
    assert depths[0] == depths[1]
    assert Effect.objects.count() == 0
    assert OutboxEvent.objects.filter(event_type="order.later").exists()


@both
def test_an_interrupt_releases_and_propagates(outside: bool) -> None:
    first, second, third = [insert(due=-9 + n, attempts=2)[0] for n in range(3)]

    def interrupted(event: outbox.Event) -> None:
        if event.event_id == second:
            raise KeyboardInterrupt

    with listening(interrupted), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert row(first).status == Status.DONE
    for event_id in (second, third):
        after = row(event_id)
        assert (after.status, after.locked_by, after.attempts) == (Status.NEW, None, 2)
        assert lease_ends_in(event_id) <= 0


# -- inside a transaction --------------------------------------------------------------------------


@inside
def test_inside_each_delivery_has_its_savepoint_and_no_thread() -> None:
    seen: list[tuple[bool, int]] = []

    def listener(event: outbox.Event) -> None:
        heartbeats = [each for each in threading.enumerate() if "heartbeat" in each.name]
        seen.append((connection.in_atomic_block, len(heartbeats)))

    write(2)
    with listening(listener):
        outbox.drain()
    assert seen == [(True, 0)] * 2


@inside
def test_inside_the_caller_can_still_roll_all_back() -> None:
    with transaction.atomic(), listening(leaves_an_effect):
        write(2)
        assert outbox.drain() == 2
        transaction.set_rollback(True)
    assert (statuses(), Effect.objects.count()) == ({}, 0)


# -- outside of one --------------------------------------------------------------------------------


@outside_alone
def test_267_a_slow_listener_keeps_its_lease(settings: Any, clock: MovedClock) -> None:
    settings.OUTBOX = {"LEASE": 6}
    go = threading.Event()
    entered: list[str] = []

    def slow(event: outbox.Event) -> None:
        entered.append(event.event_id)
        assert go.wait(30)

    (event_id,) = write()
    with listening(slow):
        draining = in_thread(outbox.drain)
        try:
            wait_until(lambda: entered)
            for _ in range(2):
                end = row(event_id).available_at
                clock.advance(3)  # more than the third of a lease after which it is renewed
                wait_until(lambda end=end: row(event_id).available_at > end, what="a renewal")  # type: ignore[misc]
            assert outbox.drain() == 0  # no other drain gets it
        finally:
            go.set()
        assert draining.result(20) == 1
    assert entered == [event_id]
    assert (row(event_id).status, row(event_id).rescues) == (Status.DONE, 0)


@outside_alone
def test_267_drains_side_by_side_share(settings: Any) -> None:
    settings.OUTBOX = {"POLL_BATCH_SIZE": 10}
    ids = insert(80, due=-1)
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id)):
        futures = [in_thread(outbox.drain) for _ in range(3)]
        counts = [future.result(60) for future in futures]
        counts.append(outbox.drain())  # events that a lost race left
    assert sorted(seen) == sorted(ids)
    assert sum(counts) == 80


@outside_alone
def test_w16_a_lease_that_was_stolen_is_not_settled() -> None:
    def stolen(event: outbox.Event) -> None:
        OutboxEvent.objects.filter(pk=event.event_id).update(locked_by="thief")

    (event_id,) = write()
    with listening(stolen):
        outbox.drain()
    assert (row(event_id).status, row(event_id).locked_by) == (Status.NEW, "thief")


@outside_alone
def test_no_transaction_is_open_around_a_listener() -> None:
    seen: list[bool] = []
    write()
    with listening(lambda event: seen.append(connection.in_atomic_block)):
        outbox.drain()
    assert seen == [False]
