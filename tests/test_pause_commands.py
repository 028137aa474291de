"""``outbox_pause``: arguments, output and effect."""

from __future__ import annotations

import json
import re
from datetime import datetime, time
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.management.commands.outbox_pause import next_time
from django_outbox.models import OutboxEvent, OutboxPause
from tests.cases import cases
from tests.table import insert, keyed, listening, now

pytestmark = pytest.mark.django_db(transaction=True)

SENT = "parcel.sent"


def hear(event: outbox.Event) -> None:
    """Do nothing."""


def run(command: str, *arguments: str) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    call_command(command, *arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def listed(*arguments: str) -> Any:
    return json.loads(run("outbox_pause", "--format", "json", *arguments)[0])


def test_what_is_named_is_paused_and_resumed() -> None:
    insert(3, event_type=SENT)
    keyed("k", event_type="other")
    with listening(hear, SENT, name="mail"), listening(hear, "other"):
        names = ("--event-type", SENT, "--stream", "k", "--listener", f"{SENT} mail")
        out, err = run("outbox_pause", *names, "--reason", "carrier down", "--by", "ada")
        paused = [f"event type {SENT}", f"listener {SENT} mail", "stream k"]
        assert (out.splitlines(), err) == ([f"paused {each}" for each in paused], "")
        assert outbox.drain() == 0
        first = listed()[0]
        assert first.pop("paused_at").endswith("+00:00")
        facts = {"kind": "event_type", "name": SENT, "reason": "carrier down", "until": None}
        assert first == {**facts, "paused_by": "ada"}
        table, _ = run("outbox_pause")
        assert table.splitlines()[0].split()[:3] == ["KIND", "NAME", "PAUSED"]
        assert "carrier down" in table

        out, _ = run("outbox_pause", "--end", *names)
        assert f"resumed event type {SENT}: 3 events and 0 streams are due" in out
        assert not OutboxPause.objects.exists()
        assert outbox.drain() == 4
    assert run("outbox_pause")[0] == "Nothing is paused.\n"


def test_all_is_resumed_with_all() -> None:
    run("outbox_pause", "--event-type", "a", "--event-type", "b", "--stream", "k", "--force")
    run("outbox_pause", "--end", "--all")
    assert not OutboxPause.objects.exists()
    assert run("outbox_pause", "--end", "--all") == ("", "")


@cases(
    ("arguments", "says"),
    [
        (["--event-type", "parcel.snt"], f"No event type 'parcel.snt'.* Did you mean '{SENT}'"),
        (["--event-type", "stock.*"], r"No event type 'stock\.\*'"),
        (["--listener", SENT], f"Did you mean '{SENT} mail'"),
        (["--listener", "mail"], f"Did you mean '{SENT} mail'"),
        (["--listener", f"{hear.__module__}.hear"], f"Did you mean '{SENT} mail', 'stock.*'"),
        (["--stream", "nobody"], "No event with the key 'nobody'"),
    ],
)
def test_an_unknown_name_is_refused_unless_it_is_forced(arguments: list[str], says: str) -> None:
    """A mistyped pause would hold nothing back; a name may come with the next deploy."""
    OutboxPause.objects.all().delete()
    with listening(hear, SENT, name="mail"), listening(hear, "stock.*"):
        with pytest.raises(CommandError, match=says) as caught:
            run("outbox_pause", "--event-type", SENT, *arguments)
        assert "Nothing was paused. To pause an unknown name, add --force." in str(caught.value)
        assert not OutboxPause.objects.exists()
        _, err = run("outbox_pause", *arguments, "--force")
    assert re.match(f"warning: .*{says}", err)
    assert OutboxPause.objects.get().name == arguments[-1]


def test_what_is_paused_already_stays_as_it_is() -> None:
    insert(event_type=SENT)  # a type that was seen is known
    assert run("outbox_pause", "--event-type", SENT, "--reason", "first", "--by", "ada")[1] == ""
    out, _ = run("outbox_pause", "--event-type", SENT, "--reason", "second")
    assert out.startswith(f"event type {SENT} has been paused since ")
    assert out.rstrip().endswith("by 'ada'")
    assert OutboxPause.objects.get().reason == "first"


@cases(
    ("arguments", "says"),
    [
        (["--force"], "Say what to pause"),
        (["--for", "2h"], "Say what to pause"),
        (["--until", "09:00"], "Say what to pause"),
        (["--reason", "x"], "Say what to pause"),
        (["--all"], "expected together with --end"),
        (["--event-type", "ok", "--stream", ""], "expected 1 to 255 characters"),
        (["--end"], "Say which pauses to end"),
        (["--end", "--all", "--stream", "k"], "or --all alone"),
        (["--end", "--stream", "k", "--for", "2h"], "cannot be combined"),
        (["--end", "--event-type", "x"], "Not paused: event type x"),
        (["--until", "2001-02-03T04:05"], "is not in the future; it is"),
        (["--until", "25:00"], "'25:00' is not a time: hour must be in"),
        (["--until", "2026-02-30T09:00"], "'2026-02-30T09:00' is not a time"),
        (["--until", "09"], "'09' is not a time"),
        (["--until", "09:00+02:00"], "'09:00\\+02:00' is not a time"),
        (["--until", "2h"], "'2h' is a duration; use --for"),
        (["--for", "2"], "'2' has no unit; expected, for example, 2d or 2s"),
        (["--for", "0h"], "is not in the future"),
        (["--for", "09:00"], "'09:00' is not a duration"),
        (["--for", "2h", "--until", "09:00"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], says: str) -> None:
    has_end = arguments[0] in ("--until", "--for") and "Say what" not in says
    given = ["--event-type", SENT, "--force"] if has_end else []
    with pytest.raises(CommandError, match=says):
        run("outbox_pause", *given, *arguments)
    assert not OutboxPause.objects.exists()


def test_workers_are_rung_once_what_waited_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[int] = []
    monkeypatch.setattr(doorbell, "ring", lambda _: rings.append(OutboxEvent.objects.due().count()))
    insert(3, event_type=SENT)
    run("outbox_pause", "--event-type", SENT)
    outbox.drain()
    run("outbox_pause", "--end", "--event-type", SENT)
    assert rings == [3, 3]


# -- an end time -----------------------------------------------------------------------------------


def paused_until(*arguments: str) -> datetime:
    """Pause with these arguments; return until when."""
    OutboxPause.objects.all().delete()
    run("outbox_pause", "--event-type", SENT, "--force", *arguments)
    until = OutboxPause.objects.get().until
    assert until is not None
    return until


@cases(("text", "seconds"), [("2h", 7200), ("45m", 2700), ("1d12h", 129_600)])
def test_a_pause_lasts_for_a_duration(text: str, seconds: int) -> None:
    left = (paused_until("--for", text) - now()).total_seconds()
    assert seconds - 10 < left <= seconds


def test_a_pause_lasts_until_a_time_of_day(settings: Any) -> None:
    """The next one in ``TIME_ZONE``, whatever the database's clock shows."""
    settings.TIME_ZONE = "Asia/Kathmandu"
    until = paused_until("--until", "09:00")
    assert timezone.localtime(until).time() == time(9, 0)
    assert 0 < (until - now()).total_seconds() <= 86_400


def test_a_time_of_day_that_is_over_means_tomorrow() -> None:
    at = datetime(2026, 11, 25, 12, 0, tzinfo=timezone.get_current_timezone())
    assert next_time(time(12, 30), at).isoformat()[:16] == "2026-11-25T12:30"
    assert next_time(time(12, 0), at).isoformat()[:16] == "2026-11-26T12:00"
    assert next_time(time(9, 0), at).isoformat()[:16] == "2026-11-26T09:00"


@cases(
    ("text", "utc"),
    [
        ("2126-11-26T09:00", "2126-11-26T14:00:00+00:00"),
        ("2126-11-26T09:00+02:00", "2126-11-26T07:00:00+00:00"),
        ("2126-11-26T09:00Z", "2126-11-26T09:00:00+00:00"),
        ("2126-11-26", "2126-11-26T05:00:00+00:00"),
    ],
)
def test_a_pause_lasts_until_an_instant(settings: Any, text: str, utc: str) -> None:
    settings.TIME_ZONE = "America/Bogota"
    assert paused_until("--until", text).isoformat() == utc


def test_the_end_is_shown(settings: Any) -> None:
    settings.TIME_ZONE = "America/Bogota"
    out, _ = run("outbox_pause", "--event-type", SENT, "--force", "--until", "2126-11-26T09:00")
    assert out == f"paused event type {SENT} until 2126-11-26 09:00:00-05:00\n"
    out, _ = run("outbox_pause", "--event-type", SENT, "--force", "--for", "2h")
    assert out.rstrip().endswith(" until 2126-11-26 14:00:00+00:00")  # it stays as it is
    report = json.loads(run("outbox_status", "--format", "json")[0])["databases"]["default"]
    for rows in (listed(), report["holds"]):
        assert [each["until"] for each in rows] == ["2126-11-26T14:00:00+00:00"]
    for command in ("outbox_pause", "outbox_status"):
        assert "2126-11-26 14:00:00+00:00" in run(command)[0]
