"""Pauses of queues and open circuit breakers: the commands, the queryset and the admin."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from django.core.management import CommandError

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from tests.table import insert, keyed, listening, now
from tests.test_pause_commands import listed, run
from tests.test_queue_status import breaker

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}


@pytest.fixture
def rows() -> list[Any]:
    """Rows in both queues; return all their columns."""
    insert(3, queue="hooks", due=-5)
    insert(2, queue="hooks", due=60)
    insert(1, queue="hooks", due=60)
    insert(1)
    keyed("k", 2)
    keyed("later", due=60)
    OutboxStream.objects.update(queue="hooks")
    OutboxEvent.objects.exclude(key=None).update(queue="hooks")
    return state()


def state() -> list[Any]:
    return [
        *OutboxEvent.objects.order_by("pk").values(),
        *OutboxStream.objects.order_by("pk").values(),
    ]


def hear(event: outbox.Event) -> None:
    """Do nothing."""


# --- commands -------------------------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed_and_no_row_is_touched(rows: list[Any]) -> None:
    with listening(hear, "hook.sent", queue="hooks"):
        out, err = run("outbox_pause", "--queue", "hooks", "--reason", "down", "--by", "ada")
    assert (out, err) == ("paused queue hooks\n", "")
    [found] = listed()
    assert found.pop("paused_at")
    assert found == {
        "kind": "queue",
        "name": "hooks",
        "reason": "down",
        "paused_by": "ada",
        "until": None,
    }
    assert outbox.drain() == 1
    out, _ = run("outbox_pause", "--end", "--queue", "hooks")
    assert out == "resumed queue hooks: workers claim from it again\n"
    assert not OutboxPause.objects.exists()
    hooks = [each for each in state() if each["queue"] == "hooks"]
    assert hooks == [each for each in rows if each["queue"] == "hooks"]


def test_a_breaker_is_ended_and_its_queue_is_open_again(rows: list[Any]) -> None:
    made = breaker()
    assert outbox.drain(queues=["hooks"]) == 0
    [found] = listed()
    assert made.until is not None
    assert found["kind"] == "breaker"
    assert datetime.fromisoformat(found["until"]) == made.until
    table = run("outbox_pause")[0]
    assert f"{made.until:%Y-%m-%d %H:%M:%S}" in table
    assert "5 consecutive failures" in table
    out, _ = run("outbox_pause", "--end", "--breaker", "hooks")
    assert out == "resumed circuit breaker hooks: workers claim from it again\n"
    assert state() == rows
    with pytest.raises(CommandError, match="Not paused: circuit breaker hooks"):
        run("outbox_pause", "--end", "--breaker", "hooks")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--queue", "hoks"], "does not have 'hoks'; expected one of default, hooks."),
        (["--event-type", "x", "--queue", ""], "expected 1 to 255 characters"),
    ],
    ids=["unknown", "empty"],
)
def test_a_queue_that_cannot_be_paused_is_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run("outbox_pause", *arguments)
    assert not OutboxPause.objects.exists()


# --- queryset -------------------------------------------------------------------------------------


def test_people_can_set_every_kind_but_a_breaker() -> None:
    expected = r"'breaker'; expected one of event_type, listener, stream, queue\."
    with pytest.raises(ValueError, match=expected):
        OutboxPause.objects.pause("breaker", "hooks")
    with pytest.raises(ValueError, match="does not have 'gone'; expected one of default, hooks"):
        OutboxPause.objects.pause("queue", "gone")
    assert OutboxPause.objects.pause("queue", "default")
    assert not OutboxPause.objects.pause("queue", "default")


def test_a_queue_that_is_not_configured_any_longer_can_be_resumed(settings: Any) -> None:
    OutboxPause.objects.pause("queue", "hooks")
    settings.OUTBOX = {}
    assert OutboxPause.objects.resume().pauses == 1


@pytest.mark.parametrize("kind", ["queue", "breaker"])
def test_events_in_a_closed_queue_are_paused(rows: list[Any], kind: str) -> None:
    assert OutboxEvent.objects.held().count() == 0
    if kind == "queue":
        OutboxPause.objects.pause("queue", "hooks")
    else:
        breaker()
    insert(1, queue="hooks", due=60, locked_by="w1", locked_at=now())
    insert(1, queue="hooks", due=None, status=1, done_at=now())
    paused = OutboxEvent.objects.held()
    assert paused.count() == 5  # those due: 3 without a key, 2 with one
    assert {*paused.values_list("queue", flat=True)} == {"hooks"}


# --- admin ----------------------------------------------------------------------------------------
