"""``drain()`` delivers all due events in this thread, also inside a test's own transaction."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests.surroundings import both, inside, outside_alone
from tests.table import (
    PLACED,
    claim,
    in_thread,
    insert,
    listening,
    now,
    row,
    statuses,
    stream_row,
    write,
)
from tests.waiting import MovedClock, wait_until


def nothing(event: outbox.Event) -> None:
    """Do nothing, so the event is done."""


# -- what it does ----------------------------------------------------------------------------------


@both
def test_at_stands_for_now(outside: bool) -> None:
    write(deliver_after=3600)
    write(deliver_after=7200)
    with listening(nothing):
        assert outbox.drain(at=now() + timedelta(seconds=3599 - 30)) == 0
        assert outbox.drain(at=now() + timedelta(seconds=3601)) == 1
        assert outbox.drain(at=now() + timedelta(seconds=7201)) == 1


@both
def test_at_follows_retries_up_to_it(outside: bool) -> None:
    """An event is retried as often as its delays fit before ``at``, and no more."""
    calls: list[int] = []

    def fails(event: outbox.Event) -> None:
        calls.append(event.attempts)
        raise ValueError("again")

    write()
    with listening(fails, retry=HundredSeconds()):
        assert outbox.drain(at=now() + timedelta(seconds=250)) == 3
    assert calls == [0, 1, 2]


class HundredSeconds:
    max_attempts = 10

    def should_retry(self, error: BaseException) -> bool:
        return True

    def delay(self, attempt: int) -> float:
        return 100.0


@both
def test_what_becomes_due_meanwhile_is_delivered(outside: bool) -> None:
    def writes_another(event: outbox.Event) -> None:
        if event.event_type == PLACED:
            with transaction.atomic():
                outbox.write("order.paid", {})

    write()
    with listening(writes_another, "order.*"):
        assert outbox.drain() == 2
    assert statuses() == {"DONE": 2}


@both
def test_streams_that_are_due_without_an_event_hide_none(outside: bool) -> None:
    for number in range(3):
        stream_row(f"empty {number}", due_at=now() - timedelta(seconds=9)).save()
    write(key="a")
    with listening(lambda event: None):
        assert outbox.drain() == 1
    assert not OutboxStream.objects.filter(due_at__isnull=False).exists()


@both
def test_a_failure_does_not_keep_the_event_from_its_batch_listener(outside: bool) -> None:
    """It is called in the same run, as any second listener is."""
    seen: list[str] = []

    def fail(event: outbox.Event) -> None:
        raise ConnectionError

    def note(events: list[outbox.Event]) -> None:
        seen.extend(each.event_id for each in events)

    with listening(fail, retry=outbox.Fixed(60)), listening(note, name="bulk", batch=10):
        [event_id] = write()
        assert outbox.drain() == 2
    assert seen == [event_id]
    rows = OutboxEvent.objects.of_event(event_id).order_by("listener")
    found = [(each.listener, each.status, each.attempts) for each in rows]
    assert found == [(PLACED, Status.RETRY, 1), (f"{PLACED} bulk", Status.DONE, 0)]


@both
def test_max_rescues(outside: bool) -> None:
    (poison,) = insert(due=-1, rescues=4, locked_by="lost")
    (suspect,) = insert(due=-1, rescues=3, locked_by="lost")
    called: list[str] = []
    with listening(lambda event: called.append(event.event_id)):
        outbox.drain()
    assert called == [suspect]
    assert (row(poison).status, row(poison).last_error) == (Status.DEAD, "lost 5 workers")


# -- inside a transaction --------------------------------------------------------------------------


@inside
def test_inside_on_commit_of_a_listener_waits_for_the_commit(
    django_capture_on_commit_callbacks: Any,
) -> None:
    ran: list[str] = []

    def listener(event: outbox.Event) -> None:
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append(event.event_id))

    ids = write(2)
    with listening(listener):
        with django_capture_on_commit_callbacks(execute=True):
            outbox.drain()
            assert ran == []
        assert sorted(ran) == sorted(ids)


# -- outside of one --------------------------------------------------------------------------------


@outside_alone
def test_what_is_done_is_settled_before_long() -> None:
    """A killed drain repeats little: no delivery waits for the end of its batch."""
    done: list[int] = []

    def listener(event: outbox.Event) -> None:
        done.append(OutboxEvent.objects.done().count())
        time.sleep(0.01)  # the listener's work

    insert(60, due=-1)
    with listening(listener):
        assert outbox.drain() == 60
    assert done[-1] > 0


# -- in memory -------------------------------------------------------------------------------------


@both
def test_what_another_holds_is_left_and_what_was_lost_is_taken(outside: bool) -> None:
    (held,) = insert(due=-1)
    claim("another")
    (lost,) = insert(due=-1, locked_by="lost")
    with listening(nothing):
        assert outbox.drain() == 1
    assert row(held).locked_by == "another"
    assert row(lost).status == Status.DONE


@outside_alone
def test_267_a_slow_listener_keeps_its_lease(settings: Any, clock: MovedClock) -> None:
    settings.OUTBOX = {"LEASE": 6}
    go = threading.Event()
    entered: list[str] = []

    def slow(event: outbox.Event) -> None:
        entered.append(event.event_id)
        assert go.wait(30)

    (event_id,) = write()
    with listening(slow):
        draining = in_thread(outbox.drain)
        try:
            wait_until(lambda: entered)
            for _ in range(2):
                end = row(event_id).available_at
                clock.advance(3)  # more than the third of a lease after which it is renewed
                wait_until(lambda end=end: row(event_id).available_at > end, what="a renewal")  # type: ignore[misc]
            assert outbox.drain() == 0  # no other drain gets it
        finally:
            go.set()
        assert draining.result(20) == 1
    assert entered == [event_id]
    assert (row(event_id).status, row(event_id).rescues) == (Status.DONE, 0)


@outside_alone
def test_no_transaction_is_open_around_a_listener() -> None:
    seen: list[bool] = []
    write()
    with listening(lambda event: seen.append(connection.in_atomic_block)):
        outbox.drain()
    assert seen == [False]


# -- in memory -------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent


def test_in_memory_drain_works_and_a_worker_refuses() -> None:
    script = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_outbox"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, transaction
import threading
import django_outbox as outbox
from django_outbox.models import OutboxEvent
call_command("migrate", verbosity=0)
seen = []

@outbox.listener("order.placed")
def listener(event):
    seen.append((event.payload, connection.in_atomic_block, threading.active_count()))

with transaction.atomic():
    outbox.write("order.placed", 1)
    outbox.write("order.placed", 2)
print(outbox.drain(), seen, OutboxEvent.objects.done().count())
try:
    outbox.Worker().start()
except ImproperlyConfigured as error:
    print("drain()" in str(error))
"""
    inherited = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "2 [(1, False, 1), (2, False, 1)] 2\nTrue\n", done.stderr
