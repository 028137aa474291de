"""What the housekeeper does without a claim: moves what waits in unknown queues, ends pauses."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.worker import housekeeper
from django_outbox.worker.effects import perform
from django_outbox.worker.housekeeper import BATCH, SEARCH_INTERVAL, Housekeeper
from django_outbox.worker.pauses import KnownPauses
from django_outbox.worker.polling import Wakeup
from tests.unit.scripted import Clock, connection


class Keeping:
    """A housekeeper, and what it tells the claimer."""

    def __init__(self, *, adopts: bool = True) -> None:
        self.pauses, self.wakeup = KnownPauses(), Wakeup()
        self.keeper = Housekeeper(
            chores=[],
            known_pauses=self.pauses,
            wakeup=self.wakeup,
            configured=["default", "mail"],
            adopts=adopts,
        )

    def steps(self, clock: Clock, seconds: float) -> None:
        until = clock.now + seconds
        while clock.now < until:
            clock.advance(self.step())

    def step(self) -> float:
        return perform(connection(), self.keeper.step())


def test_what_waits_in_unknown_queues_is_moved_batch_by_batch(clock: Clock, dialect: Any) -> None:
    left = {"gone": 2 * BATCH + 1}
    dialect.other_queues.side_effect = lambda **known: [each for each in left if left[each]]

    def move(table: Any, *, of: str, queue: str, limit: int) -> int:
        moved = min(limit, left[of]) if table.name == "outbox_event" else 0
        left[of] -= moved
        return moved

    dialect.move.side_effect = move
    keeping = Keeping()
    keeping.steps(clock, SEARCH_INTERVAL + 1)
    assert left == {"gone": 0}
    assert {each.kwargs["queue"] for each in dialect.move.call_args_list} == {"default"}
    assert keeping.wakeup.poll_wanted


def test_what_an_interrupted_resume_left_is_moved_batch_by_batch(
    clock: Clock, dialect: Any
) -> None:
    left = [3, 2]
    dialect.stranded.side_effect = lambda: [7] * bool(left)
    dialect.keep_pauses.return_value = set()
    dialect.unpark.side_effect = lambda *given, **of: left.pop() if left else 0
    keeping = Keeping()
    keeping.steps(clock, SEARCH_INTERVAL + 1)
    assert left == []
    assert keeping.wakeup.poll_wanted


def test_a_worker_without_the_default_queue_leaves_them_alone(clock: Clock, dialect: Any) -> None:
    Keeping(adopts=False).steps(clock, 3 * SEARCH_INTERVAL)
    dialect.other_queues.assert_not_called()


def test_a_pause_is_ended_when_it_is_over_and_once(
    clock: Clock, dialect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []
    monkeypatch.setattr(housekeeper, "end_pauses", lambda alias: ended.append(clock.now))
    keeping = Keeping(adopts=False)
    keeping.pauses.ends_at = end = clock.now + 5.3
    keeping.steps(clock, 20)
    assert ended == [pytest.approx(end, abs=0.01)]
    assert keeping.wakeup.poll_wanted


def test_an_end_that_failed_is_tried_again(
    clock: Clock, dialect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[float] = []

    def end(alias: str) -> None:
        ended.append(clock.now)
        if len(ended) == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(housekeeper, "end_pauses", end)
    keeping = Keeping(adopts=False)
    keeping.pauses.ends_at = clock.now
    with pytest.raises(ZeroDivisionError):
        keeping.step()
    assert not keeping.wakeup.poll_wanted
    keeping.steps(clock, 5)
    assert len(ended) == 2
