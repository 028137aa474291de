"""``outbox_status``: its report on events, streams and workers, and its exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, transaction
from django.test import override_settings

from django_outbox import write
from django_outbox.inspection.status import status
from django_outbox.listeners.outcomes import Status
from django_outbox.management.deadline import call_with_timeout
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStatistics, OutboxWorker
from tests.table import insert, now
from tests.test_batch_commands import Terminal
from tests.test_stream_queryset import events, in_ten_minutes, put
from tests.waiting import wait_until

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
    """Return the exit code of ``--check``."""
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
        "at_least": [],
        "estimated": [],
        "due": 0,
        "leased": 0,
        "oldest_pending_age": None,
        "dead": [],
        "rates": {"seconds": 300, "done": 0, "retry": 0, "dead": 0, "rescued": 0},
        "paused": [],
        "streams": {"due": 0, "leased": 0, "blocked": 0, "heads": []},
        "queues": {"default": {"due": 0, "oldest_due_age": None, "workers": 0, "unserved": True}},
        "workers": [],
        "lost_workers": [],
    }


def test_in_writer_only_no_event_waits_for_a_worker(settings: Any) -> None:
    """Delayed or not, events stay as they were written, which must not raise an alarm."""
    settings.OUTBOX = {"MODE": "writer_only"}
    insert(3, due=-3600)
    insert(2, due=-600, deliver_at=now() - timedelta(seconds=600))  # was delayed and is due
    insert(1, due=600, deliver_at=now() + timedelta(seconds=600))
    put("k", due_at=now() - timedelta(seconds=3600))
    found = ask()
    assert found["counts"]["NEW"] == 6
    assert (found["due"], found["oldest_pending_age"]) == (0, None)
    assert check() == 0
    settings.OUTBOX = {}
    assert (ask()["due"], check()) == (6, 1)


def test_45_a_blocked_stream_is_shown_with_its_head() -> None:
    """The report has the head event, its age, the backlog of the stream and the next try."""
    head, *_ = events("k", RETRY, NEW, NEW, event_type="order.paid")
    OutboxEvent.objects.filter(pk=head).update(first_due_at=now() - timedelta(hours=1))
    due = in_ten_minutes()
    put("k", due_at=due)

    [found] = ask()["streams"]["heads"]
    assert (found["key"], found["event_id"], found["event_type"]) == ("k", head, "order.paid")
    assert (found["status"], found["backlog"], found["next_try"]) == ("RETRY", 3, due.isoformat())
    assert 3600 <= found["age"] < 3700


def test_what_is_paused_is_shown() -> None:
    OutboxPause.objects.pause("event_type", "order.paid", reason="carrier down")
    [found] = ask()["paused"]
    assert 0 <= found.pop("age") < 60
    facts = {"kind": "event_type", "name": "order.paid", "reason": "carrier down"}
    assert found == {**facts, "until": None}
    assert re.search(r"paused   event_type order\.paid for \d+ s: carrier down", run())


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
        "[default]",
        "1 DEAD",
        "1 blocked",
        "k: order.paid",
        "2 wait",
        "next try",
        "host-1",
        "1 a: ValueError",
    ):
        assert part in text


# --- exit codes ----------------------------------------------------------------------------------


def test_45_a_sound_outbox_passes_every_check() -> None:
    insert(1)
    worker()
    limits = ["--max-age=5m", "--max-due=1", "--max-dead=0", "--max-blocked=0", "--min-workers=1"]
    assert check(*limits) == 0


@pytest.mark.parametrize(
    ("limit", "well"),
    [
        ("--max-age=30", "--max-age=500"),
        ("--max-due=1", "--max-due=2"),
        ("--max-dead=0", "--max-dead=1"),
        ("--max-blocked=0", "--max-blocked=1"),
        ("--min-workers=1", "--min-workers=0"),
    ],
    ids=lambda each: each.partition("=")[0],
)
def test_45_beyond_a_limit_the_code_is_1(limit: str, well: str) -> None:
    """That makes the command usable as a health probe."""
    insert(2, due=-40)
    insert(1, due=None, status=DEAD)
    put("k", due_at=in_ten_minutes())
    assert check(well) == 0
    assert check(limit) == 1
    with pytest.raises(CommandError, match=r"^--m.*: expected together with --check"):
        run(limit)


def test_45_a_lost_worker_does_not_count() -> None:
    """Its row stays for a day, so that people can see it; it is an alarm for five minutes."""
    worker("host-1", heartbeat_at=now() - timedelta(seconds=29))
    assert check("--min-workers=1") == 0
    OutboxWorker.objects.update(heartbeat_at=now() - timedelta(seconds=31))
    assert "workers: 0, at least 1 expected" in reasons("--min-workers=1")
    assert len(ask()["workers"]) == len(ask()["lost_workers"]) == 1
    assert "workers without a heartbeat for more than a lease: 1" in reasons()
    OutboxWorker.objects.update(heartbeat_at=now() - timedelta(seconds=331))
    assert (ask()["workers"], len(ask()["lost_workers"])) == ([], 1)
    assert check() == 0
    assert "workers  0 of 1 expected" in run()


def test_45_an_event_that_waits_for_a_minute_is_too_much_by_default() -> None:
    insert(1, due=-50)
    assert check() == 0
    assert check("--max-age=40") == 1
    insert(1, due=-61)
    assert check() == 1
    assert check("--max-age=5m") == 0


def settled(back: int = 1, **counts: int) -> None:
    """Store what a worker settled in the minute that began ``back`` minutes ago."""
    start = now().replace(second=0, microsecond=0) - timedelta(minutes=back)
    OutboxStatistics.objects.create(
        span=60, started_at=start, owner=f"worker-{back}", event_type="order.placed", **counts
    )


def reasons(*arguments: str) -> str:
    with pytest.raises(CommandError) as raised:
        run("--check", *arguments)
    return str(raised.value)


def test_retries_without_any_event_done_are_too_much() -> None:
    settled(2, retry=7)
    assert "done events in the last 5 minutes: 0, at least 1 expected; 7 executions" in reasons()
    settled(1, done=1)
    assert check() == 0


def test_a_lost_worker_fails_the_check(settings: Any) -> None:
    settled(1, done=5, rescued=2)
    assert "events rescued from lost workers in the last 5 minutes: 2, 0 expected" in reasons()
    OutboxStatistics.objects.all().delete()
    worker("host-1", heartbeat_at=now() - timedelta(seconds=31))
    assert "workers without a heartbeat for more than a lease: 1, 0 expected" in reasons()
    OutboxWorker.objects.all().delete()
    settled(1, retry=1, dead=1, rescued=1)
    settings.OUTBOX = {"MODE": "writer_only"}  # others deliver its events
    assert check() == 0


def test_45_the_reasons_are_named() -> None:
    insert(1, due=None, status=DEAD)
    with pytest.raises(CommandError, match=r"default: dead events: 1, at most 0 expected"):
        run("--check", "--max-dead=0")


def test_45_no_answer_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(alias: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("django_outbox.management.commands.outbox_status.status", down)
    assert check() == 2


def test_45_a_database_that_does_not_answer_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting to a host that drops packets would take minutes."""
    go_on = threading.Event()
    command = "django_outbox.management.commands.outbox_status"
    monkeypatch.setattr(f"{command}.status", lambda alias: go_on.wait(60))
    started = time.monotonic()
    try:
        with pytest.raises(CommandError, match=r"default: no answer within 0\.2 s") as raised:
            run("--check", "--timeout", "0.2s")
    finally:
        go_on.set()
    assert raised.value.returncode == 2
    assert time.monotonic() - started < 30


