"""Keyed events and worker processes that are killed: the chaos of ``ordered_chaos``, small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from django_outbox.models import OutboxEvent
from tests import databases
from tests.fleet import Fleet
from tests.ordered_chaos import OUTBOX, Chaos
from tests.table import write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SQLITE = databases.vendor() == "sqlite"  # where a paused process may keep everybody out


# Rows 361, 376; G1, W10.
def test_kills_and_pauses_leave_the_order_and_lose_nothing(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    try:
        found = Chaos(fleet, {**database_env, "PYTHONPATH": "."}, seed=1).run(
            events=240, keys=20, workers=2, kills=2, pauses=0 if SQLITE else 1, within=60
        )
    finally:
        fleet.kill_all()
    assert (found["lost"], found["ghosts"], found["inversions"]) == (0, 0, 0)
    assert found["done"] == found["events"] == found["committed"] >= 240
    assert found["faults"]["kill"] == 2


# -- how much a death repeats ---------------------------------------------------------------

SHARING = {"LEASE": 3, "WORKERS": 2, "POLL_INTERVAL": 0.3, "PROBE_INTERVAL": 0.1}


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **SHARING, DRAIN_TIMEOUT=2)
    yield fleet
    fleet.kill_all()


def backlog(keys: int, each: int, seconds: float) -> list[str]:
    return [each_id for n in range(keys)
            for each_id in write(each, key=f"key-{n}", payload={"seconds": seconds})]  # fmt: skip


def in_order(fleet: Fleet) -> bool:
    """Whether no event was started before all those of its key that precede it had ended."""
    places = {each.pk: (each.key, each.seq) for each in OutboxEvent.objects.all()}
    ended: dict[str | None, int] = {}
    first = {key: min(seq for k, seq in places.values() if k == key) for key, _ in places.values()}
    for line in fleet.lines():
        key, seq = places[line.id]
        assert seq is not None
        if line.phase == "start" and seq > ended.get(key, first[key] - 1) + 1:
            return False
        if line.phase == "end":
            ended[key] = max(seq, ended.get(key, 0))
    return True


def test_a_kill_repeats_no_more_than_what_the_threads_were_in(fleet: Fleet) -> None:
    """Each thread has one event running, or run and not settled yet."""
    ids = backlog(8, 25, 0.02)
    kills = 3
    for n in range(kills):
        worker = fleet.start()
        wait_until(lambda n=n: len(fleet.lines()) > 60 * (n + 1), what="work")  # type: ignore[misc]
        worker.kill()
        worker.wait()
    last = fleet.start()
    wait_until(lambda: not OutboxEvent.objects.pending().exists(), within=60)
    starts = fleet.starts()
    assert {*starts} == {*ids}
    assert 0 < sum(starts.values()) - len(ids) <= kills * SHARING["WORKERS"]
    assert in_order(fleet)
    fleet.end(last)
