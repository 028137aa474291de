"""The admin's search on each database: how far it goes, and for how long."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import pytest
from django.db import OperationalError, connection
from django.urls import reverse

from django_outbox.admin import changelist
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from tests.table import insert
from tests.test_admin import LIST, body, listed, make, visitor

pytestmark = pytest.mark.django_db


@contextmanager
def slow() -> Iterator[None]:
    """Have the scan of the whole table take too long."""

    def execute(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if f"LIMIT {changelist.MATCH_LIMIT + 1}" in sql:
            raise OperationalError("canceling statement due to statement timeout")
        return run(sql, params, many, context)

    with connection.execute_wrapper(execute):
        yield


def older(page: str) -> dict[str, str]:
    """Return the query of the link to older events."""
    found = re.search(r'href="\?([^"]*up_to=[^"]*)"', page)
    assert found is not None
    return dict(parse_qsl(html.unescape(found[1])))


@pytest.mark.parametrize("query", [{"q": "17"}, {"event_type": "a"}, {"attempts": "9"}])
def test_what_no_index_finds_in_time_is_searched_among_the_newest(
    query: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says the bound and links to older events."""
    monkeypatch.setattr(changelist, "SCAN_LIMIT", 4)
    match = {"aggregate_id": "17", "event_type": "a", "attempts": 9}
    other = {"aggregate_id": "1", "event_type": "b"}
    events = [make(**(match if n % 2 else other)).pk for n in range(8)]
    client = visitor("view")
    assert listed(client, **query) == events[7:0:-2]
    with slow():
        page = body(client, reverse(LIST), **query)
        assert "Only the newest 4 deliveries were searched." in page
        assert listed(client, **query) == [events[7], events[5]]
        assert listed(client, **older(page)) == [events[3], events[1]]
        assert "were searched" not in body(client, reverse(LIST), **older(page))


def test_more_matches_than_the_limit_are_said_and_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changelist, "MATCH_LIMIT", 2)
    events = [make(aggregate_id="17").pk for _ in range(3)]
    client = visitor("view")
    assert listed(client, q="17") == events[:0:-1]
    page = body(client, reverse(LIST), q="17")
    assert "Only the newest 2 deliveries that match are listed." in page
    assert listed(client, **older(page)) == events[:1]


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
