"""What tests run in: a transaction that is rolled back or none, a command, a signal, a gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.table import PLACED, listening
from tests.waiting import Gate, wait_until

inside = pytest.mark.django_db
outside_alone = pytest.mark.django_db(transaction=True)
# Run each test inside a transaction that is rolled back, as in a TestCase, and outside one.
both = pytest.mark.parametrize(
    "outside",
    [
        pytest.param(False, marks=inside, id="inside"),
        pytest.param(True, marks=outside_alone, id="outside"),
    ],
)
by_whom = pytest.mark.parametrize("by_drain", [False, True], ids=["worker", "drain"])


def deliver(*, until: dict[str, int], by_drain: bool, using: str = "default") -> None:
    """Have a worker deliver, or ``drain()``, which tries each event once."""

    def found() -> dict[str, int]:
        counts = OutboxEvent.objects.using(using).counts_by_status()
        return {name: count for name, count in counts.items() if count}

    if by_drain:
        while outbox.drain(using=using):
            pass
        assert found() == until
        return
    with outbox.Worker(using=using) as worker:
        wait_until(lambda: found() == until, what=f"{until}")
        assert worker.lost_threads == ()
        assert worker.health().is_live


def printed(*command: str) -> str:
    """Run a management command; return what it prints."""
    out = StringIO()
    call_command(*command, stdout=out, stderr=StringIO())
    return out.getvalue().strip()


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments of each signal that is sent during the block."""
    found: list[dict[str, Any]] = []

    def receive(signal: Any, **facts: Any) -> None:
        found.append(facts)

    signal.connect(receive)
    try:
        yield found
    finally:
        signal.disconnect(receive)


@contextmanager
def gated(event_type: str = PLACED, *, gate: Gate | None = None, **options: Any) -> Iterator[Gate]:
    """Register a gate; open it at the end, so that no thread stays blocked in it."""
    gate = gate or Gate()
    with listening(gate, event_type, **options):
        try:
            yield gate
        finally:
            gate.open.set()
