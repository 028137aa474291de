"""The counts of outbox_status on each database: exact, estimated, and never a scan of the table."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_outbox.inspection import counts as outbox_counts
from django_outbox.inspection import queues as outbox_queues
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.plans import analyze, large_steps
from tests.table import insert, keyed, now
from tests.test_status import DEAD, DONE, NEW, RETRY, ask, check, reasons, run, settled
from tests.test_stream_queryset import events, in_ten_minutes, put
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


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

    found = ask()
    assert found["counts"] == {"NEW": 8, "DONE": 4, "RETRY": 0, "DEAD": 0}
    assert (found["due"], found["leased"]) == (4, 2)
    assert 120 <= found["oldest_due_age"] < 180
    assert found["blocked"] == 1


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

    def is_known() -> bool:  # MariaDB's own thread may overwrite what it has just learnt
        analyze(OutboxEvent)
        return 50 < dialect_of(connection).estimated_rows() < 200

    wait_until(is_known)


def test_45_of_a_large_table_only_what_is_done_is_estimated(large_table: None) -> None:
    """The others are in an index, however old they are, so they are counted."""
    found = ask()
    done = found["counts"].pop("DONE")
    assert found["counts"] == {"NEW": 12, "RETRY": 5, "DEAD": 7}
    assert 10 < done < 200  # by the database's statistics, from a sample of its pages
    assert (found["estimated"], found["at_least"]) == (["DONE"], [])
    assert [each["count"] for each in found["causes"]] == [4, 3]


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
    monkeypatch.setattr(outbox_queues, "COUNT_LIMIT", 2)
    found = ask()
    assert (found["due"], found["counts"]["DEAD"]) == (2 + 2, 7)  # events and streams
    assert {*found["at_least"]} == {"NEW", "RETRY"}
    assert re.search(r"^due +4\+$", run(), re.MULTILINE)
    assert "Due: 4+, at most 3 expected" in reasons("--max-due=3")


def test_45_no_count_reads_the_whole_table(emptied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5,000 done events and few others, no query may read more than a few rows."""
    monkeypatch.setattr(outbox_counts, "MAX_EXACT_COUNT", 50)
    insert(5000, due=None, status=DONE, done_at=now())
    insert(20, due=60)
    keyed("k", 20)
    analyze(OutboxEvent)
    analyze(OutboxStream)
    assert not large_steps({"counts": lambda: outbox_counts.counts("default")})


def test_more_than_a_tenth_dead_in_five_minutes_is_too_much() -> None:
    settled(1, done=60, dead=5)
    settled(3, done=30, dead=5)
    settled(6, dead=1000)  # too long ago
    assert ask()["rates"] == {"seconds": 300, "done": 90, "retry": 0, "dead": 10, "rescued": 0}
    assert check() == 0
    assert check("--max-dead-share=9.5%") == 1
    settled(2, dead=1)
    lately = "deliveries that ended in the last 5 minutes are dead."
    assert reasons() == f"default: 11 of the 101 {lately}"
    assert check("--max-dead-share=20") == 0


def test_45_the_exit_code_of_the_process(database_env: dict[str, str]) -> None:
    """A probe runs the command in a process of its own."""
    insert(1, due=None, status=DEAD)

    nowhere = {"sqlite": "sqlite:////nowhere/x", "postgresql": "postgres://x@127.0.0.1:1/x"}
    url = nowhere.get(connection.vendor, "mysql://x@127.0.0.1:1/x")

    def start(*arguments: str, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "django", "outbox_status", "--check", *arguments]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(
            command, env={**database_env, **env}, cwd=Path(__file__).parents[2], **pipes
        )

    probes = [start(), start("--max-dead=0"), start(DATABASE_URL=url)]
    assert [probe.wait(60) for probe in probes] == [0, 1, 2]


def test_streams_are_asked_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    put("k", due_at=now() - timedelta(seconds=10))
    monkeypatch.setattr("django.utils.timezone.now", lambda: 1 / 0)
    assert ask()["due"] == 1


def test_45_the_age_is_that_of_an_event_or_of_a_stream() -> None:
    insert(1, due=-300)
    put("due", due_at=now() - timedelta(seconds=120))
    assert 300 <= ask()["oldest_due_age"] < 360


def test_45_inside_a_transaction_the_caller_sees_its_own_rows() -> None:
    with transaction.atomic():
        insert(3)
        assert ask()["counts"]["NEW"] == 3
