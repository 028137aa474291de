"""Every signal is sent with its arguments, robustly, and only when a receiver is connected."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.dispatch import Signal
from django.test import override_settings

import django_outbox as outbox
from django_outbox import signals
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from tests.surroundings import heard
from tests.table import PLACED, insert, keyed, listening, now, row, statuses, steal, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NAMED = {name: each for name, each in vars(signals).items() if isinstance(each, Signal)}


def nothing(event: outbox.Event) -> None:
    """Do nothing."""


def refuse(event: outbox.Event) -> None:
    raise outbox.Unrecoverable("never")


def work(listener: Callable[[outbox.Event], None] = nothing) -> None:
    """Have a worker deliver all events."""
    with listening(listener), outbox.Worker():
        wait_until(lambda: set(statuses()) <= {"DONE", "DEAD"}, what="everything finished")


def write_one() -> None:
    write(1)


def write_hot() -> None:
    with listening(nothing), outbox.Worker():
        write(1)
        wait_until(lambda: statuses() == {"DONE": 1})


def overflow() -> None:
    """Fill the queue: the only thread is busy and the only place is taken."""
    gate: list[bool] = []

    def wait(event: outbox.Event) -> None:
        wait_until(lambda: gate)

    with listening(wait), outbox.Worker():
        for _ in range(12):
            write(1)
        gate.append(True)
        wait_until(lambda: statuses() == {"DONE": 12})


def deliver() -> None:
    insert(1)
    work()


def deliver_batch() -> None:
    insert(2)
    with listening(lambda events: None, batch=2):
        outbox.drain()


def relay() -> None:
    insert(2, event_type="relayed.x")
    outbox.drain()


def kill() -> None:
    insert(1)
    work(refuse)


def rescue() -> None:
    insert(1, locked_by="lost", locked_at=now())
    work()


def lose() -> None:
    def stolen(event: outbox.Event) -> None:
        if event.attempts == 0 and row(event.event_id).locked_by != "thief":
            steal(event.event_id)

    insert(1)
    with listening(stolen), outbox.Worker() as worker:
        wait_until(lambda: row_is_stolen() and worker.depths()["held"] == 0)


def run_late() -> None:
    insert(1)
    with listening(lambda event: time.sleep(0.02), timeout=0.01):  # the listener's work
        outbox.drain()


def row_is_stolen() -> bool:
    return OutboxEvent.objects.filter(locked_by="thief").exists()


def bury() -> None:
    insert(2, due=None, status=3, done_at=now())


def replay() -> None:
    bury()
    OutboxEvent.objects.dead().replay()


def discard() -> None:
    bury()
    OutboxEvent.objects.dead().discard()


def purge() -> None:
    bury()
    OutboxEvent.objects.purge()


def pause() -> None:
    OutboxPause.objects.pause("event_type", PLACED, reason="tidy up")
    OutboxPause.objects.filter(name=PLACED).resume()


def start_and_stop() -> None:
    with outbox.Worker():
        pass


def open_and_close() -> None:
    """Let one delivery fail, which opens the breaker of its queue, and the probe succeed."""

    def fail_once(event: outbox.Event) -> None:
        if not event.attempts:
            raise outbox.RetryAfter(0)

    with listening(fail_once, queue="hooks"), outbox.Worker():
        write(1)
        wait_until(lambda: statuses() == {"DONE": 1})
        wait_until(lambda: not OutboxPause.objects.exists())


# By signal: what causes it, and its arguments, each as a value or a type.
CASES: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {
    "event_written": (write_one, {"event": outbox.Event}),
    "event_queued": (write_hot, {"event": outbox.Event}),
    "event_dropped": (overflow, {"event": outbox.Event}),
    "events_claimed": (deliver, {"count": int, "source": "cold"}),
    "event_started": (deliver, {"event": outbox.Event, "listener": object}),
    "event_decided": (
        deliver,
        {"event": outbox.Event, "listener": object, "outcome": "done", "duration": float},
    ),
    "batch_called": (deliver_batch, {"listener": object, "size": 2, "duration": float}),
    "relay_published": (
        relay,
        {"relay": "all", "published": 2, "refused": 0, "deferred": 0, "duration": float},
    ),
    "event_settled": (
        deliver,
        {"event": outbox.Event, "outcome": "done", "duration": float, "lag": float},
    ),
    "event_dead": (kill, {"event": outbox.Event, "cause": str}),
    "event_rescued": (rescue, {"event": outbox.Event, "rescues": 1}),
    "listener_overdue": (run_late, {"event": outbox.Event, "listener": object, "seconds": float}),
    "lease_lost": (lose, {"count": 1}),
    "events_replayed": (replay, {"count": 2}),
    "events_discarded": (discard, {"count": 2}),
    "events_purged": (purge, {"count": 2}),
    "delivery_paused": (
        pause,
        {"kind": "event_type", "name": PLACED, "reason": "tidy up", "by": str, "until": type(None)},
    ),
    "delivery_resumed": (pause, {"kind": "event_type", "name": PLACED, "count": int}),
    "breaker_opened": (open_and_close, {"queue": "hooks", "pause": 0.1, "reason": str}),
    "breaker_closed": (open_and_close, {"queue": "hooks"}),
    "worker_started": (start_and_stop, {"worker_id": str, "worker": outbox.Worker}),
    "worker_stopped": (start_and_stop, {"worker_id": str}),
}
SETTINGS = {
    "RELAYS": {"all": {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["relayed.*"]}},
    "WORKERS": 1,
    "HOT_QUEUE_CAPACITY": 1,
    "COLD_QUEUE_CAPACITY": 1,
    "RETENTION_DEAD": 0,
    "PROBE_INTERVAL": 0.05,
    "QUEUES": {"hooks": {"BREAKER": {"failures": 1, "pause": 0.1}}},
}


def test_every_signal_has_its_case() -> None:
    assert set(CASES) == set(NAMED)


@pytest.mark.parametrize("name", CASES)
def test_46_it_is_sent_robustly_with_its_facts(
    name: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver that fails harms neither the action nor the next receiver."""
    settings.OUTBOX = SETTINGS
    deed, facts = CASES[name]
    told: list[dict[str, Any]] = []

    def fails(**kwargs: Any) -> None:
        raise ZeroDivisionError(name)

    def hears(**kwargs: Any) -> None:
        told.append(kwargs)

    NAMED[name].connect(fails)
    NAMED[name].connect(hears)
    try:
        deed()
        wait_until(lambda: told, what=name)
    finally:
        NAMED[name].disconnect(fails)
        NAMED[name].disconnect(hears)
    first = told[0]
    assert first["sender"] == "default"
    assert set(first) == {"signal", "sender", *facts}
    for fact, expected in facts.items():
        kind = expected if isinstance(expected, type) else type(expected)
        assert isinstance(first[fact], kind), fact
        assert isinstance(expected, type) or first[fact] == expected, fact
    assert any("receiver failed" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("written_first", [False, True], ids=["at the write", "at the claim"])
def test_each_death_of_an_event_is_told_with_its_listener_and_cause(written_first: bool) -> None:
    if written_first:
        write(1)
    with (
        heard(signals.event_dead) as dead,
        heard(signals.event_settled) as settled,
        listening(lambda event: outbox.Dead("out of stock")),
        listening(lambda event: outbox.Dead("no address"), name="mail"),
    ):
        if not written_first:
            write(1)
        outbox.drain()
        outbox.drain()
    told = {each["event"].listener: each["cause"] for each in dead}
    assert told == {PLACED: "out of stock", f"{PLACED} mail": "no address"}
    assert len(dead) == 2
    assert sorted(each["event"].listener for each in settled) == sorted(told)


def die_in_a_drain() -> None:
    insert(1)
    with listening(refuse):
        outbox.drain()


async def refuse_later(event: outbox.Event) -> None:
    refuse(event)


def die_on_the_event_loop() -> None:
    insert(1)
    with listening(refuse_later), outbox.Worker():
        wait_until(lambda: statuses() == {"DEAD": 1})


def die_in_a_batch() -> None:
    insert(2)
    with listening(lambda events: [outbox.Dead("no")] * len(events), batch=2):
        outbox.drain()


def die_with_a_commit() -> None:
    insert(1)
    with listening(lambda event: outbox.Dead("no"), atomic=True):
        outbox.drain()


def die_after_rescues() -> None:
    insert(1, due=-1, locked_by="lost", locked_at=now(), rescues=99)
    work()


def die_after_rescues_with_a_key() -> None:
    keyed("k")
    OutboxStream.objects.update(locked_by="lost", locked_at=now(), rescues=99)
    work()


def die_unroutable() -> None:
    insert(1, listener=PLACED, routes=registry.digest(PLACED))
    with override_settings(OUTBOX={"UNROUTABLE_GRACE": 0}):
        outbox.drain()


DEATHS = (
    kill,
    die_in_a_drain,
    die_on_the_event_loop,
    die_in_a_batch,
    die_with_a_commit,
    die_after_rescues,
    die_after_rescues_with_a_key,
    die_unroutable,
)


@pytest.mark.parametrize("die", DEATHS, ids=lambda each: each.__name__)
def test_an_ended_delivery_is_told_and_logged_with_its_listener(
    die: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with heard(signals.event_dead) as dead, heard(signals.event_settled) as settled:
        die()
        wait_until(lambda: len(settled) == OutboxEvent.objects.count())
    assert {each["event"].listener for each in (*dead, *settled)} == {PLACED}
    assert len(dead) == len(settled)
    lines = [each.getMessage() for each in caplog.records if each.getMessage().startswith("dead ")]
    assert len(lines) == len(dead)
    assert all(f" listener={PLACED!r} " in each for each in lines)


def test_46_201_nothing_is_sent_when_nobody_listens(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.OUTBOX = SETTINGS
    sent: list[Signal] = []
    send_robust = Signal.send_robust

    def note(self: Signal, *args: Any, **kwargs: Any) -> Any:
        sent.append(self)
        return send_robust(self, *args, **kwargs)

    monkeypatch.setattr(Signal, "send_robust", note)
    for deed in {deed for deed, _ in CASES.values()} - {lose}:
        OutboxEvent.objects.all().delete()
        deed()
    assert [each for each in sent if each in NAMED.values()] == []
