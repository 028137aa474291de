"""``outbox_pause`` and ``outbox_resume``: arguments, output and effect."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.inspection import pauses
from django_outbox.models import OutboxEvent, OutboxPause
from tests.table import insert, keyed, listening

pytestmark = pytest.mark.django_db(transaction=True)

SENT = "parcel.sent"


def hear(event: outbox.Event) -> None:
    """Do nothing."""


def run(command: str, *arguments: str) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    call_command(command, *arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def listed(*arguments: str) -> Any:
    return json.loads(run("outbox_pause", "--list", "--format", "json", *arguments)[0])


def test_what_is_named_is_paused_and_resumed() -> None:
    insert(3, event_type=SENT)
    keyed("k", event_type="other")
    with listening(hear, SENT, name="mail"), listening(hear, "other"):
        names = ("--event-type", SENT, "--stream", "k", "--listener", f"{SENT} mail")
        out, err = run("outbox_pause", *names, "--reason", "carrier down", "--by", "ada")
        assert out.splitlines() == [
            f"paused event type {SENT}", f"paused listener {SENT} mail", "paused stream k",
        ]  # fmt: skip
        assert err == ""
        assert outbox.drain() == 0
        [first, *others] = listed()
        assert first.pop("paused_at").endswith("+00:00")
        assert first == {
            "kind": "event_type", "name": SENT, "reason": "carrier down", "paused_by": "ada",
            "events": 3, "streams": 0, "complete": True,
        }  # fmt: skip
        assert [each["events"] for each in others] == [3, 1]
        table, _ = run("outbox_pause", "--list")
        assert table.splitlines()[0].split() == "KIND NAME SINCE BY WAITING REASON".split()
        assert "carrier down" in table

        out, _ = run("outbox_resume", *names)
        assert f"resumed event type {SENT}: 3 events and 0 streams are due" in out
        assert not OutboxPause.objects.exists()
        assert outbox.drain() == 4
    assert run("outbox_pause", "--list")[0] == "Nothing is paused.\n"


def test_held_streams_are_counted_by_their_heads() -> None:
    keyed("a", 3, event_type=SENT)
    keyed("b", event_type=SENT)
    keyed("c", event_type="other")
    run("outbox_pause", "--event-type", SENT)
    outbox.drain()
    [found] = listed()
    assert (found["events"], found["streams"]) == (0, 2)


def test_what_waits_is_counted_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "MAX_EVENTS", 2)
    insert(5, event_type=SENT)
    run("outbox_pause", "--event-type", SENT)
    [before] = listed()
    outbox.drain()
    [after] = listed()
    assert [(each["events"], each["complete"]) for each in (before, after)] == [(2, False)] * 2
    assert " 2+ " in run("outbox_pause", "--list")[0]


def test_all_is_resumed_with_all() -> None:
    run("outbox_pause", "--event-type", "a", "--event-type", "b", "--stream", "k", "--force")
    run("outbox_resume", "--all")
    assert not OutboxPause.objects.exists()
    assert run("outbox_resume", "--all") == ("", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--event-type", "parcel.snt"], f"No event type 'parcel.snt'.* Did you mean '{SENT}'"),
        (["--event-type", "stock.*"], r"No event type 'stock\.\*'"),
        (["--listener", SENT], f"Did you mean '{SENT} mail'"),
        (["--listener", "mail"], f"Did you mean '{SENT} mail'"),
        (["--listener", f"{hear.__module__}.hear"], f"Did you mean '{SENT} mail', 'stock.*'"),
        (["--stream", "nobody"], "No event with the key 'nobody'"),
    ],
    ids=["type", "pattern", "its-type", "its-name", "its-function", "stream"],
)
def test_an_unknown_name_is_refused_unless_it_is_forced(arguments: list[str], says: str) -> None:
    """A mistyped pause would hold nothing back; a name may come with the next deploy."""
    with listening(hear, SENT, name="mail"), listening(hear, "stock.*"):
        with pytest.raises(CommandError, match=says) as caught:
            run("outbox_pause", "--event-type", SENT, *arguments)
        assert "Nothing was paused. To pause an unknown name, add --force." in str(caught.value)
        assert not OutboxPause.objects.exists()
        _, err = run("outbox_pause", *arguments, "--force")
    assert re.match(f"warning: .*{says}", err)
    assert OutboxPause.objects.get().name == arguments[-1]


def test_a_type_that_was_seen_is_known() -> None:
    insert(event_type=SENT)
    assert run("outbox_pause", "--event-type", SENT)[1] == ""


def test_what_is_paused_already_stays_as_it_is() -> None:
    insert(event_type=SENT)
    run("outbox_pause", "--event-type", SENT, "--reason", "first", "--by", "ada")
    out, _ = run("outbox_pause", "--event-type", SENT, "--reason", "second")
    assert out.startswith(f"event type {SENT} is paused since ")
    assert out.rstrip().endswith("by 'ada'")
    assert OutboxPause.objects.get().reason == "first"


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("outbox_pause", [], "Say what to pause"),
        ("outbox_pause", ["--list", "--stream", "k"], "or --list alone"),
        ("outbox_pause", ["--list", "--force"], "or --list alone"),
        ("outbox_pause", ["--event-type", "ok", "--stream", ""], "expected 1 to 255 characters"),
        ("outbox_resume", [], "Say what to resume"),
        ("outbox_resume", ["--all", "--stream", "k"], "or --all alone"),
        ("outbox_resume", ["--event-type", "x"], "Not paused: event type 'x'"),
    ],
    ids=[
        "pause-nothing",
        "list-and-name",
        "list-forced",
        "unfit",
        "resume-nothing",
        "all-and-name",
        "not-paused",
    ],
)
def test_what_cannot_be_done_is_said(command: str, arguments: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run(command, *arguments)
    assert not OutboxPause.objects.exists()


def test_workers_are_rung_once_what_waited_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[int] = []
    monkeypatch.setattr(doorbell, "ring", lambda _: rings.append(OutboxEvent.objects.due().count()))
    insert(3, event_type=SENT)
    run("outbox_pause", "--event-type", SENT)
    outbox.drain()
    run("outbox_resume", "--event-type", SENT)
    assert rings == [3, 3]
