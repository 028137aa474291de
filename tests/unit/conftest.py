"""Fixtures for unit tests: no thread, no database; a clock and answers that the test gives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_outbox import clocks
from django_outbox.sql import DIALECTS
from django_outbox.sql.dialect import Dialect
from tests.unit.scripted import SCRIPTED, Clock


@pytest.fixture(autouse=True)
def no_thread_and_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a thread or connects to a database."""

    def refuse(subject: Any, *args: Any, **kwargs: Any) -> None:
        pytest.fail(f"a unit test must not start or connect {subject!r}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(BaseDatabaseWrapper, "connect", refuse)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock that measures leases in every module of the package that uses it."""
    clock = Clock()
    for name, module in [*sys.modules.items()]:
        used = name.startswith("django_outbox.") and getattr(module, "monotonic", None)
        if used is clocks.monotonic and module is not clocks:
            monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.fixture
def dialect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the statements of the database ``SCRIPTED``, which find nothing until scripted."""
    found = create_autospec(Dialect, instance=True)
    found.pauses.return_value = {}
    found.seconds_to_next_due.return_value = {}
    found.other_queues.return_value = found.due_first.return_value = []
    found.suspects.return_value = found.stranded.return_value = []
    found.read_streams.return_value = []
    monkeypatch.setitem(DIALECTS, SCRIPTED, lambda connection: found)
    connections[SCRIPTED] = SimpleNamespace(vendor=SCRIPTED, alias=SCRIPTED, in_atomic_block=False)
    yield found
    del connections[SCRIPTED]
