"""The admin's search on each database: how far it goes, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.urls import reverse

from django_outbox.admin import changelist
from django_outbox.events import new_id
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from tests.table import insert
from tests.test_admin import LIST, all_url, body, listed, make, visitor

pytestmark = pytest.mark.django_db


@contextmanager
def slow() -> Iterator[None]:
    """Have the scan of the whole table, and a count of what matches, take too long."""

    def execute(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if f"LIMIT {changelist.MATCH_LIMIT + 1}" in sql or "COUNT(DISTINCT" in sql:
            raise OperationalError("canceling statement due to statement timeout")
        return run(sql, params, many, context)

    with connection.execute_wrapper(execute):
        yield


@pytest.mark.parametrize("query", [{"q": "17"}, {"event_type": "a"}, {"attempts": "9"}])
def test_what_is_not_found_in_time_is_not_listed_and_the_page_says_so(
    query: dict[str, str],
) -> None:
    match = {"aggregate_id": "17", "event_type": "a", "attempts": 9}
    events = [make(**match).pk for _ in range(2)]
    make(aggregate_id="1", event_type="b")
    client = visitor("view", "replay")
    assert listed(client, **query) == events[::-1]
    with slow():
        page = body(client, reverse(LIST), **query)
        assert "was not finished after 2 seconds" in page
        assert "outbox-id" not in page
        assert "all that match" in body(client, all_url("replay"), **query)  # not how many


def test_an_id_is_found_without_a_search() -> None:
    event, client = make(event_id=new_id()), visitor("view")
    with connection.execute_wrapper(_no_scan):
        assert listed(client, q=event.pk.lower()) == [event.pk]
        with pytest.raises(AssertionError):
            listed(client, q="17")


def _no_scan(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Refuse a condition on what no index has."""
    assert "aggregate_id" not in sql.partition(" WHERE ")[2]
    return run(sql, params, many, context)


def test_more_matches_than_the_limit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelist, "MATCH_LIMIT", 2)
    events = [make(aggregate_id="17").pk for _ in range(3)]
    client = visitor("view", "replay")
    assert listed(client, q="17") == events[:0:-1]
    assert "Only the first 2 that match are listed" in body(client, reverse(LIST), q="17")
    assert listed(client, q="17", o="1") == events[:2]  # in the order of the list


def test_a_statement_ends_at_its_time_and_the_connection_goes_on() -> None:
    """Also in a transaction, which this test runs in."""
    insert(200)
    table = connection.ops.quote_name(OutboxEvent._meta.db_table)
    joined = ", ".join(f"{table} t{number}" for number in range(5))

    def count() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT COUNT(*) FROM {joined} WHERE t0.event_type <> t4.payload")

    dialect = dialect_of(connection)
    with pytest.raises(OperationalError), dialect.time_limit(0.1):
        count()
    assert OutboxEvent.objects.count() == 200
    with dialect.time_limit(60):
        assert OutboxEvent.objects.count() == 200
