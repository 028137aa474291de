"""``outbox_status``: its report on events, streams and workers, and its exit codes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, transaction
from django.test import override_settings

from django_outbox import write
from django_outbox.inspection.overview import status
from django_outbox.inspection.problems import Limits
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStatistics, OutboxWorker
from tests.cases import cases
from tests.surroundings import printed
from tests.table import insert, now, siblings
from tests.test_stream_queryset import events, in_ten_minutes, put

pytestmark = pytest.mark.django_db(transaction=True)

DONE, RETRY, DEAD, NEW = Status.DONE, Status.RETRY, Status.DEAD, Status.NEW
run = partial(printed, "outbox_status")
COMMAND = "django_outbox.management.commands.outbox_status"
QUERY = "django_outbox.management.commands.outbox_status.status"  # what asks a database


def ask(*arguments: str) -> dict[str, Any]:
    return json.loads(run("--format", "json", *arguments))["databases"]["default"]


def fails(*arguments: str) -> tuple[int, str]:
    """Return the exit code and what is said on standard error."""
    with pytest.raises(CommandError) as raised:
        run(*arguments)
    return raised.value.returncode, str(raised.value)


def check(*arguments: str) -> int:
    """Return the exit code of ``--check``."""
    try:
        run("--check", *arguments)
    except CommandError as error:
        return error.returncode
    return 0


def reasons(*arguments: str) -> str:
    return fails("--check", *arguments)[1]


def worker(name: str = "host-1", **columns: Any) -> None:
    values = {"hostname": "host", "pid": 1, "started_at": now(), "heartbeat_at": now(), **columns}
    OutboxWorker.objects.create(id=name, **values)


def settled(back: int = 1, **counts: int) -> None:
    """Store what a worker settled in the minute that began ``back`` minutes ago."""
    start = now().replace(second=0, microsecond=0) - timedelta(minutes=back)
    OutboxStatistics.objects.create(
        started_at=start, owner=f"worker-{back}", listener="order.placed", **counts
    )


# --- the report -----------------------------------------------------------------------------------


def test_an_empty_outbox() -> None:
    found = ask()
    assert found.pop("counts") == {"NEW": 0, "DONE": 0, "RETRY": 0, "DEAD": 0}
    assert found.pop("rates") == {"seconds": 300, "done": 0, "retry": 0, "dead": 0, "rescued": 0}
    [problem] = found.pop("problems")
    assert (problem["kind"], problem["is_bad"]) == ("no_worker", True)
    [queue] = found.pop("queues")
    assert (queue["queue"], queue["due"], queue["unserved"]) == ("default", 0, True)
    assert not any(found.values()), found


def test_in_writer_only_no_event_waits_for_a_worker(settings: Any) -> None:
    """Delayed or not, events stay as they were written, which must not raise an alarm."""
    settings.OUTBOX = {"MODE": "writer_only"}
    insert(3, due=-3600)
    insert(2, due=-600, deliver_at=now() - timedelta(seconds=600))  # was delayed and is due
    insert(1, due=600, deliver_at=now() + timedelta(seconds=600))
    put("k", due_at=now() - timedelta(seconds=3600))
    found = ask()
    assert found["counts"]["NEW"] == 6
    assert (found["due"], found["oldest_due_age"], check()) == (0, 0, 0)
    settings.OUTBOX = {}
    assert (ask()["due"], check()) == (6, 1)


def test_45_a_blocked_stream_is_shown_with_its_head() -> None:
    """The report has the head event, its age, the backlog of the stream and the next try."""
    head, *_ = events("k", RETRY, NEW, NEW, event_type="order.paid")
    hour_ago, mail = now() - timedelta(hours=1), "order.paid mail"
    OutboxEvent.objects.filter(pk=head).update(first_due_at=hour_ago, listener=mail)
    due = in_ten_minutes()
    put("k", due_at=due)
    [found] = ask()["blocked_streams"]
    assert datetime.fromisoformat(found.pop("next_try")) == due
    assert 3600 <= found.pop("age") < 3700
    facts = {"key": "k", "event_id": head, "event_type": "order.paid", "listener": mail}
    assert found == {**facts, "status": "RETRY", "backlog": 3}


def test_45_a_dead_head_that_blocks_has_no_next_try() -> None:
    head, _ = events("k", DEAD, NEW)
    put("k")
    with override_settings(OUTBOX={"ON_DEAD": "block"}):
        [found] = ask()["blocked_streams"]
    assert (found["event_id"], found["status"], found["next_try"]) == (head, "DEAD", None)


@pytest.mark.parametrize("streams", [0, 30], ids=["none", "many"])
def test_45_a_look_costs_few_queries(streams: int, django_assert_max_num_queries: Any) -> None:
    for n in range(streams):
        events(f"k{n}", RETRY, NEW)
        put(f"k{n}", due_at=in_ten_minutes())
    with django_assert_max_num_queries(22):
        status("default")


def test_45_the_table_says_the_same() -> None:
    insert(1, due=None, status=DEAD, last_error="ValueError: no", event_type="a", done_at=now())
    events("k", RETRY, NEW, event_type="order.paid")
    put("k", due_at=in_ten_minutes())
    worker("host-1")
    OutboxPause.objects.pause("event_type", "order.paid", reason="carrier\ndown")
    text = run()
    for part in (
        "[default]",
        "DEAD 1",
        "blocked         1",
        "host-1",
        "carrier down",
        "ValueError",
    ):
        assert part in text, part
    assert [each for each in text.splitlines() if each.startswith("k  ")]


@pytest.mark.parametrize("how", ["force_color", "no_color"])
def test_a_problem_is_red_on_a_terminal(how: str) -> None:
    out = StringIO()
    call_command("outbox_status", stdout=out, **{how: True})
    red = [line for line in out.getvalue().splitlines() if line.startswith("\x1b[")]
    assert ["worker" in each for each in red] == [True] * (how == "force_color")


# --- several databases, and those that do not answer ----------------------------------------------


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_45_a_database_that_is_down_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with transaction.atomic(using="other"):
        write("x", using="other")
    both = ("--database", "default", "--database", "other")
    found = json.loads(run("--format", "json", *both))["databases"]
    assert {alias: each["due"] for alias, each in found.items()} == {"default": 0, "other": 1}

    def down(alias: str, limits: Limits) -> Any:
        if alias == "default":
            raise OperationalError("connection refused")
        return status(alias, limits)

    monkeypatch.setattr(QUERY, down)
    out = StringIO()
    with pytest.raises(CommandError, match=r"^default: connection refused$") as raised:
        call_command("outbox_status", "--format", "json", *both, stdout=out)
    assert raised.value.returncode == 2
    found = json.loads(out.getvalue())["databases"]
    assert (found["default"], found["other"]["due"]) == ({"no_answer": "connection refused"}, 1)


def test_45_a_database_that_does_not_answer_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting to a host that drops packets would take minutes."""
    go_on = threading.Event()
    monkeypatch.setattr(QUERY, lambda alias, limits: go_on.wait(60))
    started = time.monotonic()
    try:
        said = fails("--check", "--timeout", "0.2s")
    finally:
        go_on.set()
    assert said == (2, "default: no answer within 0.2 s")
    assert time.monotonic() - started < 30


