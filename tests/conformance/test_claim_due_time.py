"""A claim leases what is still due when it writes, whatever another worker did since it read.

SQLite, MySQL and MariaDB read what is due and lease it by a second statement. Between the two,
another worker may lease a row, fail it and give it back, due later and held by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.table import claim, insert, keyed, names, now, row, stream, stream_claim

pytestmark = pytest.mark.django_db(transaction=True)

LATER = 60.0  # seconds


def before_update(work: Callable[[], object]) -> Any:
    """Do ``work`` before the first UPDATE of a block, as a session that is faster would."""
    waiting = [work]

    def be_faster(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if waiting and "UPDATE" in sql.replace("FOR UPDATE", ""):
            waiting.pop()()
        return execute(sql, params, many, context)

    return connection.execute_wrapper(be_faster)


def events_due_later(*ids: str) -> Callable[[], object]:
    """Return what makes events due later, as a settled retry does."""
    rows = OutboxEvent.objects.filter(pk__in=ids)
    return lambda: rows.update(available_at=now() + timedelta(seconds=LATER))


def streams_due_later(*keys: str) -> Callable[[], object]:
    """Return what makes streams due later, as a release does."""
    rows = OutboxStream.objects.filter(pk__in=names(*keys))
    return lambda: rows.update(due_at=now() + timedelta(seconds=LATER))


@pytest.mark.skipif(connection.vendor != "sqlite", reason="others have times of a microsecond")
def test_a_claim_leaves_an_event_that_was_tried_since_and_is_due_at_once() -> None:
    """A millisecond is enough to lease an event, fail it, and make it due again."""
    tried, other = insert(2, due=-2)
    with before_update(lambda: OutboxEvent.objects.filter(pk=tried).update(attempts=1)):
        found = claim()
    assert [each["id"] for each in found] == [other]
    assert row(tried).locked_by is None


def test_a_claim_leaves_an_event_that_is_due_later_by_now() -> None:
    first, second, third = (insert(due=-due)[0] for due in (3, 2, 1))
    with before_update(events_due_later(second)):
        found = [each["id"] for each in claim()]
    assert found == [first, third]
    assert row(second).locked_by is None
    assert claim() == []


def test_a_claim_leaves_offered_events_that_are_due_later_by_now() -> None:
    first, second = insert(2, due=-1)
    with before_update(events_due_later(second)):
        found = [each["id"] for each in claim(ids=[first, second])]
    assert found == [first]
    assert row(second).locked_by is None


def test_a_claim_finds_what_is_behind_events_that_are_all_due_later_by_now() -> None:
    first, second = (insert(due=-due)[0] for due in (2, 1))
    with before_update(events_due_later(first)):
        found = [each["id"] for each in claim(limit=1)]
    assert found == [second]


def test_a_claim_leaves_a_stream_that_is_due_later_by_now() -> None:
    for key, due in (("a", -3.0), ("b", -2.0), ("c", -1.0)):
        keyed(key, due=due)
    with before_update(streams_due_later("b")):
        found = dialect_of(connection).claim(stream_claim()).rows
    assert [name for name, *_ in found] == [":a", ":c"]
    assert stream("b").locked_by is None
