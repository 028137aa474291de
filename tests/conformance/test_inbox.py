"""The inbox: a message that arrives twice takes effect once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from django_outbox import inbox
from django_outbox.models import OutboxEvent, OutboxInbox
from tests.consumer import POINTS
from tests.crashpoints import KILLED, VARIABLE
from tests.fleet import REPOSITORY, Fleet, wait_for_end_of
from tests.sessions import waiters
from tests.table import elsewhere, in_thread, now
from tests.test_inbox import effects, events, inside, leave_effect, outside, receive, received
from tests.waiting import wait_until

SQLITE = connection.vendor == "sqlite"


# -- the first time and every other ----------------------------------------------------------------


@inside
def test_source_and_message_together_are_the_identity() -> None:
    assert receive("m1", "bank")
    assert receive("m1", "shop")
    assert receive("M1", "bank")  # equal to m1 in MySQL's default collation
    assert receive("m2", "bank")
    assert receive("☕", "bank")
    assert not receive("☕", "bank")
    assert receive("x" * 255, "y" * 128)


@inside
def test_received_at_is_the_databases_clock() -> None:
    before = now()
    receive()
    assert before <= OutboxInbox.objects.get().received_at <= now()


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_each_database_remembers_for_itself() -> None:
    for alias in ("default", "other"):
        with transaction.atomic(using=alias), inbox.once("bank", 1, using=alias) as first:
            assert first
    assert OutboxInbox.objects.using("other").count() == 1
    with transaction.atomic(using="other"), inbox.once("bank", 1, using="other") as first:
        assert not first


# -- what is undone --------------------------------------------------------------------------------


@outside
def test_a_rollback_forgets() -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        with inbox.once("bank", "m1") as first:
            assert first
            leave_effect("m1")
        raise ZeroDivisionError
    assert not OutboxInbox.objects.exists()
    assert receive()
    assert effects() == {"m1": 1}


@outside
def test_an_error_in_the_block_undoes_the_block_alone() -> None:
    """If the caller catches the error, the transaction stays usable; the message can come again."""
    with transaction.atomic():
        leave_effect("before")
        with pytest.raises(ZeroDivisionError), inbox.once("bank", "m1"):
            leave_effect("m1")
            raise ZeroDivisionError
        leave_effect("after")
    assert effects() == {"before": 1, "after": 1}
    assert receive()


# -- several at once -------------------------------------------------------------------------------


@outside
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_second_consumer_waits_for_the_first(end: str) -> None:
    """It answers by the first one's outcome, and its own transaction stays usable."""
    received, finish = threading.Event(), threading.Event()

    def first_consumer() -> None:
        with transaction.atomic(), inbox.once("bank", "m1") as first:
            assert first
            leave_effect("m1")
            received.set()
            assert finish.wait(30)
            if end == "rollback":
                raise ZeroDivisionError

    def second_consumer() -> bool:
        with transaction.atomic():
            leave_effect("second")
            with inbox.once("bank", "m1") as first:
                if first:
                    leave_effect("m1")
            leave_effect("second")
        return first

    one = in_thread(first_consumer)
    assert received.wait(30)
    two = in_thread(second_consumer)
    if not SQLITE:  # SQLite waits for the file, before the first statement
        wait_until(lambda: two.done() or lock_waits(), what="the second one's wait")
    assert not two.done()
    finish.set()
    assert two.result(30) is (end == "rollback")
    assert isinstance(one.exception(30), ZeroDivisionError if end == "rollback" else type(None))
    assert effects() == {"m1": 1, "second": 2}


def lock_waits() -> bool:
    """Return whether a session of the server waits for a lock in the inbox."""
    return waiters("outbox_inbox") > 0


