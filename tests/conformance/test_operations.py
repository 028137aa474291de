"""Operations: the log of what people do, whichever way, and what a worker works off."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime, timedelta, timezone
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.db.models import Q

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import (
    OutboxEvent,
    OutboxLease,
    OutboxOperation,
    OutboxPause,
    OutboxQuerySet,
    OutboxStream,
    bulk,
)
from django_outbox.models.bulk import apply_to_batch, work_off
from django_outbox.models.fields import DatabaseNow, IsDead
from django_outbox.models.operation import KEPT, condition
from django_outbox.worker.effects import ask, noted, perform
from django_outbox.worker.housekeeper import Operations
from django_outbox.worker.pauses import KnownPauses, end_pauses
from django_outbox.worker.polling import Wakeup
from tests.cases import cases
from tests.databases import vendor
from tests.sessions import waiters
from tests.table import PLACED, histories, in_thread, insert, keyed, listening, now, undone, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def dead(count: int = 1, **columns: Any) -> list[str]:
    return insert(count, due=None, status=Status.DEAD, done_at=now(), **columns)


def waiting(count: int = 1) -> list[str]:
    return insert(count, due=3600)


def leased(count: int = 1) -> list[str]:
    return insert(count, due=30, locked_by="w", locked_at=now())


def log() -> list[tuple[str, str, int]]:
    return [*OutboxOperation.objects.order_by("pk").values_list("kind", "by", "done")]


def pause() -> None:
    OutboxPause.objects.pause("event_type", "order.placed", by="ada")


ACTS = {
    "replay": (dead, lambda rows: rows.replay(by="ada")),
    "discard": (dead, lambda rows: rows.discard(by="ada")),
    "run_now": (waiting, lambda rows: rows.run_now(by="ada")),
    "skip": (lambda count: keyed("k", count), lambda rows: rows.skip(by="ada")),
    "cancel": (waiting, lambda rows: rows.cancel(by="ada")),
    "reschedule": (waiting, lambda rows: rows.reschedule(HOUR, by="ada")),
    "release": (leased, lambda rows: rows.release(by="ada")),
}


@cases("kind", ACTS)
@undone()
def test_each_verb_adds_one_row_for_all_its_batches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_outbox.models.replay.BATCH_SIZE", 2)
    make, act = ACTS[kind]
    ids = make(5)
    assert act(OutboxEvent.objects.filter(pk__in=ids)) == 5
    assert log() == [(kind, "ada", 5)]
    row = OutboxOperation.objects.get()
    assert all(each in row.about for each in ids)
    assert row.state == "done"
    assert row.started_at <= row.ended_at <= now()
    assert act(OutboxEvent.objects.filter(pk__in=ids).none()) == 0
    assert len(log()) == 1


def test_batches_of_one_replay_share_a_row() -> None:
    dead(5)
    assert [*OutboxEvent.objects.dead().replay_batches(size=2, by="ada")] == [2, 2, 1]
    assert log() == [("replay", "ada", 5)]


def test_what_is_rolled_back_is_not_in_the_log() -> None:
    dead(3)
    batches = OutboxEvent.objects.dead().replay_batches(size=2, by="ada")
    with pytest.raises(LookupError), transaction.atomic():
        next(batches)
        raise LookupError
    assert log() == []
    OutboxOperation.objects.note("pause", "may get the id of the lost row", by="ben")
    assert [*batches] == [1]
    assert log() == [("pause", "ben", 0), ("replay", "ada", 1)]


def test_business_code_that_cancels_or_reschedules_adds_a_row() -> None:
    first, second = waiting(2)
    assert outbox.reschedule(event_id=first, deliver_after=60) == 1
    assert outbox.cancel(event_id=second) == 1
    assert outbox.cancel(event_id=second) == 0
    assert log() == [("reschedule", "", 1), ("cancel", "", 1)]
    assert first in OutboxOperation.objects.order_by("pk")[0].about


def test_a_breaker_opens_and_closes_in_the_transaction_that_logs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = ask("open_breaker", queue="hooks", pause=30.0, reason="away")
    assert noted(opened, "breaker_opened", "queue hooks")(connection)
    assert not noted(opened, "breaker_opened", "queue hooks")(connection)
    assert log() == [("breaker_opened", "", 0)]

    def refuse(*args: Any, **given: Any) -> None:
        raise DatabaseError("no room")

    monkeypatch.setattr(OutboxOperation, "add", refuse)
    with pytest.raises(DatabaseError):
        noted(ask("close_breaker", queue="hooks"), "breaker_closed", "queue hooks")(connection)
    assert OutboxPause.objects.filter(kind="breaker", name="hooks").exists()


def test_a_pause_and_its_end() -> None:
    pause()
    pause()
    insert(3, queue=f"paused:{OutboxPause.objects.get().pk}")
    assert OutboxPause.objects.resume(by="ben").events == 3
    assert OutboxPause.objects.resume(by="ben").pauses == 0
    assert log() == [("pause", "ada", 0), ("resume", "ben", 3)]
    assert {"order.placed" in each.about for each in OutboxOperation.objects.all()} == {True}


def test_a_breaker_that_a_person_ends_and_a_pause_that_a_worker_ends() -> None:
    given = {"paused_at": now(), "until": now() - HOUR}
    OutboxPause.objects.create(kind="breaker", name="default", **given)
    OutboxPause.objects.create(kind="event_type", name="order.placed", **given)
    end_pauses("default")
    OutboxPause.objects.resume(by="ada")
    assert log() == [("resume", "", 0), ("breaker_closed", "ada", 0)]


def test_a_listener_is_given_older_events() -> None:
    with listening(lambda event: None):
        write(3)
        outbox.drain()
    with listening(lambda event: None, name="ledger"):
        assert OutboxEvent.objects.deliver_to(f"{PLACED} ledger", by="ada") == 3
        assert OutboxEvent.objects.deliver_to(f"{PLACED} ledger", by="ada") == 0
        write(2)
        outbox.drain()
    assert log() == [("deliver_to", "ada", 3)]
    with listening(lambda event: None, name="audit"):
        options = ["--listener", f"{PLACED} audit", "--since", "1h", "--by", "eve"]
        call_command("outbox_replay", *options, stdout=StringIO())
    assert log()[1:] == [("deliver_to", "eve", 5)]


COMMANDS = {
    "replay": ["outbox_replay", "--event-type", "order.placed", "--by", "ada"],
    "discard": ["outbox_dead", "discard", "--event-type", "order.placed", "--by", "ada"],
    "pause": ["outbox_pause", "--event-type", "order.placed", "--force", "--by", "ada"],
    "resume": ["outbox_pause", "--end", "--event-type", "order.placed", "--by", "ada"],
}


@cases("kind", COMMANDS)
@undone()
def test_each_command_adds_one_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_outbox.management.arguments.BATCH_SIZE", 2)
    dead(3, event_type="order.placed")
    dead(1, event_type="order.paid")
    if kind == "resume":
        pause()
        OutboxOperation.objects.all().delete()
    call_command(*COMMANDS[kind], stdout=StringIO(), stderr=StringIO())
    assert log() == [(kind, "ada", 3 if kind in ("replay", "discard") else 0)]
    assert "order.placed" in OutboxOperation.objects.get().about


@undone()
def test_the_row_says_by_what_a_command_has_chosen() -> None:
    dead(2, last_error="KeyError: 'a'", cause="KeyError: #")
    dead(1, last_error="keyerror")
    call_command("outbox_dead", "discard", "--error", "KeyE", "--since", "1h", stdout=StringIO())
    found = OutboxOperation.objects.get()
    assert found.done == 2
    assert "KeyE" in found.about


def test_a_command_that_changes_nothing_adds_nothing() -> None:
    dead(1)
    for more in (["--all", "--dry-run"], ["--event-type", "order.gone"]):
        call_command("outbox_replay", *more, stdout=StringIO())
    assert log() == []


def test_the_purge_keeps_the_log_of_ninety_days_and_what_is_open() -> None:
    old, new = now() - KEPT - HOUR, now() - KEPT + HOUR
    made = [
        OutboxOperation.objects.create(kind="replay", started_at=at, state=state).pk
        for at, state in ((old, "done"), (old, "stopped"), (old, "open"), (new, "done"))
    ]
    assert sum(OutboxOperation.objects.purge_batches()) == 2
    assert {*OutboxOperation.objects.values_list("pk", flat=True)} == {*made[2:]}


# --- what is to be worked off ---------------------------------------------------------------------


def test_only_bulk_changes_that_can_be_stored_are_begun() -> None:
    begin, rows = OutboxOperation.objects.begin, OutboxEvent.objects.all()
    for kind in ("pause", "skip", "x"):
        with pytest.raises(ValueError, match="expected one of replay, discard, run_now"):
            begin(kind, rows)
    for rate in ("", "100", "0/m", "fast"):
        with pytest.raises(ValueError, match="100/m"):
            begin("replay", rows, rate=rate)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            begin("replay", rows, limit=limit)
    streams = OutboxStream.objects.values("pk")
    for unfit in (rows[:3], rows.filter(stream__in=streams), rows.due(), rows.held()):
        with pytest.raises(ValueError, match="expected"):
            begin("replay", unfit)
    assert not OutboxOperation.objects.exists()


FILTERS = {
    "a value": Q(event_type="order.paid"),
    "values": Q(pk__in=["event-1", "event-2"]),
    "one of two": Q(event_type="order.paid") | Q(aggregate_id="17"),
    "all but": ~Q(event_type="order.paid"),
    "all but NULL": ~Q(aggregate_id="17"),
    "NULL": Q(aggregate_id=None),
    "a time": Q(created_at__lt=datetime(2026, 1, 1, 12, tzinfo=timezone.utc)),
    "a year": Q(created_at__year=2026),
    "now": Q(available_at__lte=DatabaseNow()),
    "a key": Q(stream__of_key="k"),
    "an event": Q(id__of_event="event-1"),
    "a beginning": Q(event_type__startswith="order.p"),
    "dead": Q(IsDead("status")),
}


@cases("name", FILTERS)
@undone()
def test_filters_mean_the_same_to_a_worker(name: str) -> None:
    at = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    insert(1, event_id="event-1", event_type="order.paid", created_at=at - HOUR, aggregate_id="17")
    insert(1, event_id="event-2", event_type="order.sent", created_at=at + HOUR, due=3600)
    dead(1, event_id="event-3", event_type="order.paid", created_at=at.replace(year=2025))
    keyed("k", 1)
    rows = OutboxEvent.objects.filter(FILTERS[name]).order_by("pk")
    operation = OutboxOperation.objects.begin("replay", rows)
    again = condition(json.loads(operation.filters or ""))
    found = [*OutboxEvent.objects.filter(again).order_by("pk").values_list("pk", flat=True)]
    assert found == [each.pk for each in rows]
    assert 0 < len(found) < 4
    assert ("DEAD" in operation.about) == (name == "dead")


# --- a worker -------------------------------------------------------------------------------------


def worker(me: str = "w") -> Operations:
    (known := KnownPauses()).read(connection)
    return Operations(me=me, lease=30.0, known_pauses=known, wakeup=Wakeup())


def steps(operations: Operations, count: int = 20) -> float:
    """Make steps of the housekeeper; return the seconds until its next one."""
    for _ in range(count):
        wait = perform(connection, operations.step())
    return wait


def begin(kind: str = "replay", **given: Any) -> OutboxOperation:
    return OutboxOperation.objects.begin(kind, OutboxEvent.objects.all(), by="ada", **given)


def counts() -> tuple[str, int, int]:
    row = OutboxOperation.objects.get()
    return row.state, row.done, row.skipped


def dead_left() -> int:
    return OutboxEvent.objects.dead().count()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches of two."""
    monkeypatch.setattr(bulk, "BATCH_SIZE", 2)


