"""Rescues with processes that really die: poison events end dead, the others are delivered."""

from __future__ import annotations

import pytest

from django_outbox.models import OutboxEvent
from tests.fleet import POISONED, Fleet, wait_until
from tests.table import row, statuses, write
from tests.test_rescue import MAX_RESCUES, PROCESSES, fleet, pending

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["fleet"]  # fixtures


# -- poison ----------------------------------------------------------------------------------------


def test_poison_ends_dead_and_the_innocent_live(fleet: Fleet) -> None:
    innocent, poison = [], []
    for _ in range(3):
        innocent += write(50, payload={"seconds": 0.005})
        poison += write(1, "order.poison")
        innocent += write(50, payload={"seconds": 0.005})
    workers = fleet.start_several(PROCESSES)
    wait_until(lambda: not pending(), what="an event pending")
    assert fleet.end(workers) == 0

    assert {*OutboxEvent.objects.dead().values_list("event_id", flat=True)} == {*poison}
    for event_id in poison:
        dead = row(event_id)
        assert (dead.attempts, dead.last_error) == (0, f"lost {MAX_RESCUES} workers")
        assert (dead.rescues, dead.locked_by) == (0, None)
        assert not dead.available_at
    assert {*innocent} == {line.id for line in fleet.lines() if line.phase == "end"}
    assert statuses() == {"DONE": len(innocent), "DEAD": len(poison)}
    check_trials(fleet, poison)


def check_trials(fleet: Fleet, poison: list[str]) -> None:
    """Check the trials of each poison event: at most MAX_RESCUES, the last three of them alone.

    Each trial ends a process; two trials may end the same one.
    """
    trials: dict[str, list[int | None]] = {event_id: [] for event_id in poison}
    for line in fleet.lines():
        if line.type == "order.poison":
            trials[line.id].append(line.held)
    for held in trials.values():
        assert 3 <= len(held) <= MAX_RESCUES
        assert held[-3:] == [0, 0, 0]
    ended = fleet.logged(f"code={POISONED}")
    assert 3 * 3 <= len(ended) <= sum(map(len, trials.values()))
