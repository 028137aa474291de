"""The simulation: the same seed gives the same history, and each rule of its oracle fires."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from django_outbox.listeners.registry import digest
from tests.simulation import mutants
from tests.simulation.evidence import Call, Event, Lease, Table
from tests.simulation.oracle import DEAD, DONE, FINAL, NEW, RETRY, Oracle, Rules
from tests.simulation.plan import KINDS

pytest.importorskip("greenlet")

REPOSITORY = Path(__file__).parents[1]


def played(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        text=True,
        capture_output=True,
        check=False,
    )


def test_the_same_seed_gives_the_same_history():
    """In another process, with other hashes, alone or after others."""
    every = played("10", "4", "--digests", hash_seed="1").stdout.splitlines()
    alone = played("13", "--digests", hash_seed="2").stdout.splitlines()
    assert len({*every}) == 4
    assert alone == every[-1:]


def test_a_history_of_each_kind_breaks_no_rule():
    found = played("0", str(len(KINDS)), "--jobs", "2", "--keep-going")
    assert found.returncode == 0, found.stdout + found.stderr


# What the simulation found once, and what was wrong: kind and seed.
FOUND = {
    # A stalled release ended the lease that its worker had on the stream by then.
    "stalled releases": 0,
    # A settle whose answer was lost was repeated, and counted a second attempt.
    "lost answers": 11,
    # A late claim had renewed a lease of its worker, and started what was settled meanwhile.
    "hung": 29,
    # An event that came to the queue of a paused listener forgot what the others had done.
    "pauses": 634,
    # A queue that had rested had more, and others were polled again and again meanwhile.
    "calm": 408,
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_was_found_once_does_not_come_back(kind):
    found = played(str(FOUND[kind]), "--kind", kind)
    assert found.returncode == 0, found.stdout + found.stderr


def test_an_idle_worker_is_quiet():
    """It sends at most eight statements a second, with the default settings and sixteen queues."""
    lines = played("0", "--kind", "idle", "--trace").stdout.splitlines()
    assert 60 < sum(" worker1 " in each and " sql " in each for each in lines) <= 8 * 60


def test_a_mutant_is_found():
    found = played_mutant("a stream that goes on after a failure")
    assert "order" in found


def played_mutant(word: str) -> str:
    return next(mutants.tried(each, 30, 2) for each in mutants.OWN if word in each.name)


# -- the oracle ------------------------------------------------------------------------------------


class Story:
    """Tables that a test changes, and the oracle that looks at them."""

    def __init__(self, *, is_calm: bool = False) -> None:
        self.second = 0.0
        self.now_table = Table({}, {}, {}, set(), {}, set(), replayed=0, open_replays=0)
        self.broken: list[str] = []
        rules = Rules(
            listeners={"plain": frozenset({"plain"})},
            queues={"plain": "mail"},
            max_attempts=2,
            max_rescues=3,
            dead_blocks=False,
            failure_blocks=True,
            is_calm=is_calm,
        )
        self.oracle = Oracle(
            self,
            rules,
            report=lambda rule, text: self.broken.append(rule),  # type: ignore[arg-type]
            clock=lambda: self.second,
        )

    def now(self) -> str:
        return instant(self.second)

    def have_changed(self) -> bool:
        return True

    def read(self) -> Table:
        table = deepcopy(self.now_table)
        for event in table.events.values():
            is_leased = event.stream is None and event.id in table.leases
            state = "ended" if event.status in FINAL else "leased" if is_leased else "waiting"
            event.state = event.state or state
        return table

    def event(self, event_id: str, **columns: object) -> Event:
        given = {"due": instant(0), "stream": None, "seq": 1, **columns}
        routes = frozenset([digest("plain")])
        event = Event(event_id, event_id, "plain", routes, "plain", NEW, 0, 0, **given)  # type: ignore[arg-type]
        self.now_table.events[event_id] = event
        if event.stream is not None:
            self.now_table.streams.setdefault(event.stream, instant(0))
        self.oracle.look("")
        return event

    def lease(self, holder: str, worker: str | None, until: float = 30, by: str = "") -> None:
        if worker is None:
            del self.now_table.leases[holder]
        else:
            self.now_table.leases[holder] = Lease(worker, instant(until), self.now())
        self.oracle.look(by or worker or "")

    def call(self, event_id: str, worker: str = "w1", **options: object) -> Call:
        call = Call(event_id=event_id, listener="plain", worker=worker, number=self.number())
        call = replace(call, **options)  # type: ignore[arg-type]
        self.oracle.begins(call)
        return call

    def number(self) -> int:
        return len(self.oracle.calls) + 1

    def settle(self, event: Event, status: int, by: str = "w1", **columns: object) -> None:
        event.status = status
        for name, value in columns.items():
            setattr(event, name, value)
        self.now_table.leases.pop(event.id, None)
        self.oracle.look(by)


def instant(second: float) -> str:
    return f"2026-01-01 00:00:{second:06.3f}000"


@pytest.fixture
def story() -> Story:
    return Story()


def leased(story: Story, **columns: object) -> Event:
    event = story.event("e1", **columns)
    story.lease(event.stream or event.id, "w1")
    return event


def succeeded(story: Story) -> Event:
    event = leased(story)
    story.oracle.ends(story.call("e1"), "done")
    return event


def ghost(story: Story) -> None:
    story.call("never written")


def expired(story: Story) -> None:
    leased(story)
    story.second = 31
    story.call("e1")


def taken(story: Story) -> None:
    leased(story)
    story.lease("e1", "w2")


def ended_by_another(story: Story) -> None:
    leased(story)
    story.lease("e1", None, by="w2")


def freed(story: Story) -> None:
    leased(story)
    story.call("e1")
    story.lease("e1", None, by="w1")


def twice_after_success(story: Story) -> None:
    succeeded(story)
    story.call("e1")


def twice_at_once(story: Story) -> None:
    leased(story)
    story.call("e1")
    story.call("e1")


def order(story: Story) -> None:
    story.event("e0", stream=":k", seq=1)
    leased(story, stream=":k", seq=2)
    story.call("e1")


def idle(story: Story) -> None:
    story.event("e1", due=None)


def idle_stream(story: Story) -> None:
    story.event("e1", stream=":k")
    del story.now_table.streams[":k"]
    story.oracle.look("")


def done(story: Story) -> None:
    story.settle(leased(story), DONE)


def lost(story: Story) -> None:
    leased(story)
    del story.now_table.events["e1"]
    story.oracle.look("w1")


def attempts(story: Story) -> None:
    event = leased(story)
    story.oracle.ends(story.call("e1"), "failed")
    story.settle(event, RETRY, attempts=2)


def attempts_above_the_policy(story: Story) -> None:
    event = leased(story)
    for _ in range(3):
        story.oracle.ends(story.call("e1"), "failed")
    story.settle(event, RETRY, attempts=3)


def innocent(story: Story) -> None:
    story.settle(leased(story), DEAD)


def poison(story: Story) -> None:
    leased(story)
    for _ in range(4):
        story.oracle.kills("e1")


def breaker(story: Story) -> None:
    story.now_table.breakers.add("mail")
    story.oracle.look("w1")
    story.now_table.breakers.clear()
    story.oracle.look("w1")


def parked(story: Story) -> None:
    story.event("e1")
    story.now_table.parked["e1"] = "paused:1"
    story.oracle.look("w1")


def uncounted_replay(story: Story) -> None:
    story.settle(succeeded(story), DONE)
    story.now_table.replayed = 1
    story.oracle.finish()


def open_replay(story: Story) -> None:
    story.now_table.open_replays = 1
    story.oracle.finish()


def state(story: Story) -> None:
    story.event("e1", state="leased, though its writer has just committed")


def stuck(story: Story) -> None:
    story.event("e1")
    story.oracle.finish()


def stuck_lease(story: Story) -> None:
    story.settle(succeeded(story), DONE)
    story.lease("k", "w1")
    story.oracle.finish()


FALSE = [
    ("ghost", ghost),
    ("expired", expired),
    ("taken", taken),
    ("taken", ended_by_another),
    ("freed", freed),
    ("twice", twice_after_success),
    ("twice", twice_at_once),
    ("order", order),
    ("idle", idle),
    ("idle", idle_stream),
    ("done", done),
    ("lost", lost),
    ("attempts", attempts),
    ("attempts", attempts_above_the_policy),
    ("innocent", innocent),
    ("poison", poison),
    ("breaker", breaker),
    ("parked", parked),
    ("replays", uncounted_replay),
    ("replays", open_replay),
    ("state", state),
    ("stuck", stuck),
    ("stuck", stuck_lease),
]


@pytest.mark.parametrize(("rule", "tell"), FALSE, ids=[tell.__name__ for _, tell in FALSE])
def test_a_false_history_breaks_its_rule_alone(story, rule, tell: Callable[[Story], None]):
    tell(story)
    assert {*story.broken} == {rule}


def test_a_lease_that_ends_under_a_call_needs_a_cause():
    story = Story(is_calm=True)
    leased(story)
    story.call("e1")
    story.second = 31
    story.lease("e1", "w2", until=50)
    assert story.broken == ["lapsed"]


def test_a_true_history_breaks_none(story):
    """A call is repeated because its lease ended, fails, is tried again, and ends well."""
    event = leased(story)
    story.call("e1")
    story.second = 31
    story.lease("e1", "w2", until=50)
    story.oracle.ends(story.call("e1", "w2"), "failed")
    story.settle(event, RETRY, by="w2", attempts=1)
    story.lease("e1", "w2", until=55)
    story.oracle.ends(story.call("e1", "w2"), "done")
    story.settle(event, DONE, by="w2")
    story.oracle.finish()
    assert story.broken == []
