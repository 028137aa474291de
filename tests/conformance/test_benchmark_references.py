"""What the benchmarks compare a drain with does a worker's work: leases, payloads, ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection

from django_outbox.models import OutboxEvent
from tests.benchmarks import backlog, raw
from tests.benchmarks.best import BATCH, BEST, COLUMNS, LEASE, ME
from tests.benchmarks.payload import PAYLOAD

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("reference", [*raw.REFERENCES])
def test_a_reference_leases_events_and_ends_them(reference: str) -> None:
    backlog.insert(BATCH + 10, due=backlog.DUE, text=backlog.TEXT)
    driver = raw.connect()
    try:
        claim, settle = raw.STEPS[reference](driver)
        ids = claim()
        assert len(ids) == BATCH
        half_way = datetime.now(timezone.utc) + timedelta(seconds=LEASE / 2)
        leased = OutboxEvent.objects.filter(
            event_id__in=ids, locked_by=ME, locked_at__isnull=False, available_at__gt=half_way
        )
        assert leased.count() == BATCH
        assert settle(ids) == BATCH
        assert settle(ids) == 0
    finally:
        driver.close()


@pytest.mark.parametrize("reference", [*raw.REFERENCES])
def test_a_drain_by_a_reference_leaves_nothing_due(reference: str) -> None:
    backlog.insert(2 * BATCH, due=backlog.DUE, text=backlog.TEXT)
    assert raw.drain(2 * BATCH, reference) > 0
    assert OutboxEvent.objects.filter(available_at=None, status=1).count() == 2 * BATCH


def test_the_best_known_claim_reads_the_payload() -> None:
    backlog.insert(2, due=backlog.DUE, text=backlog.TEXT)
    driver = raw.connect()
    try:
        rows = BEST[connection.vendor].claim(driver.cursor())
    finally:
        driver.close()
    payloads = [row[COLUMNS.split(", ").index("payload")] for row in rows]
    assert [json.loads(each) for each in payloads] == [PAYLOAD] * 2


def test_the_best_known_claim_sorts_no_backlog() -> None:
    """One that does is the slower the more events wait: no reference for a fast one."""
    backlog.insert(20 * BATCH, due=backlog.DUE, text=backlog.TEXT)
    backlog.analyze()
    driver = raw.connect()
    try:
        claims = Recorded(driver.cursor())
        BEST[connection.vendor].claim(claims)
        sql, params = claims.statements[0]
        plan = driver.cursor()
        plan.execute(f"{connection.ops.explain_query_prefix()} {sql}", params)
        assert not re.search("sort|temp b-tree", str(plan.fetchall()).lower())
    finally:
        driver.close()


class Recorded:
    """A cursor that keeps the statements it was given."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.statements: list[tuple[str, Sequence[Any]]] = []

    def execute(self, sql: str, params: Sequence[Any]) -> None:
        self.statements.append((sql, params))
        self._cursor.execute(sql, params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def test_a_reference_that_finds_too_little_fails() -> None:
    backlog.insert(10, due=backlog.DUE)
    with pytest.raises(RuntimeError, match="10 of 11 events were due"):
        raw.drain(11, "best")
