"""The admin's search on each database: whole classes of errors, and the indexes that help."""

from __future__ import annotations

import html
import re

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox.admin import changelist
from django_outbox.events import least_id
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from tests import plans, table
from tests.cases import cases
from tests.table import undone
from tests.test_admin import HOUR, LIST, NOW, body, listed, make, visitor
from tests.test_admin_search import GUIDE, HIDING, flat

pytestmark = pytest.mark.django_db


@override_settings(OUTBOX=HIDING)
@cases(
    ("text", "is_found"),
    [
        ("error:HTTPError", True),
        ("error:requests.HTTPError", True),
        ("error:httperror", True),
        ("error:HTTP", False),
        ("error:Error", False),
        ("error:requests", False),
        ("error:s3cret", False),
        ("error:a.s3cret", False),
    ],
)
@cases("tail", [": password=.s3cret", "\nTrace: a.s3cret: b", ""])
@undone()
def test_a_search_finds_only_the_whole_class_of_an_error(
    text: str, is_found: bool, tail: str
) -> None:
    event = make(last_error=f"requests.HTTPError{tail}")
    assert listed(visitor("view"), q=text) == [event.pk] * is_found


def test_what_no_index_finds_is_searched_among_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says the bound, names the index that would help, and links to older events."""
    monkeypatch.setattr(changelist, "SCAN_LIMIT", 2)
    events = [make(aggregate_id="17", tenant_id="acme").pk for _ in range(4)]
    client = visitor("view")
    for text, index in (
        ("17", "outbox_event_aggregate"),
        ("order:17", "outbox_event_aggregate"),
        ("tenant:acme", "outbox_event_tenant"),
    ):
        page = html.unescape(body(client, reverse(LIST), q=text))
        assert "Only the newest 2 events were searched." in page
        assert f"INDEX {index} ON" in page.replace("CONCURRENTLY ", "")
        older = re.search(r'href="(\?[^"]*up_to=[^"]*)"', page)
        assert older is not None
        assert listed(client, q=text) == events[:1:-1]
        assert listed(client, **flat(older[1])) == events[1::-1]


def test_an_index_finds_unfinished_events_of_a_key_however_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changelist, "SCAN_LIMIT", 2)
    old = [
        make(each, key="k", seq=n, available_at=None)
        for n, each in enumerate((Status.DEAD, Status.RETRY, Status.DONE))
    ]
    for _ in range(3):
        make()
    dead, retry, done = (each.pk for each in old)
    client = visitor("view")
    has_all = "key" in dialect_of(connection).indexed_columns(connection)
    for text in ("key:k", "k"):
        assert listed(client, q=text) == [done, retry, dead][0 if has_all else 1 :]
    assert listed(client, q="key:k state:dead") == [dead]
    page = body(client, reverse(LIST), q="key:k")
    assert ("were searched" in page) is not has_all


def statements() -> dict[str, list[str]]:
    """Return the statements of the guide by database."""
    block = re.compile(r"^(\S[^\n]*):\n\n```sql\n(.*?)```", re.MULTILINE | re.DOTALL)
    blocks = block.findall(GUIDE.read_text())
    return {title: re.findall(r"CREATE.*?;", text, re.DOTALL) for title, text in blocks}


@pytest.mark.django_db(transaction=True)
def test_the_documented_indexes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, old events are found, nothing is left out, and the page suggests no index."""
    monkeypatch.setattr(changelist, "SCAN_LIMIT", 2)
    titles = {"postgresql": "PostgreSQL", "mysql": "MySQL and MariaDB", "sqlite": "SQLite"}
    wanted = statements()[titles[connection.vendor]]
    offered = [
        dialect_of(connection).create_index_statement(connection, *each)
        for each in changelist.INDEXES.values()
    ]
    assert {" ".join(each.split()) for each in wanted} == {*offered}
    old = make(
        Status.DONE,
        event_id=least_id(NOW - 9 * HOUR),
        aggregate_id="171",
        tenant_id="acme",
        key="k",
        seq=1,
    ).pk
    table.insert(300, event_type="filler")
    client = visitor("view")
    searches = "aggregate:171", "order:171", "171", "key:k", "tenant:acme"
    assert all(listed(client, q=each) == [] for each in searches if "k" not in each)
    try:
        with connection.cursor() as cursor:
            for each in wanted:
                cursor.execute(each)
        plans.analyze(OutboxEvent)  # SQLite may remember the table of another test
        for each in searches:
            assert listed(client, q=each) == [old], each
        for each in searches[:1] + searches[3:]:
            page = body(client, reverse(LIST), q=each)
            assert "were searched" not in page, each
            assert "CREATE INDEX" not in page, each
        with CaptureQueriesContext(connection) as sent:
            listed(client, q="aggregate:171")
        [sql] = [
            q["sql"]
            for q in sent.captured_queries
            if "aggregate_id" in q["sql"].partition("WHERE")[2]
        ]
        assert uses_index("outbox_event_aggregate", sql)
    finally:
        for name, _columns in changelist.INDEXES.values():
            drop(name)


def uses_index(name: str, sql: str) -> bool:
    return any(name in str(step.values()) for step in plans.explain(sql.replace("%", "%%"), None))


def drop(name: str) -> None:
    on = " ON outbox_event" if connection.vendor == "mysql" else ""
    exists = "" if connection.vendor == "mysql" else "IF EXISTS "
    with connection.cursor() as cursor:
        cursor.execute(f"DROP INDEX {exists}{name}{on}")


def test_a_partial_index_of_other_rows_does_not_count() -> None:
    columns = dialect_of(connection).indexed_columns(connection)
    assert {"event_id", "unique_key"} <= columns
    assert not {"aggregate_id", "tenant_id"} & columns
    assert ("key" in columns) is (connection.vendor == "mysql")  # its key index has all events