@outside
def test_of_many_at_once_one_is_the_first() -> None:
    together = threading.Barrier(8)

    def delivered(n: int) -> bool:
        """Receive a message; again, as a broker would, if MySQL has ended a deadlock with it."""
        while True:
            try:
                return receive(n)
            except OperationalError as error:
                if (connection.vendor, error.args[0]) != ("mysql", 1213):
                    raise

    def consume() -> list[bool]:
        connection.ensure_connection()
        together.wait(30)
        return [delivered(n) for n in range(20)]

    answers = [each.result(60) for each in [in_thread(consume) for _ in range(8)]]
    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * 20
    assert effects() == {str(n): 1 for n in range(20)}


# -- with the outbox -------------------------------------------------------------------------------


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, LEASE=0.8, DRAIN_TIMEOUT=0.5, POLL_INTERVAL=0.2)
    yield fleet
    fleet.kill_all()
    sys.stdout.write(fleet.log.read_text()[-6000:])  # pytest shows it when the test fails


MESSAGES = 40


@outside
def test_exactly_once_from_end_to_end_whatever_dies(
    fleet: Fleet, database_env: dict[str, str], tmp_path: Path
) -> None:
    """Each message takes effect once, although the broker repeats and consumers and workers die."""
    spool, acknowledged = tmp_path / "spool", tmp_path / "acknowledged"
    spool.write_text("\n".join(f"m{n}" for n in range(MESSAGES)))
    acknowledged.touch()

    def consume(*where: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.consumer", str(spool), str(acknowledged), *where],
            cwd=REPOSITORY,
            env=database_env,
        )

    for point in POINTS:
        assert consume(point, "7").wait(60) == -9
    assert len(acknowledged.read_text().split()) == 12
    assert events() == {f"m{n}": 1 for n in range(13)}  # the last one is not acknowledged
    for place in ("in_atomic_settle:3", "after_listener:5", "after_settle:1"):
        dying = fleet.start(**{VARIABLE: place})
        assert wait_for_end_of(dying) == KILLED, fleet.log.read_text()
    worker = fleet.start()
    both = [consume(), consume()]  # the same message may arrive twice at the same time
    assert [each.wait(60) for each in both] == [0, 0]
    assert {*acknowledged.read_text().split()} == {f"m{n}" for n in range(MESSAGES)}
    wait_until(lambda: not OutboxEvent.objects.pending().exists(), what="an event pending")
    assert fleet.end(worker) == 0

    assert events() == {f"m{n}": 1 for n in range(MESSAGES)}
    assert OutboxEvent.objects.done().count() == MESSAGES
    assert effects() == dict.fromkeys(OutboxEvent.objects.values_list("pk", flat=True), 1)
    repeated = {key for key, count in fleet.starts().items() if count > 1}
    assert repeated  # the kills did cause repeats


# -- the purge -------------------------------------------------------------------------------------


def left() -> list[int]:
    return [*OutboxInbox.objects.order_by("pk").values_list("pk", flat=True)]


@inside
def test_what_is_old_is_purged(settings: Any) -> None:
    settings.OUTBOX = {"PURGE_BATCH_SIZE": 4}
    received(10, days=7.1)
    young = received(3, days=6.9)
    assert OutboxInbox.objects.expired().count() == 10
    sizes = [*OutboxInbox.objects.purge_batches()]
    assert (sum(sizes), max(sizes)) == (10, 4)
    assert left() == young
    assert OutboxInbox.objects.purge() == 0


@outside
@pytest.mark.skipif(SQLITE, reason="one writer at a time: the file is locked, not a row")
def test_a_purge_waits_for_nobody() -> None:
    old = received(20, days=8)

    def lock() -> None:
        OutboxInbox.objects.select_for_update().get(pk=old[2])
        with inbox.once("bank", "under way"):
            pass

    def purge() -> int:
        with connection.cursor() as cursor:  # far below the database's own timeout
            limit = {"postgresql": "SET lock_timeout = 1000"}
            cursor.execute(limit.get(connection.vendor, "SET innodb_lock_wait_timeout = 1"))
        return OutboxInbox.objects.purge()

    with elsewhere(lock):
        assert in_thread(purge).result(30) == 19
    assert OutboxInbox.objects.purge() == 1
