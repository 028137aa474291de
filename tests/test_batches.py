"""Batch listeners: sizes, answers, what fails alone and what fails together, keys, transactions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.delivery.decide import Halving
from django_outbox.exceptions import PayloadError
from django_outbox.listeners import options, registry
from django_outbox.listeners.options import Batching
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.cases import cases
from tests.table import PLACED, insert, keyed, listening, row, write
from tests.testapp.models import Effect
from tests.waiting import MovedClock, wait_until

outside = pytest.mark.django_db(transaction=True)
# Runs a test twice: by ``drain()``, and by a worker in this process.
everywhere = pytest.mark.parametrize("run", ["drain", "worker"])

AT_ONCE = outbox.Fixed(0, max_attempts=3)
FAR = outbox.Fixed(600, max_attempts=5)


class Bulk:
    """Records the batches that it gets and calls ``work`` with each."""

    def __init__(self, work: Callable[[list[outbox.Event]], Any] = lambda events: None) -> None:
        self.work = work
        self.batches: list[list[outbox.Event]] = []

    def __call__(self, events: list[outbox.Event]) -> Any:
        self.batches.append(events)
        return self.work(events)

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.batches]

    @property
    def ids(self) -> list[str]:
        return [event.event_id for batch in self.batches for event in batch]


def is_quiet() -> bool:
    return not OutboxEvent.objects.filter(available_at__isnull=False).exists() and not (
        OutboxEvent.objects.filter(key__isnull=False, status__in=(Status.NEW, Status.RETRY))
        .exclude(attempts__gt=0)
        .exists()
    )


def deliver(run: str, until: Callable[[], bool] = is_quiet) -> None:
    """Deliver what is due: by ``drain()`` until nothing is, or by a worker until a fact holds."""
    if run == "drain":
        wait_until(lambda: not outbox.drain() and until(), what="the drains")
        return
    with working():
        wait_until(until, what="the deliveries")


@contextmanager
def working() -> Iterator[outbox.Worker]:
    worker = outbox.Worker()
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def statuses() -> dict[str, int]:
    return dict(OutboxEvent.objects.values_list("pk", "status"))


def attempts() -> dict[str, int]:
    return dict(OutboxEvent.objects.values_list("pk", "attempts"))


def all_are(status: Status) -> Callable[[], bool]:
    return lambda: {*statuses().values()} == {status}


# -- the options -----------------------------------------------------------------------------------


@cases(
    "options",
    [
        {"batch": 0},
        {"batch": 501},
        {"batch": True},
        {"batch": "5"},
        {"batch": 2.0},
        {"batch": 5, "within": -1},
        {"batch": 5, "within": 1.5},
        {"batch": 5, "within": "x"},
        {"batch": 5, "per_key": 0},
        {"batch": 5, "per_key": 6},
        {"batch": 5, "per_key": None},
        {"within": 0.5},
        {"per_key": 2},
    ],
)
def test_options_that_no_call_can_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        outbox.listener(PLACED, **options)


def test_the_options_are_kept() -> None:
    bulk = Bulk()
    with listening(bulk, batch=500, within=1, per_key=500):
        (found,) = (each for each in registry.listeners() if each.call is bulk)
    assert found.batching == Batching(500, 1.0, 500)


def test_a_batch_shrinks_with_the_failures_of_its_events() -> None:
    batching = Batching(500)
    assert [batching.size_after(failed, 10) for failed in range(4)] == [500, 125, 1, 1]
    assert batching.size_after(1, 2) == 1  # its last execution is its own
    assert Batching(3).size_after(1, 10) == 1


# -- sizes -----------------------------------------------------------------------------------------


@outside
@everywhere
def test_a_batch_ends_at_its_bytes(run: str, settings: Any) -> None:
    settings.OUTBOX = {"BATCH_BYTES": 2500}
    bulk = Bulk()
    insert(9, payload='{"text":"' + 989 * "x" + '"}')
    with listening(bulk, batch=100):
        deliver(run)
    assert max(bulk.sizes) == 3  # the last may overshoot


@outside
def test_a_batch_waits_within_its_time_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_WITHIN", 600.0)
    bulk = Bulk()
    with listening(bulk, batch=500, within=3), working():
        write(1)
        wait_until(OutboxEvent.objects.leased().exists)
        for _ in range(4):
            write(1)
        wait_until(lambda: bool(bulk.sizes))
    assert bulk.sizes == [5]


@outside
def test_a_full_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_WITHIN", 600.0)
    bulk = Bulk()
    with listening(bulk, batch=5, within=600), working():
        write(1)
        write(4)
        wait_until(lambda: sum(bulk.sizes) == 5)
    assert bulk.sizes == [5]


# -- answers ---------------------------------------------------------------------------------------


@outside
@everywhere
def test_each_event_gets_its_own_answer(run: str) -> None:
    ids = write(6)
    answers = [None, outbox.Done(), outbox.Defer(600), outbox.Dead("no"), ValueError("bad"), 5]
    bulk = Bulk(lambda events: [answers[ids.index(each.event_id)] for each in events])
    with listening(bulk, batch=6, retry=FAR):
        deliver(run, lambda: [*statuses().values()].count(Status.NEW) == 1)
    found = [row(each) for each in ids]
    assert [each.status for each in found] == [1, 1, 0, 3, 2, 2]
    assert [each.attempts for each in found] == [0, 0, 0, 0, 1, 1]
    assert found[3].last_error == "no"
    assert (found[4].last_error or "").startswith("ValueError: bad")
    assert "answered int" in (found[5].last_error or "")


@outside
@everywhere
@pytest.mark.parametrize("answer", [[None], True, outbox.Dead("all"), ValueError("no"), iter(())])
def test_another_answer_fails_all_and_is_not_split(run: str, answer: object) -> None:
    ids = write(4)
    bulk = Bulk(lambda events: answer)
    with listening(bulk, batch=4, within=1.0, retry=FAR):
        deliver(run, all_are(Status.RETRY))
    assert bulk.sizes == [4]
    assert all(
        (row(each).last_error or "").startswith("django_outbox.delivery.decide.WrongAnswer")
        for each in ids
    )
    assert {*attempts().values()} == {1}


# -- failures --------------------------------------------------------------------------------------


def poisoned(*bad: str) -> Bulk:
    def work(events: list[outbox.Event]) -> None:
        if found := [each.event_id for each in events if each.event_id in bad]:
            raise LookupError(found[0])

    return Bulk(work)


@outside
@everywhere
@pytest.mark.parametrize("atomic", [False, True])
def test_one_bad_event_is_found_by_halves(run: str, atomic: bool) -> None:
    ids = write(500)
    bulk = poisoned(ids[123])
    with listening(bulk, batch=500, within=1.0, retry=FAR, atomic=atomic):
        deliver(run, lambda: Status.NEW not in statuses().values())
    assert len(bulk.sizes) <= 21
    assert statuses()[ids[123]] == Status.RETRY
    assert {status for each, status in statuses().items() if each != ids[123]} == {Status.DONE}
    assert attempts() == {each: int(each == ids[123]) for each in ids}


@pytest.mark.parametrize("place", [0, 1, 249, 250, 498, 499])
def test_one_fault_costs_twenty_calls_wherever_it_is(place: int) -> None:
    halving, calls = Halving([*range(500)]), 0
    for part in halving:
        calls += 1
        halving.note(part, ValueError() if place in part else None)
    assert calls <= 21
    assert halving.rest() == []


@outside
@everywhere
def test_in_an_outage_a_batch_is_called_three_times(run: str) -> None:
    def work(events: list[outbox.Event]) -> None:
        raise ConnectionError("away")

    bulk = Bulk(work)
    write(40)
    with listening(bulk, batch=40, within=1.0, retry=FAR):
        deliver(run, all_are(Status.RETRY))
        assert bulk.sizes == [40, 20, 20]
        assert {*attempts().values()} == {1}


@outside
@everywhere
def test_no_event_dies_of_a_shared_call(run: str) -> None:
    """With one execution, each event has one that it shares and, after that, one of its own."""
    ids = write(8)
    bulk = Bulk(lambda events: [LookupError("no")] * len(events))
    with listening(bulk, batch=8, within=1.0, retry=outbox.Fixed(0, max_attempts=1)):
        deliver(run, all_are(Status.DEAD))
    assert bulk.sizes == [8] + [1] * 8
    assert attempts() == dict.fromkeys(ids, 2)


@outside
@everywhere
def test_retry_after_holds_for_all(run: str) -> None:
    def work(events: list[outbox.Event]) -> None:
        raise outbox.RetryAfter(600)

    bulk = Bulk(work)
    write(8)
    with listening(bulk, batch=8, within=1.0, retry=AT_ONCE):
        deliver(run, all_are(Status.RETRY))
    assert bulk.sizes == [8]
    assert {*attempts().values()} == {1}


@outside
@everywhere
def test_a_rescued_event_is_called_alone(run: str) -> None:
    write(3)
    (rescued,) = insert(1, rescues=1)
    bulk = Bulk()
    with listening(bulk, batch=10):
        deliver(run)
    assert [rescued] in [[each.event_id for each in batch] for batch in bulk.batches]


@outside
def test_a_batch_that_exceeds_its_timeout_is_not_split(clock: MovedClock) -> None:
    over = threading.Event()

    def work(events: list[outbox.Event]) -> None:
        if len(bulk.batches) == 1:
            clock.advance(6)
            over.wait(60)

    bulk = Bulk(work)
    write(20)
    with listening(bulk, batch=20, within=1.0, timeout=5, retry=AT_ONCE), working():
        wait_until(lambda: {*statuses().values()} == {Status.DONE})
        over.set()
    assert bulk.sizes == [20, 5, 5, 5, 5]
    assert {*attempts().values()} == {1}


@outside
def test_an_awaited_batch_is_cancelled_after_its_timeout(clock: MovedClock) -> None:
    sizes = []

    async def work(events: list[outbox.Event]) -> None:
        sizes.append(len(events))
        if len(sizes) == 1:
            clock.advance(6)
            await asyncio.Event().wait()

    write(8)
    with listening(work, batch=8, within=1.0, timeout=5, retry=AT_ONCE), working():
        wait_until(lambda: {*statuses().values()} == {Status.DONE})
    assert sizes == [8, 2, 2, 2, 2]


@outside
@everywhere
def test_fallbacks_are_called_one_by_one(run: str) -> None:
    ids = write(6)
    fallen: list[str] = []
    bulk = Bulk(
        lambda events: [
            LookupError("no")
            if each.event_id == ids[0]
            else outbox.Unrecoverable("no")
            if each.event_id == ids[1]
            else None
            for each in events
        ]
    )
    with listening(bulk, batch=6, retry=outbox.Fixed(0, max_attempts=2)):
        registry.fallback(bulk, lambda event, failure: fallen.append(event.event_id))
        deliver(run, all_are(Status.DONE))
    assert sorted(fallen) == sorted(ids[:2])
    assert attempts()[ids[0]] == 2


@outside
def test_an_awaited_batch_awaits_its_fallbacks() -> None:
    ids, fallen = write(4), []

    async def work(events: list[outbox.Event]) -> list[Exception]:
        return [outbox.Unrecoverable("no")] * len(events)

    async def instead(event: outbox.Event, failure: outbox.Failure) -> None:
        fallen.append(event.event_id)

    with listening(work, batch=4):
        registry.fallback(work, instead)
        with working():
            wait_until(all_are(Status.DONE))
    assert sorted(fallen) == sorted(ids)


# -- payloads, signals, interceptors, pauses -------------------------------------------------------


@outbox.event("batch.typed")
@dataclass
class Batched:
    number: int


@outside
@everywhere
def test_a_payload_that_does_not_fit_is_dead_alone(run: str) -> None:
    insert(1, event_type="batch.typed", payload='{"number": 5}')
    (bad,) = insert(1, event_type="batch.typed", payload='{"number": "five"}')
    bulk = Bulk()
    with listening(bulk, Batched, batch=5):
        deliver(run)
    assert [event.payload for (event,) in bulk.batches] == [Batched(number=5)]
    assert statuses()[bad] == Status.DEAD
    assert PayloadError.__name__ in (row(bad).last_error or "")


entered: list[object] = []


@contextmanager
def for_batches(subject: Any) -> Iterator[None]:
    entered.append(subject)
    yield


for_batches.batch = True  # type: ignore[attr-defined]


@contextmanager
def for_events(event: outbox.Event) -> Iterator[None]:
    entered.append(event.event_id)
    yield


@outside
@everywhere
def test_only_marked_interceptors_are_entered_with_the_events(run: str, settings: Any) -> None:
    paths = [f"{__name__}.for_events", f"{__name__}.for_batches"]
    settings.OUTBOX = {"INTERCEPTORS": paths}
    entered.clear()
    bulk = Bulk()
    write(3)
    with listening(bulk, batch=3, within=1.0):
        deliver(run)
    assert entered == [bulk.batches[0]]


@outside
@everywhere
@pytest.mark.parametrize("queue", ["default", "slow"])
def test_an_event_goes_to_ordinary_and_batch_listeners(run: str, queue: str, settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"slow": {"WORKERS": 1}}}
    bulk, seen = Bulk(), []
    ids = write(20)
    with (
        listening(lambda event: seen.append(event.event_id), name="one"),
        listening(bulk, name="bulk", batch=10, queue=queue),
    ):
        deliver(run, all_are(Status.DONE))
    assert sorted(bulk.ids) == sorted(seen) == sorted(ids)


# -- keys ------------------------------------------------------------------------------------------


@outside
@everywhere
def test_a_done_behind_a_failure_of_its_key_repeats(run: str) -> None:
    ids = keyed("a", 4)
    bulk = Bulk(
        lambda events: [
            LookupError("no") if each.event_id == ids[1] and each.attempts == 0 else None
            for each in events
        ]
    )
    with listening(bulk, batch=10, per_key=4, retry=AT_ONCE):
        deliver(run, all_are(Status.DONE))
    assert bulk.ids == [*ids, *ids[1:]]
    assert attempts() == {each: int(each == ids[1]) for each in ids}


# -- atomic ----------------------------------------------------------------------------------------


def note_all(events: list[outbox.Event]) -> None:
    Effect.objects.bulk_create(
        Effect(event_id=each.event_id, pid=0, phase=each.listener) for each in events
    )


@outside
@everywhere
@pytest.mark.parametrize("kind", ["plain", "async", "atomic"])
def test_a_backlog_comes_in_whole_batches(run: str, kind: str) -> None:
    bulk = Bulk()

    async def awaited(events: list[outbox.Event]) -> None:
        bulk(events)

    ids = write(250)
    call = awaited if kind == "async" else bulk
    with listening(call, batch=100, atomic=kind == "atomic"):
        deliver(run)
    assert sorted(bulk.ids) == sorted(ids)
    assert max(bulk.sizes) <= 100
    assert len(bulk.sizes) <= 5  # how many come at once depends on when the claims arrive
    assert all_are(Status.DONE)()


def keys_of(batch: list[outbox.Event]) -> list[str | None]:
    return [event.key for event in batch]


@outside
@everywhere
@pytest.mark.parametrize("per_key", [1, 3])
def test_events_of_a_key_keep_their_order(run: str, per_key: int) -> None:
    ids = {key: keyed(key, 20) for key in "abcd"}
    bulk = Bulk()
    with listening(bulk, batch=40, per_key=per_key):
        deliver(run, all_are(Status.DONE))
    for key, expected in ids.items():
        seen = [each.event_id for batch in bulk.batches for each in batch if each.key == key]
        assert seen == expected
    most = max(keys_of(batch).count(key) for batch in bulk.batches for key in "abcd")
    assert most == per_key


@outside
@everywhere
def test_an_atomic_batch_commits_with_the_ends_of_its_events(run: str) -> None:
    ids = write(30)

    def work(events: list[outbox.Event]) -> list[Exception | None]:
        note_all([each for each in events if each.event_id != ids[4]])
        return [LookupError("no") if each.event_id == ids[4] else None for each in events]

    bulk = Bulk(work)
    with listening(bulk, batch=10, atomic=True, retry=FAR):
        deliver(run, lambda: Status.NEW not in statuses().values())
    found = sorted(Effect.objects.values_list("event_id", flat=True))
    assert found == sorted({*ids} - {ids[4]})
    assert attempts() == {each: int(each == ids[4]) for each in ids}


@outside
@everywhere
@pytest.mark.parametrize("per_key", [1, 3])
def test_atomic_batches_delete_what_is_not_kept(run: str, per_key: int, settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0}
    write(5)
    keyed("a", 5)
    (unique,) = write(1, unique_key="once")
    bulk = Bulk(note_all)
    with listening(bulk, batch=5, per_key=per_key, atomic=True):
        deliver(run, lambda: OutboxEvent.objects.count() == 1)
    assert row(unique).status == Status.DONE
    assert Effect.objects.count() == 11


@outside
@everywhere
def test_damaged_json_is_dead_alone(run: str) -> None:
    good = write(3)
    (bad,) = insert(1, payload="{")
    bulk = Bulk()
    with listening(bulk, batch=10):
        deliver(run)
    assert statuses()[bad] == Status.DEAD
    assert sorted(bulk.ids) == sorted(good)


@outside
@everywhere
def test_an_atomic_batch_shares_its_events_with_an_ordinary_listener(run: str) -> None:
    ids, seen = write(6), []
    with (
        listening(lambda event: seen.append(event.event_id), name="one"),
        listening(Bulk(note_all), name="bulk", batch=6, atomic=True),
    ):
        deliver(run, all_are(Status.DONE))
    assert sorted(seen) == sorted(ids)
    assert sorted(Effect.objects.values_list("event_id", flat=True)) == sorted(ids)