@cases("kind", ["replay", "discard", "run_now"])
@undone()
def test_a_worker_works_off_what_matched_at_the_beginning(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH_SIZE", 2)
    (waiting if kind == "run_now" else dead)(5)
    others = keyed("k", 1, status=Status.DONE)
    operation = begin(kind)
    OutboxOperation.objects.filter(pk=operation.pk).update(started_at=now() - HOUR / 60)
    later = [] if kind == "run_now" else dead(1)
    OutboxEvent.objects.dead().exclude(pk__in=later).update(done_at=now() - HOUR)
    steps(worker())
    assert counts() == ("done", 5, 0)
    assert log() == [(kind, "ada", 5)]
    left = OutboxEvent.objects.filter(pk__in=[*others, *later])
    assert left.exclude(status=Status.NEW).count() == len(others) + len(later)
    assert OutboxEvent.objects.due().count() == (0 if kind == "discard" else 5)
    assert OutboxOperation.objects.get().ended_at is not None


def test_what_dies_again_is_not_replayed_again(small: None) -> None:
    ids = sorted(dead(5))
    begin()
    OutboxEvent.objects.filter(pk__in=ids).update(done_at=now() - HOUR)
    assert work_off(OutboxOperation.objects.get().pk, connection).changed == 2
    OutboxEvent.objects.filter(pk__in=ids[:2]).update(status=Status.DEAD, done_at=now() - HOUR)
    steps(worker())
    assert counts() == ("done", 5, 0)
    assert {*OutboxEvent.objects.dead().values_list("pk", flat=True)} == {*ids[:2]}


def test_a_limit(small: None) -> None:
    ids = sorted(dead(8))
    begin(limit=3)
    steps(worker())
    assert counts() == ("done", 3, 0)
    assert {*OutboxEvent.objects.dead().values_list("pk", flat=True)} == {*ids[3:]}


def test_a_rate_makes_few_due_at_a_time() -> None:
    dead(300)
    begin(rate="10/s")
    busy = worker()
    assert 0 < steps(busy, 1) <= 5
    first = OutboxOperation.objects.get()
    assert first.state == "open"
    assert 100 <= first.done <= 102  # what is due within ten seconds
    assert steps(busy, 3) > 0
    assert counts() == ("open", first.done, 0)
    dues = [*OutboxEvent.objects.filter(status=Status.NEW).values_list("available_at", flat=True)]
    assert max(dues) - min(dues) == (len(dues) - 1) * timedelta(seconds=0.1)
    OutboxOperation.objects.update(
        next_at=now() - HOUR
    )  # no worker was there: nothing is caught up
    steps(busy, 1)
    assert 100 <= OutboxOperation.objects.get().done - first.done <= 102


def test_a_stop_leaves_the_rest(small: None) -> None:
    dead(5)
    operation = begin()
    assert work_off(operation.pk, connection).changed == 2
    assert OutboxOperation.objects.all().stop(by="ben") == 1
    assert OutboxOperation.objects.all().stop(by="eve") == 0
    assert work_off(operation.pk, connection) == (0, None)
    steps(worker())
    assert counts() == ("stopped", 2, 0)
    assert (OutboxOperation.objects.get().stopped_by, dead_left()) == ("ben", 3)


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_dies_in_a_batch_repeats_nothing_and_loses_nothing(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead(5)
    operation = begin()
    assert work_off(operation.pk, connection).changed == 2

    def killed(*given: Any) -> int:
        apply_to_batch(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bulk, "apply_to_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            perform(connection, worker("killed").step())
    assert (counts(), dead_left()) == (("open", 2, 0), 3)
    OutboxLease.objects.update(locked_until=now() - HOUR)
    steps(worker())
    assert (counts(), dead_left()) == (("done", 5, 0), 0)
    replays = [each for each in histories() if each.kind == "replayed"]
    assert (len(replays), {each.by for each in replays}) == (5, {"ada"})


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(vendor() == "sqlite", reason="SQLite has one writer at a time")
def test_a_worker_whose_lease_has_ended_takes_no_batch_from_another(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first one's batch, and goes on behind it."""
    dead(4)
    operation, is_in, go_on = begin(), threading.Event(), threading.Event()

    def slow(*given: Any) -> int:
        count = apply_to_batch(*given)
        is_in.set()
        assert go_on.wait(20)
        return count

    monkeypatch.setattr(bulk, "apply_to_batch", slow)
    first = in_thread(lambda: work_off(operation.pk, connection))
    assert is_in.wait(20)
    monkeypatch.setattr(bulk, "apply_to_batch", apply_to_batch)
    second = in_thread(lambda: work_off(operation.pk, connection))
    wait_until(lambda: waiters("outbox_operation") > 0)
    go_on.set()
    assert (first.result(20).changed, second.result(20).changed) == (2, 2)
    assert (OutboxOperation.objects.get().done, dead_left()) == (4, 0)
    assert len([each for each in histories() if each.kind == "replayed"]) == 4


def test_one_worker_at_a_time(small: None) -> None:
    dead(5)
    begin(rate="1/h", limit=2)
    first, second = worker("first"), worker("second")
    steps(first, 1)
    OutboxOperation.objects.update(next_at=now() - HOUR)
    steps(second, 3)
    assert counts() == ("open", 1, 0)
    perform(connection, first.close())  # it stops
    steps(second, 1)
    assert counts() == ("done", 2, 0)


@cases("filters", {"no JSON": "[", "no condition": "[1]", "a column that is gone": '["gone", 1]'})
@undone()
def test_what_cannot_be_read_is_stopped_and_holds_up_no_other(filters: str) -> None:
    dead(2)
    broken, sound = [
        OutboxOperation.objects.begin("replay", OutboxEvent.objects.all()) for _ in "ab"
    ]
    OutboxOperation.objects.filter(pk=broken.pk).update(filters=filters)
    assert work_off(broken.pk, connection).wait is None
    broken.refresh_from_db()
    assert (broken.state, broken.done, bool(broken.stopped_by)) == ("stopped", 0, True)
    assert work_off(sound.pk, connection).changed == 2


def test_several_take_turns(small: None) -> None:
    dead(7, event_type="a")
    dead(3, event_type="b")
    for name in "ab":
        rows = OutboxEvent.objects.filter(event_type=name)
        OutboxOperation.objects.begin("replay", rows)
    busy = worker()
    steps(busy)
    assert [done for _, _, done in log()] == [7, 3]
    ended = [*OutboxOperation.objects.order_by("pk").values_list("ended_at", flat=True)]
    assert ended[1] < ended[0]
    steps(busy, 1)
    assert not OutboxLease.objects.filter(locked_by__isnull=False).exists()


def test_rows_that_another_transaction_has_locked_are_skipped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead(3)
    begin()
    with monkeypatch.context() as patched:
        lock = OutboxQuerySet.lock_unlocked
        patched.setattr(OutboxQuerySet, "lock_unlocked", lambda rows: lock(rows)[:2])
        steps(worker())
    assert (counts(), dead_left()) == (("done", 2, 1), 1)


def test_a_drain_works_off_what_is_open() -> None:
    dead(3)
    begin()
    with listening(lambda event: None):
        outbox.drain()
    assert counts() == ("done", 3, 0)
    assert not OutboxEvent.objects.exclude(status=Status.DONE).exists()


def test_a_worker_hears_of_an_operation_with_the_pauses(django_assert_num_queries: Any) -> None:
    pause()
    known = KnownPauses()
    idle = Operations(me="w", lease=30.0, known_pauses=known, wakeup=Wakeup())
    dead(3)
    known.read(connection)
    with django_assert_num_queries(0):
        steps(idle, 3)
    begin()
    begin(limit=1)
    known.read(connection)
    assert [*known.pauses] == [("event_type", "order.placed")]
    steps(idle, 3)
    known.read(connection)
    with django_assert_num_queries(0):
        steps(idle, 3)
    assert dead_left() == 0


def test_a_worker_whose_claimer_is_busy_asks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    dead(3)
    idle = Operations(me="w", lease=30.0, known_pauses=KnownPauses(), wakeup=Wakeup())
    begin()
    steps(idle, 2)
    assert dead_left() == 3
    later = time.monotonic() + 200
    monkeypatch.setattr("django_outbox.worker.housekeeper.monotonic", lambda: later)
    perform(connection, idle.step())
    monkeypatch.undo()
    steps(idle)
    assert dead_left() == 0
