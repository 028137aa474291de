"""No event of a key starts before an earlier one: what threads start, go on with and put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from django_outbox.conf import Settings
from django_outbox.delivery.delivery import Delivery
from django_outbox.delivery.lease import Lease
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import DONE, LOST, Decision, Status
from django_outbox.worker.deliveries import Deliveries
from django_outbox.worker.held import Held
from django_outbox.worker.polling import Wakeup
from django_outbox.worker.ready import Lane, Ready
from django_outbox.worker.runs import Runs, StreamRead
from tests.table import PLACED, listening
from tests.unit.scripted import SCRIPTED, Clock, lease, stream

KEY = "order-1"
ANY_THREAD: Any = SimpleNamespace(put=lambda leases: None, accepts=lambda queue: True)
DEFERRED = Decision(status=Status.NEW, delay=1.0, outcome="deferred")
FAILED = Decision(status=Status.RETRY, delay=1.0, spent=1, outcome="retry")
DEAD = Decision(status=Status.DEAD, spent=1, outcome="dead")


@pytest.fixture
def held(clock: Clock) -> Held:
    return Held(30)


@pytest.mark.parametrize(
    ("lost", "started"), [("", "abcxyz"), ("a", "xyz"), ("b", "axyz"), ("c", "abxyz"), ("ax", "yz")]
)
def test_what_is_behind_a_lost_event_of_its_key_does_not_start(
    lost: str, started: str, held: Held
) -> None:
    leases = [*keyed(held, "abc"), *held.add_rows(lease(each) for each in "xyz")]
    held.drop(each for each in leases if each.event_id in lost)
    assert "".join(each.event_id for each in held.start(leases)) == started


def keyed(held: Held, events: str) -> list[Lease]:
    """Return events of one stream, which are all out."""
    run = stream(KEY)
    held.add([run])
    runs = Runs(me="me", settings=Settings(), held=held, pools=ANY_THREAD, wakeup=Wakeup())
    found = [lease(each, of=run) for each in events]
    runs.add_events([StreamRead(run, 3, found, 0.0)])
    for each in found[:-1]:
        runs.follower_of(each, lambda follower: True)
    return found


def test_what_was_read_of_a_stream_that_is_lost_goes_to_no_thread(held: Held) -> None:
    ready, run = list[Lease](), stream(KEY)
    pools: Any = SimpleNamespace(put=ready.extend, accepts=lambda queue: True)
    runs = Runs(me="me", settings=Settings(), held=held, pools=pools, wakeup=Wakeup())
    held.add([run])
    held.lose([run])
    runs.add_events([StreamRead(run, 3, [lease("a", of=run)], 0.0)])
    assert (ready, len(held)) == ([], 0)


class Leased:
    """A worker's streams; one is leased, and its events a, b and c were read."""

    def __init__(self, held: Held) -> None:
        self._ready = list[Lease]()
        pools: Any = SimpleNamespace(put=self._ready.extend, accepts=lambda queue: True)
        self.runs = Runs(me="me", settings=Settings(), held=held, pools=pools, wakeup=Wakeup())
        run = stream(KEY)
        self.a, self.b, self.c = self.events = [lease(each, of=run) for each in "abc"]
        held.add([run])
        self.runs.add_events([StreamRead(run, 3, self.events, 0.0)])

    @property
    def ready(self) -> str:
        """The events that threads may take."""
        return "".join(each.event_id for each in self._ready)

    def follow(self, lease: Lease) -> Lease | None:
        """Return what joins a batch behind an event."""
        return self.runs.follower_of(lease, lambda follower: True)


@pytest.fixture
def leased(held: Held) -> Leased:
    return Leased(held)


def test_one_event_at_a_time_is_handed_out_until_it_is_settled(leased: Leased) -> None:
    assert leased.ready == "a"
    leased.runs.settled([(leased.a, DONE)])
    assert leased.ready == "ab"
    leased.runs.settled([(leased.b, DONE)])
    assert leased.ready == "abc"


def test_a_thread_goes_on_behind_the_last_event_that_was_handed_out(leased: Leased) -> None:
    assert leased.runs.next(leased.a, DONE) is leased.b
    assert leased.runs.next(leased.a, DONE) is None
    assert leased.runs.next(leased.b, DONE) is leased.c


@pytest.mark.parametrize("decision", [DEFERRED, FAILED, DEAD, LOST], ids=lambda each: each.outcome)
def test_no_thread_goes_on_before_what_is_not_done_is_settled(
    decision: Decision, leased: Leased
) -> None:
    assert leased.runs.next(leased.a, decision) is None
    leased.runs.settled([(leased.a, decision)])
    assert leased.ready == ("ab" if decision is DEAD else "a")


def test_a_batch_takes_them_one_behind_the_other(leased: Leased) -> None:
    assert leased.follow(leased.a) is leased.b
    assert leased.follow(leased.a) is None
    assert leased.follow(leased.b) is leased.c


@pytest.mark.parametrize("first", [0, 1], ids=["a thread's", "a batch's"])
def test_nothing_is_handed_out_while_a_later_event_runs(first: int, leased: Leased) -> None:
    take = leased.follow if first else lambda each: leased.runs.next(each, DONE)
    assert take(leased.a) is leased.b
    leased.runs.settled([(leased.a, DONE)])
    assert leased.ready == "a"
    leased.runs.settled([(leased.b, DONE)])
    assert leased.ready == "ac"


def test_what_a_batch_puts_back_keeps_its_order(leased: Leased) -> None:
    leased.follow(leased.a)
    leased.follow(leased.b)
    leased.runs.wait_again([leased.b, leased.c])
    leased.runs.settled([(leased.a, DONE)])
    assert leased.ready == "ab"
    leased.runs.settled([(leased.b, DONE)])
    assert leased.ready == "abc"


@pytest.mark.parametrize(
    ("turned_away", "called"), [("", "abcxyz"), ("a", "xyz"), ("b", "axyz"), ("x", "abcyz")]
)
def test_a_batch_calls_nothing_behind_what_its_queue_turned_away(
    turned_away: str, called: str, held: Held
) -> None:
    leases = [*keyed(held, "abc"), *held.add_rows(lease(each) for each in "xyz")]

    def turn_away(each: Lease) -> None:
        each.turned_away = each.event_id in turned_away

    queue: Any = SimpleNamespace(probing=False, closed=True, ready=Ready(), turn_away=turn_away)
    runs = Runs(me="me", settings=Settings(), held=held, pools=ANY_THREAD, wakeup=Wakeup())
    deliveries = Deliveries(alias=SCRIPTED, queue=queue, runs=runs)
    with listening(print, batch=9):
        (listener,) = registry.route("", PLACED)
        lane = Lane(listener, 9)
        lane.leases.extend(leases)
        started = deliveries.start(deliveries.take(lane), lambda: False)
    assert "".join(each.event_id for each in started) == called


def test_what_a_hung_thread_has_left_is_released_at_a_stop(held: Held) -> None:
    leases, ready = held.start(held.add_rows([lease("x")])), Ready()
    ready.add(Delivery(leases, SCRIPTED, held.is_current))
    assert ready.take_all() == []
    assert leases[0].is_waiting
