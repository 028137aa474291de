"""Listeners that worker processes of the test suite find by autodiscovery."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import django_outbox as outbox
from tests.testapp.models import Effect


def leave(event: outbox.Event, phase: str) -> None:
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase=phase)


@outbox.listener("process.quick")
def quick(event: outbox.Event) -> None:
    leave(event, "end")


@outbox.listener("process.gated")
def gated(event: outbox.Event) -> None:
    """Run until the file that the payload names is there."""
    leave(event, "start")
    gate = Path(event.payload["gate"])
    while not gate.exists():
        time.sleep(0.01)  # the listener's work
    leave(event, "end")


@outbox.listener("process.stuck")
def stuck(event: outbox.Event) -> None:
    """Run for ever."""
    leave(event, "start")
    threading.Event().wait()


@outbox.listener("process.exits", retry=outbox.Fixed(0, max_attempts=1))
def exits(event: outbox.Event) -> None:
    raise SystemExit("a listener's")
