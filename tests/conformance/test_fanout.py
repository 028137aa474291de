"""Events of several listeners on each database: their progress, and what each one undoes."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.table import PLACED, now, row, statuses, write
from tests.test_fanout import (
    ONCE,
    SOON,
    Listener,
    both,
    drain,
    effect,
    fails_first,
    nothing,
    outside_alone,
    registered,
    states,
)
from tests.testapp.models import Effect
from tests.waiting import wait_until


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


@both
def test_what_an_atomic_one_committed_outlives_the_end_of_the_caller(outside: bool) -> None:
    """Its progress is committed before the next listener is called."""
    (event_id,) = write()

    def interrupted(event: outbox.Event) -> None:
        raise KeyboardInterrupt

    booked = Listener("book", effect, atomic=True)
    last = Listener("mail", interrupted)
    with registered(booked, last):
        with pytest.raises(KeyboardInterrupt):
            drain()
        if outside:  # inside, its savepoint is undone too
            assert states(event_id) == {f"{PLACED} book": "done"}
        last.work = nothing
        OutboxEvent.objects.update(available_at=now(), locked_by=None)
        drain()
    assert statuses() == {"DONE": 1}
    assert Effect.objects.count() == 1


@both
def test_a_statement_that_one_breaks_undoes_nothing_of_another(outside: bool) -> None:
    write()

    def breaks(event: outbox.Event) -> None:
        effect(event)
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")

    bad = Listener("m", breaks, retry=ONCE)
    with registered(Listener("a", effect), bad, Listener("z", effect)):
        drain()
    kept = {*Effect.objects.values_list("phase", flat=True)}
    assert kept >= {f"{PLACED} a", f"{PLACED} z"}
    assert statuses() == {"DEAD": 1}


def leaves_open(event: outbox.Event) -> None:
    effect(event)
    transaction.atomic().__enter__()


@both
def test_a_transaction_that_one_leaves_open_undoes_nothing_of_another(
    outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write()
    careless = Listener("m", leaves_open)
    with registered(Listener("a", effect), careless, Listener("z", effect)):
        drain()
    kept = {*Effect.objects.values_list("phase", flat=True)}
    assert kept >= {f"{PLACED} a", f"{PLACED} z"}
    assert not connection.in_atomic_block or not outside
    assert statuses() == {"DONE": 1}


@outside_alone
def test_a_worker_undoes_nothing_of_the_others_either(settings: Any) -> None:
    settings.OUTBOX = {}
    careless = Listener("m", leaves_open)
    with registered(Listener("a", effect), careless, Listener("z", effect)), outbox.Worker():
        write()
        wait_until(lambda: statuses() == {"DONE": 1}, what="DONE")
    kept = {*Effect.objects.values_list("phase", flat=True)}
    assert kept >= {f"{PLACED} a", f"{PLACED} z"}
