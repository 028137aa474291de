"""Keyed events while worker processes are killed, join and leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from tests.fleet import Fleet, wait_until
from tests.table import write

pytestmark = pytest.mark.django_db(transaction=True)


# -- workers that join, leave or die ---------------------------------------------------------

SHARING = {"LEASE": 4, "WORKERS": 2}


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, **SHARING, DRAIN_TIMEOUT=2)
    yield fleet
    fleet.kill_all()


def backlog(keys: int, each: int, seconds: float) -> list[str]:
    return [
        each_id
        for n in range(keys)
        for each_id in write(each, key=f"key-{n}", payload={"seconds": seconds})
    ]


def in_order(fleet: Fleet) -> bool:
    """Return whether each event started only after all earlier ones of its key had ended."""
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
    """Each thread repeats at most one event, running or not settled; not a whole group commit."""
    ids = backlog(8, 60, 0.01)  # long enough for each kill to interrupt some
    kills = 3
    for n in range(kills):
        worker = fleet.start()
        wait_until(lambda n=n: len(fleet.lines()) > 200 * (n + 1), what="work")  # type: ignore[misc]
        worker.kill()
        worker.wait()
    last = fleet.start()
    wait_until(lambda: not OutboxEvent.objects.pending().exists())
    starts = fleet.starts()
    assert {*starts} == {*ids}
    assert 0 < sum(starts.values()) - len(ids) <= kills * SHARING["WORKERS"]
    assert in_order(fleet)
    fleet.end(last)


def test_who_joins_under_load_gets_its_share_and_who_leaves_hands_over_at_once(
    fleet: Fleet,
) -> None:
    def start() -> psutil.Popen:
        settings = {**SHARING, "LEASE": 9, "DRAIN_TIMEOUT": 2}  # shares are counted each 3 s
        return fleet.start(OUTBOX_TEST_SETTINGS=json.dumps(settings))

    def held_by(worker: psutil.Popen) -> set[str]:
        mine = OutboxStream.objects.filter(locked_by__contains=f"-{worker.pid}-")
        return {*mine.values_list("pk", flat=True)}

    def delivers(worker: psutil.Popen) -> set[str]:
        ids = {line.id for line in fleet.lines() if line.pid == worker.pid}
        return {*OutboxEvent.objects.filter(pk__in=ids).values_list("key", flat=True)}

    backlog(12, 300, 0.05)  # more than they can deliver meanwhile
    first = start()
    wait_until(lambda: len(fleet.lines()) > 20, what="load")
    second = start()
    wait_until(lambda: OutboxWorker.objects.filter(pid=second.pid).exists(), what="who joins")
    # Six are a fair share; one may still be on its way when we count.
    wait_until(lambda: len(held_by(second)) >= 5, what="a fair share")
    wait_until(lambda: len(delivers(second)) > 1, what="work of who joined")
    fleet.end(first)
    assert not held_by(first)  # handed over at once
    wait_until(lambda: len(delivers(second)) == 12, what="work of who left")
    fleet.end(second)
    assert OutboxEvent.objects.pending().exists()
    assert not OutboxStream.objects.exclude(locked_by=None).exists()
    assert max(fleet.starts().values()) == 1
    assert in_order(fleet)
