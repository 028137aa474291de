"""The oracle of the fault harness: every violation is counted, and only what is one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import django_outbox
from tests.faults.mutants import MUTANTS, Mutant, apply
from tests.faults.oracle import (
    Deed,
    Evidence,
    Fault,
    Intent,
    Row,
    Verdict,
    executions,
    judge,
    latencies,
    percentile,
    recoveries,
)
from tests.faults.witness import Line

pytestmark = pytest.mark.any_database

ONE, TWO = 11, 22  # process ids


def intent(event_id: str = "a", kind: str = "plain", **given: Any) -> Intent:
    return Intent(**{"event_id": event_id, "kind": kind, "key": None, "writer": 1, "n": 1,
                     "at": 0.0, **given})  # fmt: skip


def row(event_id: str = "a", **given: Any) -> Row:
    return Row(**{"event_id": event_id, "status": 1, "attempts": 0, "key": None, "seq": None,
                  "leased": False, **given})  # fmt: skip


def ran(
    start: float, end: float | None, *, event_id: str = "a", pid: int = ONE, attempts: int = 0,
    phase: str = "end",
) -> list[Line]:  # fmt: skip
    said = [("start", start), (phase, end)] if end is not None else [("start", start)]
    return [
        Line(id=event_id, attempts=attempts, phase=each, pid=pid, thread=1, at=at)
        for each, at in said
    ]


def asked(what: str) -> Deed:
    return Deed(what=what, ids=["a"], at=3, until=3.5)


def evidence(
    *lines: Sequence[Line], intents: Sequence[Intent] = (intent(),), rows: Sequence[Row] = (row(),),
    faults: Sequence[Fault] = (), **given: Any,
) -> Evidence:  # fmt: skip
    said = sorted((line for each in lines for line in each), key=lambda line: line.at)
    return Evidence(**{
        "intents": {each.event_id: each for each in intents},
        "rows": {each.event_id: each for each in rows},
        "lines": said, "faults": faults, "pids": {ONE, TWO}, "bookings": {}, "lease": 2.0, **given,
    })  # fmt: skip


def violations(found: Verdict) -> dict[str, int]:
    return {name: value for name in found.VIOLATIONS if (value := getattr(found, name))}


def kill(at: float, pid: int = ONE) -> Fault:
    return Fault(kind="kill", at=at, until=at, pids=frozenset({pid}))


def stop(at: float, until: float, pid: int) -> Fault:
    return Fault(kind="pause", at=at, until=until, pids=frozenset({pid}))


WELL: dict[str, Evidence] = {
    "one run": evidence(ran(1, 2)),
    "a counted failure": evidence(ran(1, 2, phase="failed"), ran(3, 4, attempts=1)),
    "a row that was purged": evidence(ran(1, 2), rows=[], purged=True),
    "a deferral": evidence(ran(1, 2, phase="deferred"), ran(3, 4, pid=TWO)),
    "a kill in the run": evidence(ran(1, None), ran(4, 5, pid=TWO), faults=[kill(1.5)]),
    "a kill before the settle": evidence(ran(1, 2), ran(4, 5, pid=TWO), faults=[kill(2.1)]),
    "a pause, and both at a time": evidence(
        ran(1, 6), ran(4, 7, pid=TWO),
        faults=[Fault(kind="pause", at=1.5, until=5.5, pids=frozenset({ONE}))],
    ),
    "a dead event of a mortal kind": evidence(
        ran(1, 2, phase="failed"), ran(3, 4, attempts=1, phase="failed"),
        intents=[intent(kind="raises")], rows=[row(status=3, attempts=2)], mortal=("raises",),
        attempts=2,
    ),
    "an atomic listener whose commit was refused": evidence(
        ran(1, 2), ran(3, 4, attempts=1), intents=[intent(kind="booked")], bookings={"a": 1},
    ),
    "two of a key, one after the other": evidence(
        ran(1, 2), ran(3, 4, event_id="b"),
        intents=[intent(key="k"), intent("b", key="k", n=2)],
        rows=[row(key="k", seq=1), row("b", key="k", seq=2)],
    ),
}  # fmt: skip

ILL: dict[str, tuple[Evidence, dict[str, int]]] = {
    "no run": (evidence(), {"lost": 1, "done_without_effect": 1}),
    "no row": (evidence(rows=[]), {"lost": 1}),
    "a row that was purged before its effect": (
        evidence(ran(1, None), rows=[], purged=True),
        {"lost": 1},
    ),
    "a run that never ended": (evidence(ran(1, None)), {"lost": 1, "done_without_effect": 1}),
    "pending": (evidence(ran(1, 2), rows=[row(status=0)]), {"stuck": 1}),
    "done and leased": (evidence(ran(1, 2), rows=[row(leased=True)]), {"stuck": 1}),
    "an effect of nothing": (evidence(ran(1, 2), ran(3, 4, event_id="b")), {"ghosts": 1}),
    "a row of nothing": (evidence(ran(1, 2), rows=[row(), row("b")]), {"ghosts": 1}),
    "a repeat without a fault": (evidence(ran(1, 2), ran(3, 4, pid=TWO)), {"unexplained": 1}),
    "a repeat before the fault": (
        evidence(ran(1, 2), ran(3, 4, pid=TWO), faults=[kill(3.5)]), {"unexplained": 1},
    ),
    "a repeat of what another process ran": (
        evidence(ran(1, 2), ran(3, 4), faults=[kill(2.5, TWO)]), {"unexplained": 1},
    ),
    "a repeat of what was settled long before": (
        evidence(ran(1, 2), ran(9, 10, pid=TWO), faults=[kill(8)]), {"unexplained": 1},
    ),
    "a failure that wakes what had ended": (
        evidence(
            ran(1, 5, phase="failed"), ran(3, 4, pid=TWO), ran(6, 7, attempts=1),
            faults=[Fault(kind="pause", at=1.5, until=4.5, pids=frozenset({ONE}))],
        ),
        {"unexplained": 1},
    ),
    "both at a time": (
        evidence(ran(1, 4), ran(3, 5, pid=TWO)), {"unexplained": 1, "overlaps": 1},
    ),
    "dead of nothing": (evidence(ran(1, 2), rows=[row(status=3)]), {"false_dead": 1}),
    "dead too early": (
        evidence(
            ran(1, 2, phase="failed"), intents=[intent(kind="raises")],
            rows=[row(status=3, attempts=1)], mortal=("raises",), attempts=2,
        ),
        {"false_dead": 1},
    ),
    "booked twice": (
        evidence(ran(1, 2), intents=[intent(kind="booked")], bookings={"a": 2}),
        {"booked_twice": 1},
    ),
    "never booked": (
        evidence(ran(1, 2), intents=[intent(kind="booked")]),
        {"lost": 1, "done_without_effect": 1},
    ),
    "a process from elsewhere": (evidence(ran(1, 2, pid=99)), {"foreign": 2}),
    "the second before the first has ended": (
        evidence(
            ran(1, 3), ran(2, 4, event_id="b", pid=TWO),
            intents=[intent(key="k"), intent("b", key="k", n=2)],
            rows=[row(key="k", seq=1), row("b", key="k", seq=2)],
        ),
        {"inversions": 1},
    ),
    "replayed though it had ended well": (
        evidence(ran(1, 2), ran(4, 5), deeds=[asked("replay")]),
        {"unexplained": 1},
    ),
    "discarded though it had ended well": (
        evidence(ran(1, 2), rows=[], deeds=[asked("discard")]),
        {"lost": 1},
    ),
    "places against the writer's order": (
        evidence(
            ran(1, 2), ran(3, 4, event_id="b"),
            intents=[intent(key="k", n=2), intent("b", key="k", n=1)],
            rows=[row(key="k", seq=1), row("b", key="k", seq=2)],
        ),
        {"inversions": 1},
    ),
}  # fmt: skip


WELL["replayed"] = evidence(
    ran(1, 2, phase="failed"), ran(4, 5), deeds=[asked("replay")],
)  # fmt: skip
WELL["replayed out of its order"] = evidence(
    ran(1, 2, phase="failed"), ran(2.1, 2.2, event_id="b"), ran(4, 5), deeds=[asked("replay")],
    intents=[intent(key="k"), intent("b", key="k", n=2)],
    rows=[row(key="k", seq=1), row("b", key="k", seq=2)],
)  # fmt: skip
WELL["stopped on the way into a listener"] = evidence(
    ran(0.1, 0.2, event_id="b", pid=TWO), ran(2, 2.5), ran(3.1, 3.2, pid=TWO),
    intents=[intent(), intent("b")], rows=[row(), row("b")], faults=[stop(1, 3, TWO)],
)  # fmt: skip
WELL["stopped a moment after the stop was asked for"] = evidence(
    ran(0.9, 1.01, event_id="b", pid=TWO), ran(2, 2.5), ran(3.1, 3.2, pid=TWO),
    intents=[intent(), intent("b")], rows=[row(), row("b")], faults=[stop(1, 3, TWO)],
)  # fmt: skip
WELL["stopped on the way into the listener that ran first"] = evidence(
    ran(0.9, 0.95, event_id="b"), ran(3.1, 3.2), ran(3.3, 3.4, pid=TWO),
    intents=[intent(), intent("b")], rows=[row(), row("b")], faults=[stop(1, 3, ONE)],
)  # fmt: skip
WELL["a server away for so long that leases end"] = evidence(
    ran(1, 2), ran(4, 5, pid=TWO), faults=[Fault(kind="restart kill", at=2.1, until=3.9)]
)
ILL["a server back before leases end"] = (
    evidence(ran(1, 2), ran(4, 5, pid=TWO), faults=[Fault(kind="restart kill", at=2.1, until=3)]),
    {"unexplained": 1},
)
ILL["a server away when all was settled"] = (
    evidence(ran(1, 2), ran(8, 9, pid=TWO), faults=[Fault(kind="restart kill", at=5, until=7)]),
    {"unexplained": 1},
)
ILL["a lease not looked at after a stop"] = (
    evidence(
        ran(2, 2.5), ran(3.1, 3.2, event_id="b", pid=TWO), ran(3.3, 3.4, pid=TWO),
        intents=[intent(), intent("b")], rows=[row(), row("b")], faults=[stop(1, 3, TWO)],
    ),
    {"unexplained": 1},
)  # fmt: skip
WELL["discarded"] = evidence(
    ran(1, 2, phase="failed"), rows=[], deeds=[asked("discard")],
)  # fmt: skip


# Row 500.
@pytest.mark.parametrize("name", WELL)
def test_500_what_is_well_is_no_violation(name: str) -> None:
    assert violations(judge(WELL[name])) == {}


# Row 500.
@pytest.mark.parametrize("name", ILL)
def test_500_every_violation_is_counted(name: str) -> None:
    found, expected = ILL[name]
    assert violations(judge(found)) == expected


def test_recovery_is_counted_from_the_kill() -> None:
    found = evidence(
        ran(1, None), ran(4, None, pid=TWO), ran(9, 10), faults=[kill(1.5), kill(5, TWO)]
    )
    assert recoveries(found, executions(found, Verdict())) == ([2.5], [4.0])


@pytest.mark.parametrize("held", ["a", "k"])
def test_recovery_is_counted_from_the_last_worker_that_held_the_event(held: str) -> None:
    then = Fault(kind="kill", at=4, until=4, pids=frozenset({TWO}), held=frozenset({held}))
    found = evidence(ran(1, None), ran(6, 7), intents=[intent(key="k")], faults=[kill(1.5), then])
    assert recoveries(found, executions(found, Verdict())) == ([], [2.0])


def test_latency_counts_from_the_commit_or_the_due_time() -> None:
    found = evidence(
        ran(1, 2), ran(3, 4, event_id="b"), intents=[intent(at=0.5), intent("b", at=0.5, due=2.5)]
    )
    assert latencies(found, executions(found, Verdict())) == [0.5, 0.5]
    assert percentile([], 0.5) is None
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.name for each in MUTANTS])
def test_every_mutant_still_finds_what_it_takes_away(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(Path(django_outbox.__file__).parent, tmp_path / "package")
    apply(mutant, tmp_path / "package")
    for name, _, new in mutant.edits:
        text = (tmp_path / "package" / name).read_text()
        assert new in text
        compile(text, name, "exec")