@cases("view", [(), ("--listeners",), ("--relays",)])
def test_45_unfit_settings_and_missing_tables_are_no_answer(view: tuple[str, ...]) -> None:
    with override_settings(OUTBOX={"LEESE": 1}):
        assert check(*view) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{COMMAND}.missing_table", lambda alias: "no table")
        assert fails(*view) == (2, "default: no table")


# --- --check --------------------------------------------------------------------------------------


LIMITS = {
    "--max-lag=30": "--max-lag=500",
    "--max-due=1": "--max-due=2",
    "--max-dead=0": "--max-dead=1",
    "--max-blocked=0": "--max-blocked=1",
    "--min-workers=1": "--min-workers=0",
}


def test_45_beyond_a_limit_the_code_is_1() -> None:
    """That makes the command usable as a health probe."""
    insert(2, due=-40)
    insert(1, due=None, status=DEAD)
    put("k", due_at=in_ten_minutes())
    for limit, well in LIMITS.items():
        assert (check(well), check(limit)) == (0, 1), limit
        for others in ((), ("--check", "--listeners"), ("--check", "--relays")):
            assert "expected together with --check" in fails(limit, *others)[1]


def test_45_a_lost_worker_does_not_count() -> None:
    """Its row stays for a day, so that people can see it; it is an alarm for five minutes."""
    worker("host-1", pid=17, heartbeat_at=now() - timedelta(seconds=29))
    [found] = ask()["workers"]
    assert (found["id"], found["hostname"], found["pid"]) == ("host-1", "host", 17)
    assert (found["lost"], check("--min-workers=1")) == (False, 0)
    OutboxWorker.objects.update(heartbeat_at=now() - timedelta(seconds=31))
    assert "Workers: 0, at least 1 expected" in reasons("--min-workers=1")
    assert "Worker host:17 has been lost since" in reasons()
    OutboxWorker.objects.update(heartbeat_at=now() - timedelta(seconds=331))
    [found] = ask()["workers"]
    assert (found["lost"], check()) == (True, 0)


