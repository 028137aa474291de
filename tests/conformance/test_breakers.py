"""Breakers on each database: one of many workers opens and probes."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from django.db import connection

from tests.test_breakers import end_pause, with_breaker

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["with_breaker"]  # fixtures


def test_one_of_many_workers_probes() -> None:
    """Each has its own breaker in memory; the row decides."""
    from django_outbox.sql import dialect_of
    from tests.table import in_thread

    dialect = dialect_of(connection)
    assert dialect.open_breaker(connection, queue="hooks", pause=60, reason="x")
    assert not dialect.open_breaker(connection, queue="hooks", pause=60, reason="y")
    end_pause()
    start = threading.Barrier(10)

    def probe() -> bool:
        start.wait(20)
        return dialect.probe_breaker(connection, queue="hooks", lease=30)

    won = [each.result(60) for each in [in_thread(probe) for _ in range(10)]]
    assert Counter(won) == {True: 1, False: 9}
