"""The oracle of the fault harness: every violation is counted, and only what is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.cases import cases
from tests.faults import log
from tests.faults.calls import batches, calls
from tests.faults.oracle import (
    HAND_BACK,
    WRITE_OFF,
    Deed,
    Evidence,
    Fault,
    Intent,
    Rescue,
    Row,
    Verdict,
    executions,
    judge,
    recoveries,
)
from tests.faults.witness import Line

ONE, TWO = 11, 22  # process ids


def intent(event_id: str = "a", kind: str = "plain", **given: Any) -> Intent:
    return Intent(
        **{"event_id": event_id, "kind": kind, "key": None, "writer": 1, "n": 1, "at": 0.0, **given}
    )


def row(event_id: str = "a", **given: Any) -> Row:
    return Row(
        **{
            "event_id": event_id,
            "status": 1,
            "attempts": 0,
            "key": None,
            "seq": None,
            "leased": False,
            **given,
        }
    )


def ran(
    start: float,
    end: float | None,
    *,
    event_id: str = "a",
    pid: int = ONE,
    attempts: int = 0,
    phase: str = "end",
    listener: str = "",
) -> list[Line]:
    said = [("start", start), (phase, end)] if end is not None else [("start", start)]
    return [
        Line(
            id=event_id, attempts=attempts, phase=each, pid=pid, thread=1, at=at, listener=listener
        )
        for each, at in said
    ]


def asked(what: str) -> Deed:
    return Deed(what=what, ids=["a"], at=3, until=3.5)


def evidence(
    *lines: Sequence[Line],
    intents: Sequence[Intent] = (intent(),),
    rows: Sequence[Row] = (row(),),
    faults: Sequence[Fault] = (),
    **given: Any,
) -> Evidence:
    said = sorted((line for each in lines for line in each), key=lambda line: line.at)
    return Evidence(
        **{
            "intents": {each.event_id: each for each in intents},
            "rows": {each.event_id: each for each in rows},
            "lines": said,
            "faults": faults,
            "pids": {ONE, TWO},
            "bookings": {},
            "lease": 2.0,
            **given,
        }
    )


def violations(found: Verdict) -> dict[str, int]:
    return {name: value for name in found.VIOLATIONS if (value := getattr(found, name))}


def kill(at: float, pid: int = ONE) -> Fault:
    return Fault(kind="kill", at=at, until=at, pids=frozenset({pid}))


def stop(at: float, until: float, pid: int) -> Fault:
    return Fault(kind="pause", at=at, until=until, pids=frozenset({pid}))


TWO_EVENTS: dict[str, Any] = {"intents": [intent(), intent("b")], "rows": [row(), row("b")]}
STOPPED: dict[str, Any] = {**TWO_EVENTS, "faults": [stop(1, 3, TWO)]}
KEYED: dict[str, Any] = {
    "intents": [intent(key="k"), intent("b", key="k", n=2)],
    "rows": [row(key="k", seq=1), row("b", key="k", seq=2)],
}

WELL: dict[str, Evidence] = {
    "one run": evidence(ran(1, 2)),
    "a counted failure": evidence(ran(1, 2, phase="failed"), ran(3, 4, attempts=1)),
    "a row that was purged": evidence(ran(1, 2), rows=[], purged=True),
    "a deferral": evidence(ran(1, 2, phase="deferred"), ran(3, 4, pid=TWO)),
    "a kill in the run": evidence(ran(1, None), ran(4, 5, pid=TWO), faults=[kill(1.5)]),
    "a kill before the settle": evidence(ran(1, 2), ran(4, 5, pid=TWO), faults=[kill(2.1)]),
    "a pause, and both at a time": evidence(
        ran(1, 6),
        ran(4, 7, pid=TWO),
        faults=[Fault(kind="pause", at=1.5, until=5.5, pids=frozenset({ONE}))],
    ),
    "a dead event of a mortal kind": evidence(
        ran(1, 2, phase="failed"),
        ran(3, 4, attempts=1, phase="failed"),
        intents=[intent(kind="raises")],
        rows=[row(status=3, attempts=2)],
        mortal=("raises",),
        attempts=2,
    ),
    "an atomic listener whose commit was refused": evidence(
        ran(1, 2), ran(3, 4, attempts=1), intents=[intent(kind="booked")], bookings={"a": 1}
    ),
    "two of a key, one after the other": evidence(ran(1, 2), ran(3, 4, event_id="b"), **KEYED),
}

ILL: dict[str, tuple[Evidence, dict[str, int]]] = {
    "no run": (evidence(), {"lost": 1, "done_without_effect": 1}),
    "no row": (evidence(rows=[]), {"lost": 1}),
    "pending": (evidence(ran(1, 2), rows=[row(status=0)]), {"stuck": 1}),
    "an effect of nothing": (evidence(ran(1, 2), ran(3, 4, event_id="b")), {"ghosts": 1}),
    "a row of nothing": (evidence(ran(1, 2), rows=[row(), row("b")]), {"ghosts": 1}),
    "a repeat without a fault": (evidence(ran(1, 2), ran(3, 4, pid=TWO)), {"unexplained": 1}),
    "a repeat of what was settled long before": (
        evidence(ran(1, 2), ran(9, 10, pid=TWO), faults=[kill(8)]),
        {"unexplained": 1},
    ),
    "both at a time": (evidence(ran(1, 4), ran(3, 5, pid=TWO)), {"unexplained": 1, "overlaps": 1}),
    "dead of nothing": (evidence(ran(1, 2), rows=[row(status=3)]), {"false_dead": 1}),
    "dead too early": (
        evidence(
            ran(1, 2, phase="failed"),
            intents=[intent(kind="raises")],
            rows=[row(status=3, attempts=1)],
            mortal=("raises",),
            attempts=2,
        ),
        {"false_dead": 1},
    ),
    "booked twice": (
        evidence(ran(1, 2), intents=[intent(kind="booked")], bookings={"a": 2}),
        {"booked_twice": 1},
    ),
    "a process from elsewhere": (evidence(ran(1, 2, pid=99)), {"foreign": 2}),
    "the second before the first has ended": (
        evidence(ran(1, 3), ran(2, 4, event_id="b", pid=TWO), **KEYED),
        {"inversions": 1},
    ),
    "replayed though it had ended well": (
        evidence(ran(1, 2), ran(4, 5), deeds=[asked("replay")]),
        {"unexplained": 1},
    ),
    "places against the writer's order": (
        evidence(
            ran(1, 2),
            ran(3, 4, event_id="b"),
            intents=[intent(key="k", n=2), intent("b", key="k", n=1)],
            rows=[row(key="k", seq=1), row("b", key="k", seq=2)],
        ),
        {"inversions": 1},
    ),
}


WELL["out of order in a listener that may get it so"] = evidence(
    ran(1, 4),
    ran(2, 3, event_id="b", pid=TWO),
    listeners={"plain": ("",)},
    unordered={"plain": ("",)},
    **KEYED,
)
WELL["replayed"] = evidence(ran(1, 2, phase="failed"), ran(4, 5), deeds=[asked("replay")])
WELL["stopped on the way into a listener"] = evidence(
    ran(0.1, 0.2, event_id="b", pid=TWO), ran(2, 2.5), ran(3.1, 3.2, pid=TWO), **STOPPED
)
WELL["a server away for so long that leases end"] = evidence(
    ran(1, 2), ran(4, 5, pid=TWO), faults=[Fault(kind="restart kill", at=2.1, until=3.9)]
)
WELL["a claim that a crash of the server lost"] = evidence(
    ran(1, 1.02), ran(2.5, 2.6), faults=[Fault(kind="restart immediate", at=1.1, until=2.2)]
)
ILL["a claim that was on disk when the server crashed"] = (
    evidence(ran(1, 1.1), ran(4, 4.1), faults=[Fault(kind="restart immediate", at=2.5, until=3)]),
    {"unexplained": 1},
)
ILL["a server back before leases end"] = (
    evidence(ran(1, 2), ran(4, 5, pid=TWO), faults=[Fault(kind="restart kill", at=2.1, until=3)]),
    {"unexplained": 1},
)
ILL["a lease not looked at after a stop"] = (
    evidence(ran(2, 2.5), ran(3.1, 3.2, event_id="b", pid=TWO), ran(3.3, 3.4, pid=TWO), **STOPPED),
    {"unexplained": 1},
)
WELL["discarded"] = evidence(ran(1, 2, phase="failed"), rows=[], deeds=[asked("discard")])


def handed_back(at: float, until: float, pid: int = ONE, event_id: str = "a") -> Fault:
    return Fault(
        kind=HAND_BACK, at=at, until=until, pids=frozenset({pid}), held=frozenset({event_id})
    )


def written_off(at: float, pid: int = ONE, event_id: str = "a") -> Fault:
    return Fault(kind=WRITE_OFF, at=at, until=at, pids=frozenset({pid}), held=frozenset({event_id}))


def lost_with(at: float, *held: str, kind: str = "kill", pid: int = ONE) -> Fault:
    return Fault(kind=kind, at=at, until=at, pids=frozenset({pid}), held=frozenset(held))


def rescued(*times: float, event_id: str = "a") -> list[Rescue]:
    return [Rescue(event_id=event_id, at=at) for at in times]


# Stops: what is handed back runs again from the start, and counts as nothing else.
WELL["handed back in the middle of it"] = evidence(
    ran(1, None), ran(4, 5, pid=TWO), faults=[handed_back(2, 2.5)]
)
ILL["a repeat without a hand-over"] = (
    evidence(ran(1, None), ran(4, 5, pid=TWO), faults=[Fault(kind="SIGTERM", at=2, until=3)]),
    {"unexplained": 1, "overlaps": 1},  # for all that is known, the first still runs
)
ILL["handed back, and run before the process was gone"] = (
    evidence(ran(1, None), ran(2.4, 5, pid=TWO), faults=[handed_back(2, 2.5)]),
    {"overlaps": 1},
)
ILL["an attempt counted by a stop"] = (
    evidence(ran(1, None), ran(4, 5, attempts=1, pid=TWO), faults=[handed_back(2, 2.5)]),
    {"false_attempts": 1},
)
ILL["two attempts for one failure"] = (
    evidence(ran(1, 2, phase="failed"), ran(3, 4, attempts=2)),
    {"false_attempts": 1},
)

# Rescues: one for each worker that was lost with the event, or with its key.
WELL["rescued after a crash"] = evidence(
    ran(1, None),
    ran(4, 5, pid=TWO),
    faults=[lost_with(2)],
    rescues=rescued(3.9),
    rows=[row(rescues=1)],
)
ILL["a rescue after an orderly stop"] = (
    evidence(ran(1, None), ran(4, 5, pid=TWO), faults=[handed_back(2, 2.5)], rescues=rescued(3.9)),
    {"false_rescues": 1},
)
ILL["two rescues for one crash"] = (
    evidence(ran(1, None), ran(4, 5, pid=TWO), faults=[lost_with(2)], rescues=rescued(3.9, 5.9)),
    {"false_rescues": 1},
)

# Timeouts: the call has failed, once; what its thread does later comes beside the retry.
WELL["written off, and late"] = evidence(
    ran(1, 2.5), ran(2, 3, attempts=1, pid=TWO), rows=[row(attempts=1)], faults=[written_off(1.5)]
)
ILL["a retry before it was written off"] = (
    evidence(ran(1, None), ran(1.4, 3, attempts=1, pid=TWO), faults=[written_off(1.5)]),
    {"overlaps": 1},
)


# Several listeners: each has to end well once, never two of them at a time.
SHARED = {"plain": ("here", "there")}


def shared(*lines: Sequence[Line], **given: Any) -> Evidence:
    return evidence(*lines, **{"listeners": SHARED, **given})


WELL["two listeners, one after the other"] = shared(
    ran(1, 2, listener="here"), ran(2.1, 3, listener="there", pid=TWO)
)
ILL["killed in one listener, when the other had ended long before"] = (
    shared(
        ran(1, 2, listener="here"),
        ran(2.1, None, listener="there"),
        ran(9, 10, listener="here", pid=TWO),
        ran(10.1, 11, listener="there", pid=TWO),
        faults=[kill(7)],
    ),
    {"unexplained": 1},
)
ILL["a repeat in one listener, and a timeout of the other"] = (
    shared(
        ran(1, 2.1, listener="here"),
        ran(2.2, None, listener="there"),
        ran(3, 4, listener="here", attempts=1),
        ran(4.1, 5, listener="there", attempts=1),
        faults=[replace(written_off(2.5), listener="there")],
    ),
    {"unexplained": 1, "false_attempts": 1},
)
WELL["each of two listeners lost with a worker"] = shared(
    ran(1, None, listener="here"),
    ran(1.1, 2.5, listener="there"),
    ran(4, 5, listener="here", pid=TWO),
    ran(5.1, 5.2, listener="there", pid=TWO),
    faults=[lost_with(2)],
    rescues=[replace(rescued(3.9)[0], listener=each) for each in ("here", "there")],
    rows=[row(rescues=1)],
)
ILL["one listener is out of order, and an event was replayed for another"] = (
    evidence(
        ran(1, 4, listener="t"),
        ran(2, 3, event_id="b", listener="t", pid=TWO),
        ran(4.1, 4.2, listener="t mail", phase="failed"),
        ran(5, 6, event_id="b", listener="t mail"),
        ran(7, 8, listener="t mail"),
        deeds=[replace(asked("replay"), at=4.5, until=4.6)],
        listeners={"plain": ("t", "t mail")},
        **KEYED,
    ),
    {"inversions": 1},
)
ILL["one of two listeners never ran"] = (
    shared(ran(1, 2, listener="here")),
    {"lost": 1, "done_without_effect": 1},
)
WELL["two listeners at a time"] = shared(
    ran(1, 3, listener="here"), ran(2, 4, listener="there", pid=TWO)
)


def called(since: float, outcome: str, *ids: str, attempts: int = 0, pid: int = ONE) -> list[Line]:
    """Return what the events of one call of a batch listener say."""
    said = [("start", since, since), (outcome, since + 0.1, 0.0)]
    return [
        Line(id=each, attempts=attempts, phase=phase, pid=pid, thread=1, at=at, since=began)
        for phase, at, began in said
        for each in ids
    ]


WELL["stopped on the way into a batch"] = evidence(
    called(0.5, "end", "c", pid=TWO),
    called(2, "end", "a", "b"),
    called(3.1, "end", "a", "b", pid=TWO),
    intents=[*TWO_EVENTS["intents"], intent("c")],
    rows=[*TWO_EVENTS["rows"], row("c")],
    faults=[stop(1, 3, TWO)],
)
ILL["a half that is called although the lease was lost before"] = (
    evidence(
        called(0.9, "shared", "a", "b", pid=TWO)[:2],
        called(2, "end", "a", "b"),
        called(3.2, "end", "a", "b", pid=TWO),
        ran(0.9, 3.1, event_id="c", pid=TWO),
        intents=[*TWO_EVENTS["intents"], intent("c")],
        rows=[*TWO_EVENTS["rows"], row("c")],
        faults=[stop(1, 3, TWO)],
    ),
    {"unexplained": 2},
)

WELL["a kill while a later part of the batch runs"] = evidence(
    called(1, "shared", "a", "b"),
    called(1.2, "end", "a"),
    called(4, "end", "b"),
    ran(7, 8, pid=TWO),
    ran(7, 8, event_id="b", pid=TWO),
    faults=[kill(4.5)],
    **TWO_EVENTS,
)
ILL["a kill while the next batch runs"] = (
    evidence(
        called(1, "end", "a"),
        called(4, "end", "b"),
        ran(7, 8, pid=TWO),
        ran(7, 8, event_id="b", pid=TWO),
        faults=[kill(4.5)],
        **TWO_EVENTS,
    ),
    {"unexplained": 1},
)
WELL["stopped on the way into a run that another process has begun meanwhile"] = evidence(
    ran(2, 3.5), ran(3.1, 3.2, pid=TWO), faults=[stop(1, 3, TWO)]
)
ILL["begun beside another run, long after it was stopped"] = (
    evidence(ran(2, 5.5), ran(5.1, 5.2, pid=TWO), faults=[stop(0.5, 1, TWO)]),
    {"unexplained": 1, "overlaps": 1},
)

LEDGER: dict[str, Any] = {"intents": [intent(kind="ledger")]}
WELL["a batch whose leases were taken over in mid call"] = evidence(
    ran(1, 2),
    ran(4, 5),
    rows=[row(rescues=1)],
    bookings={"a": 1},
    **LEDGER,
    faults=[
        Fault(kind="take over", at=1.5, until=1.5, pids=frozenset({ONE}), held=frozenset({"a"}))
    ],
    rescues=rescued(3.9),
)
ILL["booked, though it is dead"] = (
    evidence(
        ran(1, 2, phase="failed"),
        rows=[row(status=3, attempts=1)],
        bookings={"a": 1},
        mortal=["ledger"],
        **LEDGER,
    ),
    {"ghosts": 1},
)


# Cancels: of an event's deliveries, each is either made or cancelled.
PARTLY: dict[str, Any] = {"intents": [intent(cancelled=1)], "listeners": SHARED}
CANCELLED: dict[str, Any] = {"intents": [intent(cancelled=1)], "rows": []}
WELL["cancelled"] = evidence(**CANCELLED)
WELL["cancelled for one of two listeners"] = evidence(ran(1, 2, listener="here"), **PARTLY)
WELL["cancelled while a process that had begun without a lease was stopped"] = evidence(
    ran(3.1, 3.2, pid=TWO), faults=[stop(1, 3, TWO)], **CANCELLED
)
WELL["cancelled in one lane, and the next of the key goes on"] = evidence(
    ran(1, 9, listener="t"),
    ran(2, 3, event_id="b", listener="t mail", pid=TWO),
    ran(9.1, 9.2, event_id="b", listener="t", pid=TWO),
    listeners={"plain": ("t", "t mail")},
    intents=[intent(key="k", cancelled=1), intent("b", key="k", n=2)],
    rows=KEYED["rows"],
)
ILL["cancelled, and begun"] = (evidence(ran(1, 2), **CANCELLED), {"ghosts": 1})
ILL["cancelled once too often"] = (
    evidence(ran(1, 2, listener="here"), ran(1, None, listener="there", pid=TWO), **PARTLY),
    {"ghosts": 1},
)
ILL["neither cancelled nor made"] = (evidence(**{**PARTLY, "rows": []}), {"lost": 1})
ILL["a row that is gone, of which only a part was cancelled"] = (
    evidence(ran(1, 2, listener="here", phase="failed"), **{**PARTLY, "rows": []}),
    {"lost": 1},
)

# Slots: after each commit, something as new is delivered.


def in_slot(event_id: str, begun: float, at: float) -> Intent:
    return intent(event_id, kind="slot", key="s", begun=begun, at=at)


def slotted(*lines: Sequence[Line], late: float = 2) -> Evidence:
    """Return what became of two writes; the first one commits late."""
    written = [in_slot("a", 1, late), in_slot("b", 1.5, 1.6)]
    return evidence(*lines, **{**TWO_EVENTS, "intents": written})


WELL["the newest of a slot"] = slotted(ran(3, 4, event_id="b"))
WELL["each of a slot"] = slotted(ran(3, 4), ran(3, 4, event_id="b", pid=TWO))
WELL["two writes of a slot at a time, of which the other is delivered"] = slotted(ran(3, 4))
ILL["the older of a slot"] = (slotted(ran(3, 4), late=1.4), {"lost": 1})
ILL["the newest of a slot, begun before an older one was committed"] = (
    slotted(ran(1.7, 4, event_id="b")),
    {"lost": 1},
)
ILL["nothing of a slot"] = (slotted(), {"lost": 2})
ILL["what of a slot has not ended"] = (slotted(ran(3, None, event_id="b")), {"lost": 2})


def test_calls_are_put_together_to_batches_that_no_attempt_divides() -> None:
    lines = [
        *called(1, "shared", "a", "b", "c"),
        *called(2, "shared", "a", "b"),
        *called(3, "end", "c"),
        *called(4, "failed", "a"),
        *called(5, "end", "b"),
        *called(6, "failed", "a", attempts=1),
    ]
    first, second = batches(calls(lines))
    assert [[*each.events] for each in first.calls] == [
        ["a", "b", "c"],
        ["a", "b"],
        ["c"],
        ["a"],
        ["b"],
    ]
    assert first.ended_well() == {"b", "c"}
    assert second.events == {"a": 1}
    assert second.ended_well() == set()


# Row 500.
@cases("name", WELL)
def test_500_what_is_well_is_no_violation(name: str) -> None:
    assert violations(judge(WELL[name])) == {}


# Row 500.
@cases("name", ILL)
def test_500_every_violation_is_counted(name: str) -> None:
    found, expected = ILL[name]
    assert violations(judge(found)) == expected


SAID = log.read(
    """\
