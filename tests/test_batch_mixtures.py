"""Many kinds of listeners share events at random: each gets each event once, keys in order."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.table import keyed, listening, write
from tests.test_batches import all_are, deliver, everywhere, outside

Events = list[outbox.Event]
RETRY = outbox.Fixed(0.01, max_attempts=50)
KEYS = "abcdef"


class Ledger:
    """Which listener has finished which events, and which calls are still to fail."""

    def __init__(self, chance: random.Random) -> None:
        self.done: dict[str, list[str]] = defaultdict(list)
        self._chance, self._lock = chance, threading.Lock()
        self._failures: dict[tuple[str, str], int] = {}  # to come, by listener and event

    def fails(self, event: outbox.Event) -> bool:
        """Return whether this listener is to fail for an event: for one in ten, once or twice."""
        with self._lock:
            which = event.listener, event.event_id
            if which not in self._failures:
                self._failures[which] = self._chance.choice([0] * 18 + [1, 2])
            return self._failures[which] > 0

    def fail(self, event: outbox.Event) -> LookupError:
        with self._lock:
            self._failures[event.listener, event.event_id] -= 1
        return LookupError("no")

    def finish(self, events: Events) -> None:
        with self._lock:
            self.done[events[0].listener] += [each.event_id for each in events]

    # -- listeners -------------------------------------------------------------------------------

    def ordinary(self, event: outbox.Event) -> None:
        if self.fails(event):
            raise self.fail(event)
        self.finish([event])

    def answers(self, events: Events) -> list[Exception | None]:
        stopped: set[str | None] = set()
        return [self._answer(each, stopped) for each in events]

    def _answer(self, event: outbox.Event, stopped: set[str | None]) -> Exception | None:
        if event.key is not None and event.key in stopped:
            return None  # ignored
        if self.fails(event):
            stopped.add(event.key)
            return self.fail(event)
        self.finish([event])
        return None

    def raises(self, events: Events) -> None:
        bad = [each for each in events if self.fails(each)]
        if bad:
            raise self.fail(bad[0]) if len(events) == 1 else LookupError("one of them")
        self.finish(events)


def awaited(call: Callable[[Events], Any]) -> Callable[[Events], Any]:
    async def awaited(events: Events) -> Any:
        await asyncio.sleep(0.001)
        return call(events)

    return awaited


@outside
@everywhere
@pytest.mark.parametrize("seed", range(2))
def test_each_listener_gets_each_event_once_and_keys_in_order(
    run: str, seed: int, settings: Any
) -> None:
    settings.OUTBOX = {"WORKERS": 2, "QUEUES": {"other": {"WORKERS": 2}}, "BATCH_BYTES": 3000}
    chance = random.Random(seed)
    ledger = Ledger(chance)
    for _ in range(30):
        write(1, f"mixed.{chance.randrange(3)}")
        text = chance.choice(["", 900 * "x"])
        keyed(
            chance.choice(KEYS),
            1,
            event_type=f"mixed.{chance.randrange(3)}",
            payload=f'{{"text": "{text}"}}',
        )
    queue = chance.choice(["default", "other"])
    options: list[tuple[Any, str, dict[str, Any]]] = [
        (ledger.ordinary, "mixed.*", {}),
        (ledger.answers, "mixed.*", {"batch": 10, "per_key": 4, "within": 0.05}),
        (awaited(ledger.answers), "mixed.*", {"batch": 8, "per_key": 2, "queue": "other"}),
        (ledger.raises, "mixed.1", {"batch": 7, "per_key": chance.choice([1, 3])}),
        (ledger.raises, "mixed.2", {"batch": 9, "per_key": 3, "atomic": True, "queue": queue}),
    ]
    with ExitStack() as stack:
        for number, (call, event_type, more) in enumerate(options):
            stack.enter_context(listening(call, event_type, name=str(number), retry=RETRY, **more))
        deliver(run, all_are(Status.DONE))
    rows = OutboxEvent.objects.in_bulk()
    assert len(ledger.done) == len(options)
    for title, ids in ledger.done.items():
        kind = title.split()[0]
        expected = [each for each, row in rows.items() if kind in ("mixed.*", row.event_type)]
        assert sorted(ids) == sorted(expected), title
        for key in KEYS:
            numbers = [rows[each].seq or 0 for each in ids if rows[each].key == key]
            assert numbers == sorted(numbers), title
