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
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from django_outbox import write
from django_outbox.events import SINGLE_NODE_KEY
from django_outbox.inspection import counts as outbox_counts
from django_outbox.inspection import status as outbox_status
from django_outbox.inspection.status import status
from django_outbox.listeners.outcomes import Status
from django_outbox.management.deadline import call_with_timeout
from django_outbox.models import (
    OutboxEvent,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
    OutboxWorker,
)
from django_outbox.sql import dialect_of
from tests.conformance.test_streams import events, in_ten_minutes, put
from tests.plans import analyze, large_steps
from tests.table import insert, keyed, now
from tests.test_batch_commands import Terminal
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


def test_45_events_streams_and_leases_are_counted() -> None:
    insert(3, due=-90)
    insert(2, due=60)
    insert(1, due=60, locked_by="w1", locked_at=now())
    insert(4, due=None, status=DONE, done_at=now())
    events("due", NEW, NEW)
    put("due", due_at=now() - timedelta(seconds=120))
    put("leased", due_at=in_ten_minutes(), locked_by="w1")
    put("waits", due_at=in_ten_minutes())
    put("idle")
    put(SINGLE_NODE_KEY, due_at=in_ten_minutes(), locked_by="w1")  # not a stream

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


def test_45_dead_events_are_grouped_by_type_and_error() -> None:
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


@pytest.fixture
def large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a table too large to count in full: 60 done, 12 new, 5 to be retried, 7 dead."""
    monkeypatch.setattr(outbox_counts, "MAX_EXACT_COUNT", 50)
    insert(60, due=None, status=DONE, done_at=now())
    insert(6, due=-9)
    insert(2, due=60, status=RETRY)
    insert(4, due=None, status=DEAD, done_at=now(), event_type="a", last_error="ValueError: no")
    keyed("k", 6)
    keyed("j", 3, status=RETRY)
    keyed("i", 3, status=DEAD, event_type="b", last_error="KeyError: 1")
    analyze(OutboxEvent)


def test_45_of_a_large_table_only_what_is_done_is_estimated(large_table: None) -> None:
    """The others are in an index, however old they are, so they are counted."""
    found = ask()
    done = found["counts"].pop("DONE")
    assert found["counts"] == {"NEW": 12, "RETRY": 5, "DEAD": 7}
    assert 10 < done < 200  # by the database's statistics, from a sample of its pages
    assert (found["estimated"], found["at_least"]) == (["DONE"], [])
    assert {each["event_type"]: each["count"] for each in found["dead"]} == {"a": 4, "b": 3}
    assert f"12 NEW, about {done} DONE, 5 RETRY, 7 DEAD" in run()


def test_45_what_statistics_do_not_know_of_yet_is_said_to_be_more(
    large_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = dialect_of(connection)
    monkeypatch.setattr(type(dialect), "estimated_rows", lambda *_: 0)
    found = ask()
    assert found["counts"]["DEAD"] == 7
    assert 0 < found["counts"]["DONE"] <= 51
    assert (found["estimated"], found["at_least"]) == ([], ["DONE"])


def test_45_a_count_that_is_ended_is_said_to_be_more(
    large_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_counts, "MAX_PENDING", 5)
    monkeypatch.setattr(outbox_counts, "MAX_DEAD", 3)
    monkeypatch.setattr(outbox_status, "COUNT_LIMIT", 2)
    found = ask()
    assert (found["due"], found["counts"]["DEAD"]) == (2 + 2, 3)  # events and streams
    assert sum(each["count"] for each in found["dead"]) == 3
    assert {*found["at_least"]} == {"NEW", "RETRY", "DEAD"}
    assert "at least 3 DEAD" in run()


def test_45_no_count_reads_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5,000 done events and few others, no query may read more than a few rows."""
    monkeypatch.setattr(outbox_counts, "MAX_EXACT_COUNT", 50)
    insert(5000, due=None, status=DONE, done_at=now())
    insert(20, due=60)
    keyed("k", 20)
    analyze(OutboxEvent)
    analyze(OutboxStream)
    assert not large_steps({"counts": lambda: outbox_counts.counts("default")})


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
    limits = ["--max-age=5m", "--max-due=1", "--max-dead=0", "--max-blocked=0", "--min-workers=1"]
    assert check(*limits) == 0


@pytest.mark.parametrize(
    ("limit", "well"),
    [("--max-age=30", "--max-age=500"), ("--max-due=1", "--max-due=2"),
     ("--max-dead=0", "--max-dead=1"), ("--max-blocked=0", "--max-blocked=1"),
     ("--min-workers=1", "--min-workers=0")],
    ids=lambda each: each.partition("=")[0],
)  # fmt: skip
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


def test_more_than_a_tenth_dead_in_five_minutes_is_too_much() -> None:
    settled(1, done=60, dead=5)
    settled(3, done=30, dead=5)
    settled(6, dead=1000)  # too long ago
    assert ask()["rates"] == {"seconds": 300, "done": 90, "retry": 0, "dead": 10, "rescued": 0}
    assert check() == 0
    assert check("--max-dead-share=9.5%") == 1
    settled(2, dead=1)
    lately = "dead events in the last 5 minutes"
    assert reasons() == f"default: {lately}: 11 of the 101 that ended, at most 10 % expected"
    assert check("--max-dead-share=20") == 0


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


def test_45_inside_a_transaction_the_caller_sees_its_own_rows() -> None:
    with transaction.atomic():
        insert(3)
        assert ask()["counts"]["NEW"] == 3


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


def test_45_the_exit_code_of_the_process(database_env: dict[str, str]) -> None:
    """A probe runs the command in a process of its own."""
    insert(1, due=None, status=DEAD)

    nowhere = {"sqlite": "sqlite:////nowhere/x", "postgresql": "postgres://x@127.0.0.1:1/x"}
    url = nowhere.get(connection.vendor, "mysql://x@127.0.0.1:1/x")

    def start(*arguments: str, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "django", "outbox_status", "--check", *arguments]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env={**database_env, **env}, cwd=ROOT, **pipes)

    probes = [start(), start("--max-dead=0"), start(DATABASE_URL=url)]
    assert [probe.wait(60) for probe in probes] == [0, 1, 2]


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
        process = subprocess.Popen(command, env={**database_env, "PYTHONUNBUFFERED": "1"},
                                   cwd=ROOT, stdout=output, stderr=output)  # fmt: skip
        try:
            wait_until(lambda: log.read_text().count("[default]") >= 2, what="two looks")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


def test_streams_are_asked_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    put("k", due_at=now() - timedelta(seconds=10))
    monkeypatch.setattr("django.utils.timezone.now", lambda: 1 / 0)
    assert OutboxStream.objects.oldest_due_age() is not None
    assert ask()["streams"]["due"] == 1
