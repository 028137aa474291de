"""Drains that are interrupted, or run side by side, on each database."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.surroundings import outside_alone
from tests.table import in_thread, listening, row, statuses, write


class Unsteady:
    """Fails the first ``n % 4`` executions of the nth event; interrupts some events once before."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self._interrupted: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, event: outbox.Event) -> None:
        n = event.payload["n"]
        with self._lock:
            self.runs[event.event_id] += 1
            if n % 7 == 3 and event.event_id not in self._interrupted:
                self._interrupted.add(event.event_id)
                raise KeyboardInterrupt
        if event.attempts < n % 4:
            raise (SystemExit if n % 2 else ValueError)(f"failure {event.attempts}")


@outside_alone
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
def test_several_drains_at_once_lose_nothing_and_try_as_often_as_the_policy_says(
    settings: Any, key: str | None
) -> None:
    settings.OUTBOX = {"POLL_BATCH_SIZE": 10, "RETENTION_DONE": None}
    listener, count = Unsteady(), 48
    ids = [write(payload={"n": n}, key=key and f"k{n % 5}")[0] for n in range(count)]

    def drain_until_nothing_is_left() -> int:
        delivered = 0
        while OutboxEvent.objects.pending().exists():
            try:
                delivered += outbox.drain()
            except KeyboardInterrupt:
                continue
        return delivered

    with listening(listener, retry=outbox.Fixed(0, max_attempts=3)):
        for future in [in_thread(drain_until_nothing_is_left) for _ in range(3)]:
            future.result(120)
    for n, event_id in enumerate(ids):
        found, failures = row(event_id), n % 4
        executions = min(failures + 1, 3)
        assert listener.runs[event_id] == executions + (n % 7 == 3), n
        assert found.attempts == min(failures, 3), n
        assert found.status == (Status.DEAD if failures == 3 else Status.DONE), n
        assert (found.rescues, found.locked_by) == (0, None), n
    assert statuses() == {"DONE": 36, "DEAD": 12}
