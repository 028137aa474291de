"""``outbox_status``: what it says of events, streams and workers, and its exit codes (+45, 431)."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from django_outbox import write
from django_outbox.events import ACTIVE
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from django_outbox.models import status as outbox_status
from django_outbox.models.status import status
from django_outbox.outcomes import Status
from tests.table import insert, now
from tests.test_streams import events, in_ten_minutes, put

pytestmark = pytest.mark.django_db(transaction=True)

DONE, RETRY, DEAD, NEW = Status.DONE, Status.RETRY, Status.DEAD, Status.NEW
ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("outbox_status", *arguments, stdout=out)
    return out.getvalue()


def ask(*arguments: str) -> dict[str, Any]:
    return json.loads(run("--format", "json", *arguments))["default"]


def check(*arguments: str) -> int:
    """The exit code of ``--check``."""
    try:
        run("--check", *arguments)
    except CommandError as error:
        return error.returncode
    return 0


def worker(name: str = "host-1", **columns: Any) -> None:
    values = {"hostname": "host", "pid": 1, "started_at": now(), "heartbeat_at": now(), **columns}
    OutboxWorker.objects.create(id=name, **values)


def test_an_empty_outbox() -> None:
    assert ask() == {
        "counts": {"NEW": 0, "DONE": 0, "RETRY": 0, "DEAD": 0},
        "counts_complete": True,
        "due": 0,
        "leased": 0,
        "oldest_pending_age": None,
        "dead": [],
        "streams": {"due": 0, "leased": 0, "blocked": 0, "heads": []},
        "workers": [],
    }


def test_45_events_streams_and_leases_are_counted() -> None:
    """Row +45."""
    insert(3, due=-90)
    insert(2, due=60)
    insert(1, due=60, locked_by="w1", locked_at=now())
    insert(4, due=None, status=DONE, done_at=now())
    events("due", NEW, NEW)
    put("due", due_at=now() - timedelta(seconds=120))
    put("leased", due_at=in_ten_minutes(), locked_by="w1")
    put("waits", due_at=in_ten_minutes())
    put("idle")
    put(ACTIVE, due_at=in_ten_minutes(), locked_by="w1")  # no stream

    found = ask()
    assert found["counts"] == {"NEW": 8, "DONE": 4, "RETRY": 0, "DEAD": 0}
    assert (found["due"], found["leased"]) == (4, 2)
    assert 120 <= found["oldest_pending_age"] < 180
    streams = found["streams"]
    assert (streams["due"], streams["leased"], streams["blocked"]) == (1, 1, 1)


def test_45_the_age_is_that_of_an_event_or_of_a_stream() -> None:
    insert(1, due=-300)
    put("due", due_at=now() - timedelta(seconds=120))
    assert 300 <= ask()["oldest_pending_age"] < 360


def test_45_dead_events_are_grouped_by_type_and_error() -> None:
    """Design 12."""
    lost = "lost 5 workers"
    for event_type, error in [
        ("a", "ValueError: one\nTraceback"), ("a", "ValueError: two: three"),
        ("a", "app.errors.Refused: no"), ("b", "ValueError: one"), ("b", lost), ("b", None),
    ]:  # fmt: skip
        insert(1, due=None, event_type=event_type, status=DEAD, last_error=error, done_at=now())
    found = {(each["event_type"], each["error"]): each["count"] for each in ask()["dead"]}
    assert found == {
        ("a", "ValueError"): 2, ("a", "app.errors.Refused"): 1, ("b", "ValueError"): 1,
        ("b", lost): 1, ("b", ""): 1,
    }  # fmt: skip


def test_45_a_blocked_stream_is_shown_with_its_head() -> None:
    """Issue of ordered delivery: head event, age, backlog behind it, next try."""
    head, *_ = events("k", RETRY, NEW, NEW, event_type="order.paid")
    OutboxEvent.objects.filter(pk=head).update(first_due_at=now() - timedelta(hours=1))
    due = in_ten_minutes()
    put("k", due_at=due)

    [found] = ask()["streams"]["heads"]
    assert (found["key"], found["event_id"], found["event_type"]) == ("k", head, "order.paid")
    assert (found["status"], found["backlog"], found["next_try"]) == ("RETRY", 3, due.isoformat())
    assert 3600 <= found["age"] < 3700


def test_45_a_dead_head_that_blocks_has_no_next_try() -> None:
    head, _ = events("k", DEAD, NEW)
    put("k")
    with override_settings(OUTBOX={"ON_DEAD": "block"}):
        [found] = ask()["streams"]["heads"]
    assert (found["event_id"], found["status"], found["next_try"]) == (head, "DEAD", None)


def test_45_workers_are_shown() -> None:
    worker("host-1", pid=17)
    worker("host-2", heartbeat_at=now() - timedelta(seconds=40))
    first, second = sorted(ask()["workers"], key=lambda each: each["id"])
    assert (first["id"], first["hostname"], first["pid"]) == ("host-1", "host", 17)
    assert first["heartbeat_age"] < 30
    assert 40 <= second["heartbeat_age"] < 100


def test_45_a_large_table_is_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_status, "NEWEST", 5)
    monkeypatch.setattr(outbox_status, "MOST", 3)
    insert(2, due=None, status=DEAD)
    insert(6)
    found = ask()
    assert found["counts"] == {"NEW": 5, "DONE": 0, "RETRY": 0, "DEAD": 0}
    assert found["counts_complete"] is False
    assert (found["due"], found["dead"]) == (3, [])


@pytest.mark.parametrize("streams", [0, 30], ids=["none", "many"])
def test_45_a_look_costs_few_queries(streams: int, django_assert_max_num_queries: Any) -> None:
    for n in range(streams):
        events(f"k{n}", RETRY, NEW)
        put(f"k{n}", due_at=in_ten_minutes())
    with django_assert_max_num_queries(22):
        status("default")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_45_each_alias_is_a_report_of_its_own() -> None:
    with transaction.atomic(using="other"):
        write("x", using="other")
    found = json.loads(run("--format", "json", "--database", "default", "--database", "other"))
    assert [*found] == ["default", "other"]
    assert [each["due"] for each in found.values()] == [0, 1]


def test_45_the_table_says_the_same() -> None:
    insert(1, due=None, status=DEAD, last_error="ValueError: no", event_type="a", done_at=now())
    events("k", RETRY, NEW, event_type="order.paid")
    put("k", due_at=in_ten_minutes())
    worker("host-1")
    text = run()
    for part in (
        "[default]", "1 DEAD", "1 blocked", "k: order.paid", "2 wait", "next try", "host-1",
        "1 a: ValueError",
    ):  # fmt: skip
        assert part in text


# --- exit codes ----------------------------------------------------------------------------------


def test_45_a_sound_outbox_passes_every_check() -> None:
    insert(1)
    worker()
    limits = ["--max-age=300", "--max-due=1", "--max-dead=0", "--max-blocked=0", "--min-workers=1"]
    assert check(*limits) == 0


@pytest.mark.parametrize(
    ("limit", "well"),
    [("--max-age=30", "--max-age=500"), ("--max-due=1", "--max-due=2"),
     ("--max-dead=0", "--max-dead=1"), ("--max-blocked=0", "--max-blocked=1"),
     ("--min-workers=1", "--min-workers=0")],
    ids=lambda each: each.partition("=")[0],
)  # fmt: skip
def test_45_beyond_a_limit_the_code_is_1(limit: str, well: str) -> None:
    """Row +45: usable as a health probe."""
    insert(2, due=-100)
    insert(1, due=None, status=DEAD)
    put("k", due_at=in_ten_minutes())
    assert check(well) == 0
    assert check(limit) == 1
    assert run(limit)  # without --check nothing is compared


def test_45_an_event_that_waits_for_five_minutes_is_too_much_by_default() -> None:
    insert(1, due=-299)
    assert check() == 0
    insert(1, due=-301)
    assert check() == 1


def test_45_the_reasons_are_named() -> None:
    insert(1, due=None, status=DEAD)
    with pytest.raises(CommandError, match=r"default: dead events: 1, at most 0 expected"):
        run("--check", "--max-dead=0")


def test_45_no_answer_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(alias: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("django_outbox.management.commands.outbox_status.status", down)
    assert check() == 2


def test_45_unfit_settings_are_no_answer() -> None:
    with override_settings(OUTBOX={"LEESE": 1}):
        assert check() == 2


def test_45_the_exit_code_of_the_process(database_env: dict[str, str]) -> None:
    """Row +45: as a probe runs it."""
    insert(1, due=None, status=DEAD)

    def code(*arguments: str, **env: str) -> int:
        command = [sys.executable, "-m", "django", "outbox_status", "--check", *arguments]
        done = subprocess.run(command, env={**database_env, **env}, cwd=ROOT, timeout=60,
                              capture_output=True, check=False)  # fmt: skip
        return done.returncode

    assert code() == 0
    assert code("--max-dead=0") == 1
    nowhere = {"sqlite": "sqlite:////nowhere/x", "postgresql": "postgres://x@127.0.0.1:1/x"}
    url = nowhere.get(connection.vendor, "mysql://x@127.0.0.1:1/x")
    assert code(DATABASE_URL=url) == 2


def test_streams_are_asked_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    put("k", due_at=now() - timedelta(seconds=10))
    monkeypatch.setattr("django.utils.timezone.now", lambda: 1 / 0)
    assert OutboxStream.objects.oldest_due_age() is not None
    assert ask()["streams"]["due"] == 1
