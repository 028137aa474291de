"""What is held, by what, by whom and since when: in the report, its check, metrics, dashboard."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import localtime

from django_outbox.contrib.prometheus.metrics import query_samples
from django_outbox.inspection.holds import KINDS
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from tests.table import insert, keyed, now
from tests.test_dashboard import alive, nothing_is_cached, part, verdict
from tests.test_dashboard import body as page
from tests.test_status import ask, check, reasons

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ["nothing_is_cached"]  # fixtures

HOOKS: dict[str, Any] = {"QUEUES": {"hooks": {}}}
BLOCK: dict[str, Any] = {**HOOKS, "ON_DEAD": "block"}


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = HOOKS


def ago(seconds: float) -> datetime:
    return now() - timedelta(seconds=seconds)


def time_of(instant: Any) -> str:
    return f"{localtime(instant):%H:%M}"


def held_by(kind: str, name: str = "hooks", *, since: float = 3600, **columns: Any) -> str:
    """Store a pause or an open breaker that began so many seconds ago; return the queue it holds.

    A pause of rows parks them in a queue of its own.
    """
    given = {"reason": "printer down", "paused_by": "ada", **columns}
    made = OutboxPause.objects.create(kind=kind, name=name, paused_at=ago(since), **given)
    return name if kind in ("queue", "breaker") else f"paused:{made.pk}"


def a_dead_head(*, died: float, behind: float) -> OutboxEvent:
    """Store a stream whose first event died, and the next was due, so many seconds ago."""
    keyed("order:17", status=Status.DEAD, last_error="OSError: no", done_at=ago(died))
    keyed("order:17")
    OutboxEvent.objects.pending().update(first_due_at=ago(behind))
    OutboxStream.objects.update(due_at=None)
    return OutboxEvent.objects.dead().get()


def gauge(name: str = "held_seconds") -> dict[str, float]:
    """Return the values of a gauge by label."""
    return {"".join(of): value for each, of, value in query_samples("default") if each == name}


@pytest.mark.parametrize("kind", ["queue", "breaker", "event_type", "listener", "stream"])
def test_what_is_held_is_neither_due_nor_late(kind: str) -> None:
    queue = held_by(kind)
    insert(2, queue=queue, due=-1800)
    insert(1, queue=queue, due=60)
    keyed("k", due=-900)
    OutboxStream.objects.update(queue=queue)
    insert(1, due=-5)
    found = ask()
    assert (found["due"], found["held"]) == (1, 3)
    assert found["oldest_due_age"] < 60
    assert [each["queue"] for each in found["queues"]] == ["default", "hooks"]
    [hold] = found["holds"]
    assert (hold["kind"], hold["name"], hold["by"]) == (kind, "hooks", "ada")
    assert (hold["events"], hold["streams"], hold["reason"]) == (2, 1, "printer down")
    assert hold["age"] == pytest.approx(1800, abs=60)
    assert gauge() == {**dict.fromkeys(KINDS, 0), kind: pytest.approx(1800, abs=60)}
    late = pytest.approx(5, abs=50)
    assert gauge("lag_seconds") == {"": late}
    assert gauge("queue_oldest_due_age_seconds") == {"default": late, "hooks": 0}


@pytest.mark.parametrize(("since", "due", "age"), [(3600, 600, 600), (600, 3600, 600), (9, -60, 0)])
def test_it_is_held_since_it_fell_due_or_the_hold_began(since: int, due: int, age: int) -> None:
    insert(1, queue=held_by("queue", since=since), due=-due)
    assert ask()["holds"][0]["age"] == pytest.approx(age, abs=60)


def test_what_is_parked_without_its_pause_is_late() -> None:
    insert(1, queue=held_by("event_type"), due=-1800)
    OutboxPause.objects.all().delete()
    assert (ask()["due"], ask()["held"], check()) == (1, 0, 1)


def test_in_writer_only_nothing_is_held(settings: Any) -> None:
    insert(1, queue=held_by("queue"), due=-1800)
    a_dead_head(died=3600, behind=3600)
    settings.OUTBOX = {**BLOCK, "MODE": "writer_only"}
    assert (ask()["held"], [each["age"] for each in ask()["holds"]], check()) == (0, [0], 0)


@pytest.mark.parametrize(
    ("kind", "left", "age", "exit_code"),
    [
        ("queue", None, 1800, 1),
        ("queue", None, 800, 0),
        ("queue", 60, 1800, 0),
        ("queue", -60, 1800, 1),  # no worker has ended it
        ("event_type", 60, 1800, 0),
        ("breaker", 60, 1800, 1),  # a probe, which may fail
    ],
)
def test_check_fails_if_no_planned_end_is_to_come(
    kind: str, left: int | None, age: int, exit_code: int
) -> None:
    until = None if left is None else ago(-left)
    insert(1, queue=held_by(kind, until=until), due=-age)
    assert check() == exit_code
    assert check("--max-held=1h") == 0
    assert (gauge()[kind] > 900) is bool(exit_code)


def test_a_planned_pause_of_a_queue_holds_what_its_open_breaker_would() -> None:
    held_by("breaker")
    insert(1, queue=held_by("queue", until=ago(-60)), due=-1800)
    assert {each["kind"]: each["events"] for each in ask()["holds"]} == {"breaker": 0, "queue": 1}
    assert check() == 0


@pytest.mark.parametrize("kind", ["breaker", "event_type", "dead"])
def test_check_says_what_is_held_by_what_by_whom_since_when(kind: str, settings: Any) -> None:
    if kind == "dead":
        settings.OUTBOX = BLOCK
        head = a_dead_head(died=1000, behind=1000)
        facts = ["order:17", head.event_id, time_of(head.done_at), "OSError: no"]
    else:
        insert(1, queue=held_by(kind, since=1000), due=-1000)
        facts = ["hooks", time_of(OutboxPause.objects.get().paused_at), "printer down"]
        facts += ["by ada"] * (kind != "breaker")
    [line] = reasons().splitlines()
    assert [each for each in ("held", *facts) if each not in line] == []


@pytest.mark.parametrize(("died", "behind"), [(2000, 1500), (1500, 2000)])
def test_a_dead_head_holds_what_is_behind_it(died: int, behind: int, settings: Any) -> None:
    a_dead_head(died=died, behind=behind)
    assert (ask()["held"], check()) == (0, 0)  # dead events hold nothing
    settings.OUTBOX = BLOCK
    assert (ask()["held"], gauge()["dead"]) == (1, pytest.approx(1500, abs=60))
    OutboxEvent.objects.pending().delete()
    assert (ask()["held"], gauge()["dead"]) == (0, 0)


def test_holds_cost_a_scrape_one_statement(settings: Any) -> None:
    def cost(outbox: Any) -> int:
        settings.OUTBOX = outbox
        with CaptureQueriesContext(connection) as queries:
            list(query_samples("default"))
        return len(queries)

    without = cost(HOOKS)
    for number in range(12):
        held_by("event_type", f"t{number}")
    assert (cost(HOOKS), cost(BLOCK)) == (without, without + 1)


def test_the_dashboard_says_held_and_not_late(admin_client: Client) -> None:
    alive()
    insert(3, queue=held_by("queue", since=1000), due=-1800)
    text = page(admin_client)
    said = r"Queue hooks has been paused since .* by ada: printer down; 3 held for 16 min\."
    assert re.fullmatch(said, verdict(text)[1])
    assert verdict(text)[0] == "Events are not delivered as they should be"
    assert "order.placed no listener here hooks 3 " in part(text, "listeners")
    assert "30 min" not in text
    assert "queue hooks 3 16 min 16 min ada printer down" in part(text, "held")
    OutboxPause.objects.update(until=ago(-60))
    assert verdict(page(admin_client))[0] != verdict(text)[0]
