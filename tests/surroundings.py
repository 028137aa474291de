"""What tests run in: a transaction that is rolled back or none, receivers of a signal, a gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.table import PLACED, listening
from tests.waiting import Gate

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
