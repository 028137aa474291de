"""``drain()`` and ``outbox_worker --once`` when listeners exit, interrupt or fail."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests.fleet import Fleet, wait_for_end_of
from tests.surroundings import both, outside_alone
from tests.table import (
    insert,
    keyed,
    lease_ends_in,
    listening,
    names,
    now,
    row,
    statuses,
    stream,
    stream_due_in,
    write,
)
from tests.testapp.models import Effect
from tests.waiting import wait_until


class Halt(BaseException):
    """Derives from ``BaseException`` only."""


ENDS = [SystemExit, asyncio.CancelledError, Halt]


def listener_that(error: type[BaseException], *, is_async: bool) -> Callable[[outbox.Event], Any]:
    """Return a listener that raises for events with the payload "bad" and succeeds for others."""

    def listener(event: outbox.Event) -> None:
        if event.payload == "bad":
            raise error("a listener's")

    async def alistener(event: outbox.Event) -> None:
        await asyncio.sleep(0)
        listener(event)

    return alistener if is_async else listener


either = pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])


# -- what would end a process ----------------------------------------------------------------------


@both
@either
@pytest.mark.parametrize("error", ENDS)
def test_a_listener_that_exits_has_failed_like_any_other(
    outside: bool, is_async: bool, error: type[BaseException]
) -> None:
    bad, good = [insert(due=-9 + n, payload=text)[0] for n, text in enumerate(['"bad"', "1"])]
    policy = outbox.Fixed(0, max_attempts=2)
    with listening(listener_that(error, is_async=is_async), retry=policy):
        assert outbox.drain() == 2
        assert row(good).status == Status.DONE
        found = row(bad)
        assert (found.status, found.attempts, found.locked_by) == (Status.RETRY, 1, None)
        assert error.__name__ in str(found.last_error)
        assert outbox.drain() == 1
        assert outbox.drain() == 0
    assert (row(bad).status, row(bad).attempts) == (Status.DEAD, 2)


# -- an interrupt ----------------------------------------------------------------------------------


@both
@either
def test_an_interrupt_hands_the_event_back_and_ends_the_run(outside: bool, is_async: bool) -> None:
    texts = ["1", '"bad"', "1"]
    first, bad, last = [
        insert(due=-9 + n, attempts=2, payload=text)[0] for n, text in enumerate(texts)
    ]
    interrupts = listener_that(KeyboardInterrupt, is_async=is_async)
    with listening(interrupts), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert row(first).status == Status.DONE
    for event_id in (bad, last):
        found = row(event_id)
        assert (found.status, found.locked_by, found.locked_at) == (Status.NEW, None, None)
        assert (found.attempts, found.rescues, found.last_error) == (2, 0, None)
        assert lease_ends_in(event_id) <= 0
    with listening(lambda event: None):
        assert outbox.drain() == 2
    assert statuses() == {"DONE": 3}


def interrupted(event: outbox.Event) -> None:
    raise KeyboardInterrupt


@both
def test_an_interrupt_counts_no_rescue_beyond_the_one_that_was_found(outside: bool) -> None:
    (event_id,) = insert(due=-1, locked_by="lost")
    for _ in range(3):  # the second and third find no lost worker
        with listening(interrupted), pytest.raises(KeyboardInterrupt):
            outbox.drain()
        found = row(event_id)
        assert (found.status, found.attempts, found.rescues) == (Status.NEW, 0, 1)


def lost(*keys: str) -> None:
    OutboxStream.objects.filter(pk__in=names(*keys)).update(locked_by="lost", locked_at=now())


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database_env, tmp_path, LISTENER_MODULE="listeners")
    yield fleet
    fleet.kill_all()


@outside_alone
def test_once_hands_back_at_ctrl_c(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (event_id,) = write(event_type="process.gated", payload={"gate": str(gate)})
    worker = fleet.start("--once")
    wait_until(lambda: Effect.objects.filter(phase="start").exists(), within=60, what="the start")
    worker.send_signal(signal.SIGINT)
    assert wait_for_end_of(worker) != 0
    found = row(event_id)
    assert (found.status, found.attempts, found.rescues) == (Status.NEW, 0, 0)
    assert found.locked_by is None
    assert lease_ends_in(event_id) <= 0
    gate.touch()
    assert wait_for_end_of(fleet.start("--once")) == 0
    assert statuses() == {"DONE": 1}


@both
def test_once_delivers_at_most_max_events(
    outside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(5, due=-1)
    keyed("k", 2, due=-1)
    with listening(lambda event: None):
        for said, left in [("2", 5), ("2", 3), ("2", 1), ("1", 0)]:
            call_command("outbox_worker", "--once", "--max-events", "2")
            assert capsys.readouterr().out == f"delivered {said}\n"
            assert OutboxEvent.objects.pending().count() == left


# -- one execution each ----------------------------------------------------------------------------


@both
@either
def test_an_interrupt_releases_the_stream(outside: bool, is_async: bool) -> None:
    """Events before it are settled, and the stream resumes with the interrupted event."""
    ids = keyed("k", 4, due=-1, payload="1")
    OutboxEvent.objects.filter(pk=ids[1]).update(payload='"bad"')
    interrupts = listener_that(KeyboardInterrupt, is_async=is_async)
    with listening(interrupts), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert [row(each).status for each in ids] == [Status.DONE, *[Status.NEW] * 3]
    assert [(row(each).attempts, row(each).rescues) for each in ids] == [(0, 0)] * 4
    assert stream("k").locked_by is None
    assert stream_due_in("k") <= 0
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id)):
        assert outbox.drain() == 3
    assert seen == ids[1:]


@both
@pytest.mark.parametrize("rescues", [0, 1])
def test_an_interrupt_is_no_lost_worker(outside: bool, rescues: int) -> None:
    first, second = keyed("k", 2, due=-1)
    lost(*"k")
    OutboxStream.objects.update(rescues=rescues)
    with listening(interrupted), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert [row(each).attempts for each in (first, second)] == [0, 0]
    assert stream("k").rescues == rescues + 1
    assert stream("k").locked_by is None
    assert stream_due_in("k") <= 0
    with listening(lambda event: None):
        assert outbox.drain() == 2
