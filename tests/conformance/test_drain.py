"""Drains on each database: what they claim, share, and undo with savepoints."""

from __future__ import annotations

import os
import threading
from typing import Any

from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.surroundings import both, inside, outside_alone
from tests.table import in_thread, insert, listening, statuses, write
from tests.testapp.models import Effect, Order


def leaves_an_effect(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase="end")


# -- what a listener does wrong --------------------------------------------------------------------


@both
def test_a_listeners_integrity_error_is_its_own(outside: bool) -> None:
    """Only that delivery fails; the surrounding transaction and the next event are unharmed."""

    def fails_in_the_database(event: outbox.Event) -> None:
        if event.payload["n"] == 1:
            OutboxEvent.objects.create(id=event.event_id)
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
