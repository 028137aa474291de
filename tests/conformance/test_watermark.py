"""The watermark of claims, and how rarely full scans run while a snapshot is open."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.setting_rules import CENTURY
from django_outbox.sql import dialect_of
from django_outbox.sql.values import Claimed, Found
from django_outbox.worker.polling import Throttle
from tests.table import claimed, insert, keyed, listening, statuses, stream_claim, write
from tests.test_hot import engine_statements
from tests.test_watermark import FAR, pause_for
from tests.waiting import wait_until

ALL = Found(more=False)


# -- the claims ------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_events_tells_whether_there_may_be_more(limit: int) -> None:
    insert(due=-30)
    insert(due=-20)
    found = claimed(limit=limit)
    assert (len(found.rows), found.found("default").more) == (2, limit == 2)
    assert 29 < found.found("default").waited < 60
    again = claimed(limit=limit)
    assert (again, again.found("default")) == (Claimed([], {}), ALL)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("limit", [2, 3])
def test_a_claim_of_streams_tells_whether_there_may_be_more(limit: int) -> None:
    keyed("a", due=-30)
    keyed("b", due=-20)
    claim = stream_claim(limit=limit)
    found = dialect_of(connection).claim(claim)
    assert [each[:2] for each in found.rows] == [(":a", "default"), (":b", "default")]
    assert found.found("default").more == (limit == 2)
    assert 29 < found.found("default").waited < 60
    again = dialect_of(connection).claim(claim)
    assert (again, again.found("default")) == (Claimed([], {}), ALL)


# -- a worker --------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_a_worker_delivers_new_events_while_full_scans_pause(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first scans, every claim begins at its watermark."""
    settings.OUTBOX = FAR
    monkeypatch.setattr(Throttle, "after", pause_for(600.0))
    with listening(lambda event: None), engine_statements() as seen, outbox.Worker():
        write()
        keyed("a", due=0)
        doorbell.ring(connection)
        wait_until(lambda: statuses() == {"DONE": 2}, what="the first looks")
        first = len(seen)
        for number in range(3, 9):
            insert()
            keyed(f"a-{number}", due=0)
            doorbell.ring(connection)
            wait_until(lambda: statuses().get("NEW", 0) == 0, what=f"{number} done")
    looks = [(sql, params) for sql, params in seen[first:] if BY_DUE_TIME.search(sql)]
    looks = [each for each in looks if "ORDER BY" in each[0]]
    assert len(looks) >= 12
    assert not [each for each in looks if not begins_late(*each)]


BY_DUE_TIME = re.compile(r"(?<!u\.)(available_at|due_at)\)? <= ")  # u: rows that wait for routing


def begins_late(sql: str, params: Any) -> bool:
    """Return whether a query by due time skips the beginning of the index."""
    if "b.age" in sql:  # PostgreSQL's claim has the bounds of all branches in an array
        return not any(CENTURY in each for each in params if isinstance(each, list))
    return bool(re.search(r"(available_at|due_at)\)? >= ", sql)) and "'-infinity'" not in sql
