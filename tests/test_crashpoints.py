"""A worker dies at a named point of a delivery; another one finishes, and no event is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.crashpoints import KILLED, POINTS, VARIABLE
from tests.fleet import Fleet, Line, wait_for_end_of
from tests.table import insert, now, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

EXPIRED = 40  # rows that a purge deletes

# Each crash point the first time it is reached and, where it matters, in the middle of the work.
PLACES = [
    "after_claim:1",
    "after_claim:3",
    "after_hot_claim:1",
    "before_listener:1",
    "before_listener:17",
    "after_listener:1",
    "after_listener:17",
    "in_atomic_settle:3",
    "before_settle:1",
    "before_settle:3",
    "after_settle:1",
    "after_settle:3",
    "mid_batch:1",
    "in_heartbeat:1",
    "in_purge:2",
]


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(
        database_env,
        tmp_path,
        LEASE=0.8,
        DRAIN_TIMEOUT=0.5,
        WORKERS=3,
        POLL_INTERVAL=0.2,
        POLL_BATCH_SIZE=10,
        PURGE_BATCH_SIZE=10,
    )
    yield fleet
    fleet.kill_all()


def test_every_point_is_passed() -> None:
    assert {place.partition(":")[0] for place in PLACES} == set(POINTS)


@pytest.mark.parametrize("place", PLACES)
def test_a_death_costs_nothing_but_what_was_in_hand(fleet: Fleet, place: str) -> None:
    month_ago = {"done_at": now() - timedelta(days=30), "made": 31 * 86400}
    expired = {*insert(EXPIRED, due=None, status=Status.DONE, **month_ago)}
    placed = [write(payload=payload(n))[0] for n in range(24)]
    booked = write(12, "order.booked")
    worker = fleet.start(**{VARIABLE: place})
    assert wait_for_end_of(worker) == KILLED, fleet.log.read_text()
    crash = Crash(in_hand=in_hand(), before=fleet.lines(), expired=len(expired))
    crash.check(place)

    clean = fleet.start()
    wait_until(lambda: not OutboxEvent.objects.pending().exists(), what="an event pending")
    wait_until(lambda: not OutboxEvent.objects.expired().exists(), what="an expired event")
    assert fleet.end(clean) == 0

    assert set(placed + booked) <= {*rows()}
    assert not expired & {*rows()}
    check_oracle(fleet.lines(), crash.in_hand)
    assert [*Effect.objects.order_by("event_id").values_list("event_id", flat=True)] == booked
    failed_once = {placed[n] for n in range(24) if payload(n)["fails"]}
    assert {key for key, attempts in rows().items() if attempts == 1} == failed_once
    assert {*rows().values()} == {0, 1}


def payload(n: int) -> dict[str, object]:
    """Return a payload; the first two listeners are slow enough for a heartbeat meanwhile."""
    return {"seconds": 0.5 if n < 2 else 0.02, "fails": n % 3 == 0, "follow": n % 4 == 1}


def rows() -> dict[str, int]:
    """Return the attempts of each event in the table."""
    return dict(OutboxEvent.objects.values_list("event_id", "attempts"))


def in_hand() -> set[str]:
    """Return the ids of the events that the dead worker had leased."""
    return {*OutboxEvent.objects.exclude(locked_by=None).values_list("event_id", flat=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The state that a dead worker left."""

    in_hand: set[str]
    before: list[Line]
    expired: int

    def check(self, place: str) -> None:
        """Check that it died at the right point: the test would pass without a crash too."""
        started = {line.id for line in self.before if line.phase == "start"}
        through = {line.id for line in self.before if line.phase != "start"}
        settled = {*OutboxEvent.objects.done().values_list("event_id", flat=True)}
        booked = {line.id for line in self.before if line.type == "order.booked"}
        facts = {
            "after_claim:1": not started and self.in_hand,
            "after_claim:3": self.in_hand - started,
            "after_hot_claim:1": in_table("order.followed") & self.in_hand - started,
            "before_listener:1": not started and self.in_hand,
            "before_listener:17": len(started) >= 14,
            "after_listener:1": through & self.in_hand,
            "after_listener:17": through & self.in_hand and len(started) >= 17,
            "in_atomic_settle:3": booked & through & self.in_hand,
            "before_settle:1": through and not settled & through,
            "before_settle:3": through & self.in_hand and settled & through,
            "after_settle:1": (settled | retried()) & through,
            "after_settle:3": (settled | retried()) & through,
            "mid_batch:1": settled & through and not retried() and through & self.in_hand,
            "in_heartbeat:1": self.in_hand,
            "in_purge:2": 0 < OutboxEvent.objects.expired().count() < self.expired,
        }
        assert facts[place], (place, self)


def in_table(event_type: str) -> set[str]:
    found = OutboxEvent.objects.filter(event_type=event_type)
    return {*found.values_list("event_id", flat=True)}


def retried() -> set[str]:
    return {*OutboxEvent.objects.filter(attempts=1).values_list("event_id", flat=True)}


def check_oracle(lines: list[Line], in_hand: set[str]) -> None:
    """No event is lost, stuck, a ghost or done without effect; only leased ones ran twice."""
    finished = [line.id for line in lines if line.phase == "end"]
    assert statuses() == {"DONE": len(rows())}
    assert not OutboxEvent.objects.exclude(available_at=None, locked_by=None).exists()
    assert {*rows()} == {*finished}, "lost, without effect, or a ghost"
    assert not [line for line in lines if line.type == "order.ghost"]
    runs = [(line.id, line.attempts) for line in lines if line.phase == "start"]
    again = [run for run in runs if runs.count(run) > 1]
    assert {event_id for event_id, _ in again} <= in_hand
    assert all(again.count(run) == 2 for run in again)