1.000 11 WARNING listener still runs, event handed back event_id=a event_type=t listener='t' seconds=9
1.100 11 WARNING listener cancelled, event handed back event_id=b event_type=t listener='t' seconds=9
Traceback (most recent call last):
1.200 22 WARNING listener runs longer than its timeout event_id=c event_type=t listener='t' seconds=1
1.300 22 WARNING retry event_id=c event_type=t attempt=1 error=django_outbox.exceptions.ListenerTimeout unlogged=0
1.400 22 WARNING listener runs longer than its timeout event_id=d event_type=t listener='t' seconds=1
1.500 22 WARNING retry event_id=d event_type=t attempt=1 error=ValueError
1.600 22 WARNING rescued event_id=e event_type=t listener='t' rescues=1
"""  # noqa: E501 - as they are written
)


def test_the_log_says_what_was_handed_back() -> None:
    found = [*log.hand_backs(SAID, {ONE: 1.75})]
    given = [handed_back(1.0, 1.75), handed_back(1.1, 1.1, event_id="b")]
    assert found == [replace(each, listener="t") for each in given]
    assert [each.until for each in log.hand_backs(SAID, {})] == [1.0, 1.1]


def test_the_log_says_what_was_written_off_and_not_merely_late() -> None:
    assert [*log.write_offs(SAID)] == [replace(written_off(1.2, TWO, "c"), listener="t")]


def test_the_log_says_what_was_rescued() -> None:
    assert [*log.rescues(SAID)] == [
        replace(each, listener="t") for each in rescued(1.6, event_id="e")
    ]


def test_the_time_of_a_suspect_is_counted_apart() -> None:
    """It waits until it can be run alone, also if its first worker was lost before its start."""
    lines = ran(3, None, pid=TWO), ran(9, 10)
    for earlier, expected in [[], ([5.0], [])], [[lost_with(1, "a")], ([], [5.0])]:
        found = evidence(*lines, faults=[*earlier, lost_with(4, "a", pid=TWO)])
        assert recoveries(found, executions(found, Verdict())) == expected