def test_45_a_failure_of_the_database_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(alias: str) -> Any:
        raise TimeoutError("the driver's")

    with pytest.raises(TimeoutError, match="the driver's"):
        call_with_timeout(30, late, "default")
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(30, lambda alias: 1 // 0, "default")


def test_45_unfit_settings_are_no_answer() -> None:
    with override_settings(OUTBOX={"LEESE": 1}):
        assert check() == 2


# --- --watch -------------------------------------------------------------------------------------


@pytest.fixture
def three_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Press Ctrl-C in the third pause; return the pauses in seconds."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        insert(1)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("django_outbox.management.commands.outbox_status.time.sleep", pause)
    return pauses


def test_45_watch_looks_again_until_ctrl_c(three_looks: list[float]) -> None:
    text = run("--watch")
    assert three_looks == [2.0, 2.0, 2.0]
    for n in range(3):
        assert f"{n} NEW" in text
    assert "\x1b" not in text  # stdout is not a terminal


def test_45_watch_draws_a_terminal_anew(three_looks: list[float]) -> None:
    out = Terminal()
    call_command("outbox_status", "--watch", "500", stdout=out)
    assert three_looks == [500.0] * 3
    assert out.getvalue().count("\x1b[H\x1b[2J") == 3


def test_45_watch_as_json_is_one_line_a_look(three_looks: list[float]) -> None:
    lines = [json.loads(each) for each in run("--watch", "1m", "--format", "json").splitlines()]
    assert [each["default"]["counts"]["NEW"] for each in lines] == [0, 1, 2]


def test_45_watch_outlasts_a_database_without_answer(
    three_looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OperationalError("connection refused"), None, None])

    def ask_or_fail(alias: str) -> Any:
        if error := next(answers):
            raise error
        return status(alias)

    monkeypatch.setattr("django_outbox.management.commands.outbox_status.status", ask_or_fail)
    text = run("--watch")
    assert "no answer: default: connection refused" in text
    assert "1 NEW" in text


def test_45_watch_and_check_are_two_things() -> None:
    with pytest.raises(CommandError, match="cannot be combined"):
        run("--watch", "--check")


def test_45_ctrl_c_ends_a_watch_with_0(database_env: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "django", "outbox_status", "--watch", "0.2"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**database_env, "PYTHONUNBUFFERED": "1"},
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
        try:
            wait_until(lambda: log.read_text().count("[default]") >= 2, what="two looks")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()
