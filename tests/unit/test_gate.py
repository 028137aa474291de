"""What a gate answers: how many events of its queue may be claimed, and when to ask again."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.conf import Settings
from django_outbox.setting_rules import CENTURY
from django_outbox.sql.values import EVENTS, Found, PauseTimes
from django_outbox.worker.gate import BUSY_AFTER, RELEASE_INTERVAL, SHRINK_ABOVE, Gate
from django_outbox.worker.held import Held
from django_outbox.worker.pauses import READ_INTERVAL, KnownPauses
from django_outbox.worker.polling import WORTHWHILE, Wakeup
from tests.unit.scripted import Clock, connection, lease


class Queue:
    """A gate of four threads; each call returns its room."""

    def __init__(self, clock: Clock, **given: Any) -> None:
        settings = Settings(QUEUES={"default": given}, WORKERS=4, COLD_QUEUE_CAPACITY=100)
        self.clock, self.held, self.known_pauses = clock, Held(30), KnownPauses()
        self.load = self.held.load("default")
        self.gate = Gate(
            settings.queues["default"],
            settings=settings,
            alias="default",
            most_bytes=settings.PREFETCH_BYTES,
            held=self.held,
            known_pauses=self.known_pauses,
            wakeup=Wakeup(),
        )

    def __call__(self, waited: float | None = None, *, started: int = 5) -> int:
        """Return it after some events have ``started`` that had ``waited`` so many seconds."""
        if waited is not None:
            self.load.started, self.load.longest_wait = started, waited
        return self.gate.room(self.clock())

    @property
    def again(self) -> float:
        """The seconds until it is to be asked again."""
        return self.gate.again(self.clock()) - self.clock()


def test_the_room_doubles_while_events_start_soon_and_halves_otherwise(clock: Clock) -> None:
    queue = Queue(clock)
    queue.gate.ended_poll(None, asked_at=clock())
    assert [queue(0.1) for _ in range(5)] == [16, 32, 64, 100, 100]
    assert queue(0.9 * SHRINK_ABOVE) == 100
    assert [queue(1.1 * SHRINK_ABOVE) for _ in range(5)] == [50, 25, 12, 8, 8]


def test_the_room_stays_while_nothing_starts_and_where_there_is_no_backlog(clock: Clock) -> None:
    queue = Queue(clock)
    assert (queue(), queue(0.01)) == (8, 8)


def test_the_first_events_say_nothing_for_a_thread_was_free_for_each(clock: Clock) -> None:
    queue = Queue(clock)
    queue.gate.ended_poll(None, asked_at=clock())
    assert queue(0.0, started=4) == 8


def test_with_room_it_is_asked_again_when_it_is_to_be_polled(clock: Clock) -> None:
    queue = Queue(clock)
    queue.gate.ended_poll(clock() + 7, asked_at=clock())
    assert (queue(), queue.again) == (8, 7)
    queue.gate.ended_poll(None, asked_at=clock())  # polled with others, it had more
    assert (queue(), queue.again) == (8, 0)


def test_without_a_free_thread_it_is_asked_again_when_events_may_be_late(clock: Clock) -> None:
    queue = Queue(clock)
    queue.gate.ended_poll(clock() + 7, asked_at=clock())
    queue.held.start(queue.held.add_rows([lease()]))
    assert queue()
    clock.advance(2 * BUSY_AFTER)
    assert (queue(), queue.again) == (0, RELEASE_INTERVAL)


def test_its_rate_says_when_there_is_room_again(clock: Clock) -> None:
    queue = Queue(clock, RATE="40/s")
    assert (queue(), queue.again) == (0, WORTHWHILE)  # the other workers are not known yet
    assert queue.gate.rate is not None
    queue.gate.rate.set_workers(2)
    assert queue() == 0
    clock.advance(WORTHWHILE)
    assert queue() == 5
    queue.gate.claimed([lease() for _ in range(5)])
    queue.gate.ended_poll(None, asked_at=clock())
    assert queue() == 0
    assert WORTHWHILE - 0.05 < queue.again <= WORTHWHILE


@pytest.mark.parametrize(
    ("kind", "times", "again"),
    [
        ("queue", PauseTimes(1, None, 0.0), READ_INTERVAL),
        ("breaker", PauseTimes(1, 60.0, 60.0), READ_INTERVAL),
        ("breaker", PauseTimes(1, 0.5, 60.0), 0.5),
    ],
)
def test_it_is_closed_during_a_pause_and_then_polled_from_the_beginning(
    kind: str, times: PauseTimes, again: float, clock: Clock, dialect: Any
) -> None:
    queue = Queue(clock)
    queue.gate.ended_poll(clock() + 7, asked_at=clock())
    queue.gate.branch(EVENTS, 1, scan=True)
    queue.gate.polled(EVENTS, Found(more=False))
    dialect.pauses.return_value = {(kind, "default"): times}
    queue.known_pauses.read(connection())
    assert (queue.gate.closed, queue(), queue.again) == (True, 0, again)
    dialect.pauses.return_value = {}
    queue.known_pauses.read(connection())
    assert (queue.gate.closed, queue()) == (False, 8)
    assert queue.gate.again(clock()) <= clock()
    since = queue.gate.branch(EVENTS, 1, scan=False).since
    assert since is not None
    assert since >= CENTURY