def test_45_an_event_that_waits_for_a_minute_is_too_much_by_default() -> None:
    insert(1, due=-50)
    assert (check(), check("--max-lag=40")) == (0, 1)
    insert(1, due=-61)
    assert (check(), check("--max-lag=5m")) == (1, 0)
    insert(1, due=-5400)
    assert "Queue default is 1 h 30 min late since" in reasons()


def test_retries_without_any_event_done_are_too_much() -> None:
    settled(2, retry=7)
    assert "No delivery was done in the last 5 minutes; 7 executions failed" in reasons()
    settled(1, done=1)
    assert check() == 0


def test_rescued_events_fail_the_check(settings: Any) -> None:
    settled(1, done=5, retry=1, rescued=2)
    assert "rescued in the last 5 minutes: 2" in reasons()
    settings.OUTBOX = {"MODE": "writer_only"}  # others deliver its events
    assert check() == 0


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

    monkeypatch.setattr(f"{COMMAND}.time.sleep", pause)
    return pauses


def test_45_watch_looks_again_until_ctrl_c(
    three_looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database may answer again next time."""
    answers = iter([OperationalError("connection refused"), None, None])

    def ask_or_fail(alias: str, limits: Limits) -> Any:
        if error := next(answers):
            raise error
        return status(alias, limits)

    monkeypatch.setattr(QUERY, ask_or_fail)
    text = run("--watch")
    assert three_looks == [2.0, 2.0, 2.0]
    for part in ("no answer       connection refused", "NEW 1", "NEW 2"):
        assert part in text
    assert "\x1b" not in text  # stdout is not a terminal


def test_45_watch_as_json_is_one_line_a_look(three_looks: list[float]) -> None:
    lines = [json.loads(each) for each in run("--watch", "1m", "--format", "json").splitlines()]
    news = [each["databases"]["default"]["counts"]["NEW"] for each in lines]
    assert news == [0, 1, 2]
    assert "cannot be combined" in fails("--watch", "--check")[1]


# --- one event ------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [str, str.lower])
def test_the_fate_of_an_event_is_shown_and_of_a_delivery_alone(typed: Callable[[str], str]) -> None:
    stored, mail = siblings(*insert(listener="order.placed 0"), "order.placed 1")
    event_id = typed(stored)
    found = ask("--event", event_id)["deliveries"]
    assert [(each["listener"], each["state"]) for each in found] == [
        ("order.placed 0", "waiting"),
        ("order.placed 1", "waiting"),
    ]
    assert [each["id"] for each in ask("--event", typed(mail))["deliveries"]] == [mail]
    text = run("--event", event_id)
    for part in ("order.placed 0", "order.placed 1", "waiting", "STATE"):
        assert part in text


@pytest.mark.parametrize("event_id", ["nowhere", "", "no\0where", "x" * 60])
def test_an_event_that_no_database_has_is_an_error(event_id: str) -> None:
    insert()
    assert fails("--event", event_id)[0] == 1


def test_an_event_is_not_combined_with_a_check() -> None:
    assert "--check" in fails("--event", "e", "--check")[1]
