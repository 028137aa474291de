"""``fate_of``: the state of a delivery by its row, its stream and the pauses."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from django_outbox.inspection.fate import Place, fate_of
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream

NOW = datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)
PAST, SOON, LATER = (NOW + timedelta(minutes=each) for each in (-5, 5, 60))
MAIL = "order.placed mail"
WAITS = {"available_at": SOON}


def row(**columns: Any) -> OutboxEvent:
    given = {"id": "e.1", "event_id": "e", "event_type": "order.placed", "listener": MAIL}
    return OutboxEvent(**{**given, "queue": "letters", "available_at": PAST, **columns})


def pause(kind: str, name: str, until: datetime | None = None, pk: int = 1) -> OutboxPause:
    given = {"paused_at": PAST, "reason": "printer down", "until": until, "pk": pk}
    return OutboxPause(kind=kind, name=name, **given)


def test_it_is_held_since_it_fell_due_or_the_pause_began() -> None:
    for due, since in ((NOW - timedelta(hours=1), PAST), (NOW, NOW)):
        assert told(row(available_at=due), [pause("queue", "letters")])[:2] == ("held", since)


def test_what_is_parked_is_held_by_its_pause_with_all_that_is_behind_it() -> None:
    given = [pause("event_type", "order.paid", pk=7), pause("event_type", "order.sent", pk=8)]
    held = ("held", PAST, None, "event_type order.paid", "printer down")
    assert told(row(queue="paused:7"), given) == held
    stream = OutboxStream(due_at=PAST, queue="paused:7")
    place = Place(stream, row(id="d.1", event_id="d"), False)
    assert told(row(available_at=None, key="k"), given, place) == held


def told(
    found: OutboxEvent, pauses: list[OutboxPause], place: Place | None = None
) -> tuple[Any, ...]:
    fate = fate_of(found, NOW, pauses, place)
    return fate.state, fate.since, fate.until, fate.by, fate.reason


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, ("waiting", PAST, None, "", "")),
        (WAITS, ("waiting", None, SOON, "", "")),
        ({**WAITS, "status": 2, "last_error": "E: no\nat"}, ("retrying", None, SOON, "", "E: no")),
        ({**WAITS, "locked_by": "w", "locked_at": PAST}, ("leased", PAST, SOON, "w", "")),
        ({"locked_by": "w", "locked_at": PAST}, ("waiting", PAST, None, "", "")),  # it has ended
        ({"listener": None}, ("unrouted", PAST, None, "", "")),
        ({"status": 1, "done_at": PAST}, ("done", PAST, None, "", "")),
        ({"status": 3, "done_at": PAST, "last_error": "E: no"}, ("dead", PAST, None, "", "E: no")),
    ],
    ids="due later retrying leased lost unrouted done dead".split(),
)
def test_without_a_key_the_row_says_it(columns: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert told(row(**columns), []) == expected


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("event_type", "order.placed"),
        ("listener", MAIL),
        ("stream", "k"),
        ("queue", "letters"),
        ("breaker", "letters"),
    ],
)
def test_a_pause_holds_what_no_worker_has(kind: str, name: str) -> None:
    found = row(key="k")
    held = ("held", PAST, LATER, f"{kind} {name}", "printer down")
    pauses = [pause(kind, "other"), pause(kind, name, LATER), pause("queue", "letters", SOON)]
    assert told(found, pauses) == held
    found.available_at = SOON
    assert told(found, pauses)[0] == "waiting"
    found.locked_by, found.locked_at = "w", PAST
    assert told(found, pauses)[0] == "leased"
    found.status = Status.DONE
    assert told(found, pauses)[0] == "done"


def test_a_pause_without_an_end_ends_last() -> None:
    pauses = [pause("queue", "letters", LATER), pause("event_type", "order.placed")]
    assert told(row(), pauses)[2:4] == (None, "event_type order.placed")


@pytest.mark.parametrize(
    ("due", "owner", "blocked", "first", "expected"),
    [
        (SOON, "w", False, True, ("leased", PAST, SOON, "w", "")),
        (SOON, "w", False, False, ("waiting", None, None, "event d", "")),
        (PAST, None, False, True, ("waiting", PAST, None, "", "")),
        (PAST, None, False, False, ("waiting", None, None, "event d", "")),
        (SOON, None, True, True, ("waiting", None, SOON, "", "")),
        (SOON, None, True, False, ("held", None, SOON, "event d", "E: no")),
        (None, None, True, False, ("held", None, None, "event d", "E: no")),  # it is dead
    ],
)
def test_with_a_key_its_stream_says_it(
    due: Any, owner: Any, blocked: bool, first: bool, expected: tuple[Any, ...]
) -> None:
    found = row(available_at=None, key="k", stream="mail:k")
    before = row(id="d.1", event_id="d", last_error="E: no\nat")
    stream = OutboxStream(due_at=due, locked_by=owner, locked_at=PAST, queue="letters")
    place = Place(stream, found if first else before, blocked)
    assert told(found, [], place) == expected


def test_a_fate_is_one_line() -> None:
    line = str(fate_of(row(), NOW, [pause("queue", "letters", LATER)]))
    for part in (MAIL, "held", "09:30", "queue letters", "printer down"):
        assert part in line
