"""Events with a key are delivered in order through failures, delays, lost workers, late commits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.signals import event_settled
from tests.surroundings import heard
from tests.table import end_stream_leases, keyed, listening, now, row, statuses, stream, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUICK = {
    "POLL_INTERVAL": 0.3,
    "PROBE_INTERVAL": 0.05,
    "DRAIN_TIMEOUT": 1,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 5},
}


@contextmanager
def worker(**settings: Any) -> Iterator[outbox.Worker]:
    with override_settings(OUTBOX={**QUICK, **settings}), outbox.Worker(purge=False) as running:
        yield running


class Seen:
    """A listener that records its events and returns or raises the given answers."""

    def __init__(self, **answers: Any) -> None:
        self.order: dict[str, list[int]] = defaultdict(list)
        self.ids: list[str] = []
        self.answers = {key: [*each] for key, each in answers.items()}
        self._lock = threading.Lock()

    def __call__(self, event: outbox.Event) -> Any:
        assert event.key is not None
        with self._lock:
            self.ids.append(event.event_id)
            self.order[event.key].append(event.payload["n"])
            told = self.answers.get(f"n{event.payload['n']}", [])
            answer = told.pop(0) if told else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def put(key: str, count: int, first: int = 0) -> list[str]:
    with transaction.atomic():
        return outbox.write_many(
            [
                outbox.Event(event_type="order.placed", payload={"n": n}, key=key)
                for n in range(first, first + count)
            ]
        )


def all_done(within: float = 20) -> None:
    wait_until(lambda: [*statuses()] == ["DONE"], within=within, what="all done")


def idle() -> bool:
    """Return whether no stream is leased or due."""
    return not OutboxStream.objects.exclude(due_at=None, locked_by=None).exists()


def test_keys_are_delivered_in_parallel_and_events_of_a_key_are_not() -> None:
    """The listener waits until the heads of three keys run at once."""
    together, running, met = threading.Barrier(3), set[str](), list[str]()

    def meet(event: outbox.Event) -> None:
        assert event.key is not None
        met.extend({event.key} & running)
        running.add(event.key)
        together.wait(20)
        running.discard(event.key)
        seen(event)

    seen = Seen()
    for key in "abc":
        put(key, 5)
    with listening(meet), worker(WORKERS=9):
        all_done()
    assert (seen.order, met) == ({key: [*range(5)] for key in "abc"}, [])


PASS: dict[str, Any] = {"STOP_ON_FIRST_FAILURE": False}


@pytest.mark.parametrize(
    ("answers", "given", "order", "ended"),
    [
        ([ValueError("once"), ValueError("twice")], {}, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.RetryAfter(1)], PASS, [0, 1, 2, 3, 1], {"DONE": 4}),
        ([outbox.Defer(0.05), outbox.Defer(0.05)], {}, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.Defer(0.05), outbox.Defer(0.05)], PASS, [0, 1, 1, 1, 2, 3], {"DONE": 4}),
        ([outbox.Dead("no")], {}, [0, 1, 2, 3], {"DONE": 3, "DEAD": 1}),
    ],
    ids=["failed", "failed, passed", "deferred", "deferred, not passed", "dead"],
)
def test_n2_the_order_behind_an_event_that_is_not_done(
    answers: list[Any], given: dict[str, Any], order: list[int], ended: dict[str, int]
) -> None:
    seen = Seen(n1=answers)
    put("a", 4)
    put("b", 2, 10)
    with listening(seen), worker(**given):
        wait_until(lambda: statuses() == {**ended, "DONE": ended["DONE"] + 2})
        wait_until(idle)
    assert seen.order == {"a": order, "b": [10, 11]}


@pytest.mark.parametrize("end", ["replay", "discard"])
def test_a_dead_head_blocks_its_stream_on_demand(end: str) -> None:
    seen = Seen(n1=[outbox.Dead("no")])
    ids = put("a", 3)
    with listening(seen), worker(ON_DEAD="block"):
        wait_until(lambda: statuses() == {"DONE": 1, "NEW": 1, "DEAD": 1})
        wait_until(idle)
        put("a", 1, 3)  # the write makes the stream due, but the claim finds it blocked
        put("b", 1)
        wait_until(lambda: seen.order["b"] == [0])
        wait_until(idle)
        assert seen.order["a"] == [0, 1]
        getattr(OutboxEvent.objects.filter(pk=ids[1]), end)()
        all_done()
    again = [1] if end == "replay" else []
    assert seen.order["a"] == [0, 1, *again, 2, 3]


# -- blocked streams and lost leases ---------------------------------------------------------------


def test_an_unroutable_head_holds_its_stream_and_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """During the grace it is deferred, which costs no attempt, and shown as blocked."""
    seen = Seen()
    with listening(seen), listening(seen, "order.unheard_of"):
        (head,) = write(event_type="order.unheard_of", key="a")
        put("a", 2)
        put("b", 2, 10)
    with (
        heard(event_settled) as settled,
        caplog.at_level("INFO", "django_outbox"),
        listening(seen),
        worker(UNROUTABLE_GRACE=60),
    ):
        wait_until(lambda: len(seen.order["b"]) == 2)
        for _ in range(3):
            wait_until(lambda: "deferred" in [each["outcome"] for each in settled])
            wait_until(lambda: stream("a").locked_by is None)
            settled.clear()
            OutboxEvent.objects.filter(pk=head).update(deliver_at=None)
            end_stream_leases("a")
        wait_until(lambda: [each.key for each in OutboxStream.objects.blocked()] == ["a"])
    assert (row(head).status, row(head).attempts, seen.order["a"]) == (Status.NEW, 0, [])
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len([each for each in warnings if "order.unheard_of" in each]) == 1


def test_an_event_without_listeners_holds_up_no_listener_of_its_key() -> None:
    """It waits for itself, in no stream."""
    seen = Seen()
    (head,) = write(event_type="order.unheard_of", key="a")
    with listening(seen), worker(UNROUTABLE_GRACE=60):
        put("a", 2)
        wait_until(lambda: seen.order["a"] == [0, 1])
        wait_until(lambda: row(head).available_at > now())  # deferred
    assert (row(head).status, row(head).attempts, row(head).listener) == (Status.NEW, 0, None)


def test_a_listener_added_later_gets_in_order_what_still_waits() -> None:
    mail, stock = Seen(n0=[outbox.RetryAfter(1)]), Seen()
    with worker():
        with listening(mail, name="mail"):
            put("a", 3)
            wait_until(lambda: statuses() == {"RETRY": 1, "NEW": 2})
        with listening(mail, name="mail"), listening(stock, name="stock"):
            wait_until(lambda: statuses() == {"DONE": 6})
    assert (mail.order["a"], stock.order["a"]) == ([0, 0, 1, 2], [0, 1, 2])


def test_long_streams_do_not_starve_short_ones() -> None:
    done_before: list[int] = []

    def look(event: outbox.Event) -> None:
        seen(event)
        if event.key and event.key.startswith("long"):
            time.sleep(0.002)  # the listener's work
        elif len(seen.order) == 54:
            done_before.append(sum(len(each) for key, each in seen.order.items() if "long" in key))

    seen = Seen()
    for n in range(4):
        put(f"long-{n}", 300)
    for n in range(50):
        put(f"short-{n}", 1)
    with listening(look), worker(WORKERS=4):
        all_done(60)
    assert min(done_before) < 1200 / 2
    assert all(seen.order[f"long-{n}"] == [*range(300)] for n in range(4))


# -- drain() ---------------------------------------------------------------------------------------


@pytest.fixture(params=["outside", "inside"])
def place(request: Any) -> Any:
    """Return where ``drain()`` is called: inside a transaction, as in a TestCase, or outside."""
    return transaction.atomic if request.param == "inside" else ExitStack


@override_settings(OUTBOX=QUICK)
def test_drain_delivers_what_a_listener_writes_to_the_same_key(place: Any) -> None:
    seen: list[int] = []

    def follow(event: outbox.Event) -> None:
        seen.append(event.payload["n"])
        if event.payload["n"] < 3:
            put("a", 1, event.payload["n"] + 1)

    put("a", 1)
    with listening(follow), place():
        assert outbox.drain() == 4
    assert seen == [0, 1, 2, 3]
    assert idle()


@override_settings(OUTBOX=QUICK)
def test_drain_runs_nothing_twice_after_a_delay_of_zero(place: Any) -> None:
    seen = Seen(n0=[outbox.Defer(0), outbox.Defer(0)])
    put("a", 2)
    with listening(seen), place():
        assert outbox.drain() == 1
        assert outbox.drain() == 1
        assert outbox.drain() == 2
    assert seen.order == {"a": [0, 0, 0, 1]}


@override_settings(OUTBOX=QUICK)
def test_drain_goes_by_the_instant_that_it_is_given(place: Any) -> None:
    seen = Seen(n0=[outbox.Defer(60)])
    put("a", 2)
    with listening(seen), place():
        assert outbox.drain() == 1
        assert outbox.drain() == 0
        assert outbox.drain(at=now() + timedelta(seconds=90)) == 2
    assert seen.order == {"a": [0, 0, 1]}


@override_settings(OUTBOX=QUICK)
def test_drain_runs_a_suspect_too(place: Any) -> None:
    seen = Seen()
    keyed("a", payload='{"n": 0}')
    keyed("b", payload='{"n": 0}')
    for key, rescues in (("a", 1), ("b", 4)):
        OutboxStream.objects.filter(key=key).update(rescues=rescues, locked_by="lost")
    with listening(seen), place():
        outbox.drain()
    assert seen.order == {"a": [0]}
    assert statuses() == {"DONE": 1, "DEAD": 1}


def test_what_is_behind_a_suspect_does_not_die_for_it() -> None:
    """The count of lost workers is lowered before the suspect is settled, not after."""
    counts: list[int] = []
    keyed("a", 2)
    OutboxStream.objects.update(rescues=4)
    with listening(lambda event: counts.append(OutboxStream.objects.get(key="a").rescues)):
        outbox.drain()
    assert counts == [4, 2]


def test_what_is_left_to_others_and_not_taken_comes_back() -> None:
    """Streams left to a worker that claims nothing come back: its row guides only the sharing."""
    seen, given = Seen(), []
    OutboxWorker.objects.create(
        id="idle",
        hostname="h",
        pid=1,
        started_at=now(),
        heartbeat_at=now() + timedelta(seconds=60),
        info='{"mode": "multi_node", "held": 0, "streams": 0}',
    )

    def slow(event: outbox.Event) -> None:
        seen(event)
        time.sleep(0.02)  # the listener's work

    with listening(slow):
        for key in "abcdefgh":
            put(key, 30)
    with listening(slow), worker(LEASE=1.5, WORKERS=2, POLL_INTERVAL=60, MODE="multi_node"):
        wait_until(lambda: OutboxStream.objects.leased().count() == 8)
        given.append(wait_until(lambda: OutboxStream.objects.due().filter(locked_by=None).count()))
        all_done()
    assert 0 < given[0] <= 4
    assert seen.order == {key: [*range(30)] for key in "abcdefgh"}
