"""``coalesce=``: of the pending deliveries of a slot the newest runs, and the others end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import COALESCED, Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.worker.effects import perform
from django_outbox.worker.held import Held
from django_outbox.worker.intake import coalesce_and_complete
from tests.plans import sent
from tests.table import (
    PLACED,
    claim,
    claimed,
    elsewhere,
    end_leases,
    events_of,
    ids_of,
    in_thread,
    insert,
    listening,
    now,
    row,
    statuses,
    write,
)
from tests.test_pause import pause

pytestmark = pytest.mark.django_db(transaction=True)


PAGE = "index:page:7"
not_sqlite = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="an open SQLite transaction keeps every writer out"
)


def put(number: int, coalesce: str = PAGE, **fields: Any) -> str:
    """Write an event of a slot in a transaction of its own; return its id."""
    [event_id] = write(payload=number, coalesce=coalesce, **fields)
    return event_id


def put_later(number: int) -> str:
    """Write one that is due in an hour."""
    return put(number, deliver_after=3600)


@contextmanager
def delivered(**options: Any) -> Iterator[list[Any]]:
    """Listen during a block; yield the payloads that are delivered."""
    found: list[Any] = []

    def note(event: outbox.Event) -> None:
        found.append(event.payload)

    with listening(note, **options):
        yield found


def ended(*ids: str) -> list[str]:
    """Return which of these deliveries have ended as coalesced."""
    rows = OutboxEvent.objects.filter(pk__in=ids, status=Status.DONE, result=COALESCED)
    rows = rows.filter(available_at=None, locked_by=None, locked_at=None, done_at__isnull=False)
    return [*rows.order_by("pk").values_list("pk", flat=True)]


@contextmanager
def after_the_read(act: Callable[[], object]) -> Iterator[None]:
    """Do something in another session once, when a claim has read what is pending in its slots."""
    dialect = type(dialect_of(connection))
    read, todo = dialect.pending_in_slots, [act]

    def then_act(*args: Any, **named: Any) -> Any:
        found = read(*args, **named)
        while todo:
            in_thread(todo.pop()).result(30)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "pending_in_slots", then_act)
        yield


# -- one worker ------------------------------------------------------------------------------------


def test_the_newest_runs_when_the_first_is_due_and_the_others_end() -> None:
    with delivered() as seen:
        first, second, newest = put(1), put_later(2), put_later(3)
        assert outbox.drain() == 1
    assert seen == [3]
    assert ended(first, second, newest) == [first, second]
    done = row(newest)
    assert (done.status, done.result, done.available_at, done.key) == (
        Status.DONE,
        None,
        None,
        None,
    )


def test_nothing_runs_before_the_first_is_due() -> None:
    with delivered() as seen:
        put_later(1)
        put_later(2)
        assert outbox.drain() == 0
        assert outbox.drain(at=now() + timedelta(hours=2)) == 1
    assert seen == [2]


def test_each_slot_of_each_listener_is_by_itself() -> None:
    with delivered() as seen, delivered(name="mail") as mailed:
        for number in range(3):
            put(number)
            put(10 + number, "index:page:8")
        write(2, payload=20)
        assert outbox.drain() == 2 * 4
    assert sorted(seen) == sorted(mailed) == [2, 12, 20, 20]


def test_one_call_that_writes_several_keeps_their_order() -> None:
    def of(number: int) -> outbox.Event:
        own = f"{9 - number}"  # ids that say nothing of the order
        return outbox.Event(event_type=PLACED, payload=number, coalesce=PAGE, event_id=own)

    with delivered() as seen:
        with transaction.atomic():
            outbox.write_many([*map(of, range(9))])
        outbox.drain()
    assert seen == [8]


@override_settings(OUTBOX={"MODE": "ordered"})
def test_in_mode_ordered_it_has_no_key() -> None:
    with delivered() as seen:
        put(1)
        put(2)
        outbox.drain()
    assert seen == [2]


def test_what_was_delivered_ends_nothing() -> None:
    with delivered() as seen:
        for number in range(3):
            put(number)
            outbox.drain()
    assert seen == [0, 1, 2]
    assert not OutboxEvent.objects.filter(result=COALESCED)


def test_a_claim_without_a_slot_sends_nothing_more() -> None:
    with delivered():
        write(3)
        assert not [sql for sql in sent(outbox.drain) if "coalesced" in sql or "stream =" in sql]


def slotted(count: int, slot: str, **columns: Any) -> list[str]:
    """Insert rows of a slot; return their ids, the newest last."""
    given = {"listener": PLACED, "routes": registry.digest(PLACED), **columns}
    return insert(count, payload="1", stream=slot, seq=1, counted="seq", **given)


def test_of_thousands_in_a_slot_only_the_newest_runs() -> None:
    with delivered() as seen:
        one = row(put(0))
        ids = slotted(2500, one.stream or "", due=3600)
        OutboxEvent.objects.filter(pk=one.pk).update(seq=0)
        assert outbox.drain() == 1
    assert seen == [1]
    assert ended(one.pk, *ids) == [one.pk, *ids[:-1]]


# -- retries, deaths, people -----------------------------------------------------------------------


def test_a_retry_gives_way_to_a_newer_one() -> None:
    seen = []

    def fail_first(event: outbox.Event) -> None:
        seen.append(event.payload)
        if event.payload == 1:
            raise ValueError("no")

    with listening(fail_first, retry=outbox.Fixed(600)):
        first = put(1)
        outbox.drain()
        second = put(2)
        outbox.drain(at=now() + timedelta(hours=1))
    assert seen == [1, 2]
    assert ended(first, second) == [first]
    assert [each.reason for each in outbox.fate(first)] == [COALESCED]


def test_a_dead_newest_ends_nothing_and_a_replay_ends_the_older() -> None:
    broken = [True]
    seen = []

    def fail(event: outbox.Event) -> outbox.Dead | None:
        seen.append(event.payload)
        return outbox.Dead() if broken else None

    with listening(fail):
        newest = put(2)
        outbox.drain()
        broken.clear()
        older = put_later(3)
        OutboxEvent.objects.filter(pk=older).update(seq=1)
        assert OutboxEvent.objects.all().replay() == 1
        outbox.drain()
    assert seen == [2, 2]
    assert ended(newest, older) == [older]
    assert not OutboxStream.objects.exists()


def test_people_change_a_row_of_a_slot_as_one_without_a_key() -> None:
    with delivered() as seen:
        first = put(1, unique_key="u")
        assert outbox.reschedule(event_id=first, deliver_after=3600) == 1
        assert outbox.drain() == 0
        assert OutboxEvent.objects.all().run_now() == 1
        assert outbox.cancel(unique_key="u") == 1
        outbox.drain()
    assert not seen and not OutboxEvent.objects.exists()


def test_a_paused_newest_is_left_alone() -> None:
    with delivered() as seen:
        first, newest = put(1), put(2)
        OutboxEvent.objects.filter(pk=newest).update(event_type="paused")
        pause("event_type", "paused")
        outbox.drain()
        assert seen == [1]
        assert row(newest).status == Status.NEW
        OutboxPause.objects.all().resume()
        outbox.drain()
    assert ended(first, newest) == []


# -- several workers -------------------------------------------------------------------------------


def test_what_another_worker_has_leased_is_left_alone() -> None:
    with delivered() as seen:
        older = put(1)
        assert ids_of(claim("other")) == [older]
        middle = put(2)
        newest = put(3)
        outbox.drain()
        assert seen == [3]
        assert (row(older).locked_by, ended(older, middle)) == ("other", [middle])
        leased = put(5)
        assert ids_of(claim("other")) == [leased]
        OutboxEvent.objects.filter(pk=put(4)).update(seq=1)
        outbox.drain()
    assert seen == [3, 4]  # it may have been committed after the newest was started
    assert (row(leased).locked_by, row(newest).status) == ("other", Status.DONE)


def test_a_rescued_row_is_replaced_and_its_rescue_is_kept() -> None:
    rescues = []

    def note(event: outbox.Event) -> None:
        rescues.append((event.payload, row(event.event_id).rescues))

    with listening(note):
        lost = put(1)
        claim("lost")
        end_leases([lost])
        put_later(2)
        outbox.drain()
    assert rescues == [(2, 1)]
    assert ended(lost) == [lost]


def test_a_suspect_is_not_taken_for_another() -> None:
    with delivered() as seen:
        suspect = put_later(2)
        OutboxEvent.objects.filter(pk=suspect).update(rescues=2)
        put(1)
        OutboxEvent.objects.exclude(pk=suspect).update(seq=1)
        outbox.drain()
    assert seen == [1]
    assert row(suspect).status == Status.NEW


def test_a_write_meanwhile_stays_and_is_delivered_later() -> None:
    with delivered() as seen:
        put(1)
        newest = put_later(2)
        with after_the_read(lambda: put(3)):
            outbox.drain(limit=1)
        assert seen == [2]
        outbox.drain()
    assert seen == [2, 3]
    assert ended(newest) == []


def test_a_newest_that_another_worker_leases_meanwhile_is_left_to_it() -> None:
    with delivered() as seen:
        first, second, newest = put(1), put_later(2), put_later(3)
        later = now() + timedelta(hours=2)
        with after_the_read(lambda: claim("other", ids=[newest], at=later)):
            outbox.drain()
    assert seen == [1]
    assert (row(newest).locked_by, row(second).status) == ("other", Status.NEW)
    assert ended(first, second, newest) == []


def test_an_older_one_that_another_worker_leases_meanwhile_is_left_to_it() -> None:
    with delivered() as seen:
        older = put_later(1)
        put(2)
        later = now() + timedelta(hours=2)
        with after_the_read(lambda: claim("other", ids=[older], at=later)):
            outbox.drain()
    assert seen == [2]
    assert row(older).locked_by == "other"


def test_what_runs_here_already_replaces_none() -> None:
    """An older row may have been committed after it was started."""
    with delivered():
        running, held = put(2), Held(30.0)
        held.add_rows(events_of(claimed().rows))
        end_leases([running])
        older = put(1)
        OutboxEvent.objects.filter(pk=older).update(seq=1)
        left, _ = perform(connection, coalesce_and_complete(events_of(claimed().rows), held))
    assert sorted(each.id for each in left) == [running, older]
    assert ended(older) == []


@not_sqlite
def test_rows_that_a_transaction_has_locked_are_skipped() -> None:
    def lock(*ids: str) -> Callable[[], object]:
        return lambda: [*OutboxEvent.objects.select_for_update().filter(pk__in=ids)]

    with delivered() as seen:
        older, newest = put_later(1), put_later(3)
        put(2)
        OutboxEvent.objects.filter(pk=newest).update(seq=now().timestamp() * 2_000_000)
        with elsewhere(lock(older, newest)):
            outbox.drain()
        assert seen == [2]
        assert statuses() == {"NEW": 2, "DONE": 1}
        outbox.drain(at=now() + timedelta(hours=2))
    assert seen == [2, 3]
    assert ended(older) == [older]


# -- routing ---------------------------------------------------------------------------------------


def test_a_row_that_a_worker_routes_is_in_the_slots_of_its_listeners() -> None:
    with override_settings(OUTBOX={"ROUTE": "worker"}):
        put(1)
        put(2)
        newest = put_later(3)
        assert row(newest).listener is None
        with delivered() as seen, delivered(name="mail") as mailed:
            outbox.drain()
            assert seen == mailed == [3]
            put(4)
    with delivered() as seen, delivered(name="mail") as mailed:
        put_later(5)
        outbox.drain()
    assert seen == mailed == [5]
    assert statuses() == {"DONE": OutboxEvent.objects.count()}


def test_a_replacement_is_given_to_the_listeners_that_it_lacks() -> None:
    with delivered() as seen:
        put(1)
        put_later(2)
        with delivered(name="mail") as mailed:
            outbox.drain()
    assert (seen, mailed) == ([2], [2])
