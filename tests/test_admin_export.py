"""The export of the event list: what it contains, hides and defuses, and who may have it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import Any

import pytest
from django.db import connection
from django.test import AsyncClient, Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox.admin import export, state_filter
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests import table
from tests.cases import cases
from tests.table import undone
from tests.test_admin import HOUR, LIST, body, checksum, make, traces, visitor

pytestmark = pytest.mark.django_db

HIDING = {"REDACT": ["password"]}


def url_of(name: str) -> str:
    return reverse(f"admin:django_outbox_outboxevent_export_{name}")


def download(client: Client, name: str = "jsonl", **query: str) -> str:
    response = client.get(url_of(name), query)
    assert response.status_code == 200
    assert response.streaming  # type: ignore[attr-defined]
    return b"".join(response.streaming_content).decode()  # type: ignore[attr-defined]


def lines(client: Client, **query: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in download(client, **query).splitlines()]


def ids(client: Client, **query: str) -> list[str]:
    return [each["event_id"] for each in lines(client, **query)]


def test_json_lines_have_what_is_stored() -> None:
    make(payload='{"price": 1.10,\n"a": 1, "a": 2}', headers='{"region":"eu"}', tenant_id="acme")
    make(Status.NEW, payload="<xml/>")
    text = download(visitor("view"))
    plain, dead = text.splitlines()
    assert '"payload": {"price": 1.10, "a": 1, "a": 2}, "headers": {"region":"eu"}}' in dead
    assert json.loads(dead)["status"] == "DEAD"
    assert json.loads(dead)["tenant_id"] == "acme"
    assert json.loads(plain)["payload"] == "<xml/>"
    assert "tenant_id" not in json.loads(plain)


def test_csv_has_a_column_for_each_field() -> None:
    event = make(payload='{"a": "é; \\"b\\""}', last_error="ValueError: no\nTrace")
    [head, row] = csv.reader(io.StringIO(download(visitor("view"), "csv")))
    assert head == [each.name for each in OutboxEvent._meta.concrete_fields]
    cells = dict(zip(head, row, strict=True))
    assert cells["payload"] == event.payload
    assert cells["last_error"] == "ValueError: no\nTrace"
    assert (cells["status"], cells["attempts"], cells["result"]) == ("DEAD", "3", "")
    assert cells["occurred_at"] == event.occurred_at.isoformat()


@cases("text", ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1", "  =1", "\uff1d1"])
@undone()
def test_csv_has_no_formula(text: str) -> None:
    make(aggregate_id=text, last_error=text, payload=text)
    [head, row] = csv.reader(io.StringIO(download(visitor("view"), "csv"), newline=""))
    cells = dict(zip(head, row, strict=True))
    for name in ("aggregate_id", "last_error", "payload"):
        assert cells[name] == f"'{text}"


def test_a_separator_of_another_language_opens_no_cell() -> None:
    make(aggregate_id="a;=1+1")
    assert '"a;=1+1"' in download(visitor("view"), "csv")


@override_settings(OUTBOX=HIDING)
@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_hidden_values_are_not_exported(name: str) -> None:
    secret = '{"password":"s3cret","sku":"teapot"}'
    progress = '{"order.placed mail":{"state":"dead","error":"password=s3cret"}}'
    make(
        payload=secret,
        headers=secret,
        result=secret,
        progress=progress,
        last_error="HTTPError: password=s3cret",
    )
    make(payload="s3cret{", headers="s3cret", last_error=None)
    text = download(visitor("view"), name)
    assert "s3cret" not in text
    assert text.count("teapot") == 3
    assert "HTTPError: password=•••" in text


def test_the_export_is_of_what_is_filtered_and_reads_beyond_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "PAGE_SIZE", 2)
    monkeypatch.setattr(state_filter, "DEAD_LIMIT", 1)
    dead = [make(event_type="a").pk for _ in range(5)]
    done = make(Status.DONE, event_type="a").pk
    make(event_type="b")
    client = visitor("view")
    assert ids(client, event_type="a") == [done, *dead[::-1]]
    assert ids(client, event_type="a", state="dead") == dead[::-1]
    assert ids(client, q="type:a state:dead", p="9", o="1") == dead[::-1]
    assert ids(client, q="id:event-0003") == [dead[3]]
    assert ids(client, q="no such event") == []
    page = body(client, reverse(LIST), q="type:a", state="dead")
    assert f'href="{url_of("csv")}?q=type%3Aa&amp;state=dead"' in page


def test_the_export_has_the_state_that_the_list_shows() -> None:
    soon = table.now() + HOUR
    OutboxStream.objects.create(key="k", seq=2, due_at=soon)
    made = {
        "retrying": make(Status.RETRY, available_at=soon).pk,
        "scheduled": make(Status.NEW, available_at=soon).pk,
        "leased": make(Status.NEW, available_at=soon, locked_by="w").pk,
        "due": make(Status.NEW).pk,
        "blocked": make(Status.RETRY, key="k", seq=1, available_at=None).pk,
        "done": make(Status.DONE).pk,
    }
    client = visitor("view")
    assert {each: ids(client, state=each) for each in made} == {n: [pk] for n, pk in made.items()}


def test_a_bad_filter_exports_nothing() -> None:
    make()
    client = visitor("view")
    for query in ({"state": "lost"}, {"q": "tennant:x"}, {"last_error__regex": "("}):
        response = client.get(url_of("csv"), query)
        assert response.status_code == 302
        assert next(iter(query)) in response.url


def test_the_export_reads_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGE_SIZE", 3)
    table.insert(10)
    response = visitor("view").get(url_of("jsonl"))
    with CaptureQueriesContext(connection) as sent:
        content = iter(response)
        next(content)  # the heading, here without text
        assert next(content).count(b"\n") == 3
        assert len(sent) == 1
        assert b"".join(content).count(b"\n") == 7
    assert len(sent) == 5  # the last page is empty
    assert all("LIMIT 3" in each["sql"] for each in sent.captured_queries)


@pytest.mark.parametrize("name", export.FORMATS)
def test_only_who_may_view_events_may_export_them(name: str) -> None:
    make()
    before = checksum()
    assert Client().get(url_of(name)).status_code == 302
    assert visitor("view", is_staff=False).get(url_of(name)).status_code == 302
    assert visitor().get(url_of(name)).status_code == 403
    assert visitor("replay", "discard").get(url_of(name)).status_code == 403
    response = visitor("view").get(url_of(name))
    assert response["Content-Disposition"].startswith('attachment; filename="outbox-events-')
    assert response["Content-Disposition"].endswith(f'.{name}"')
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "no-store" in response["Cache-Control"]
    assert (checksum(), traces()) == (before, [])


def test_under_asgi_the_export_is_streamed_too() -> None:
    """Django would otherwise read all of it into memory, with a warning, which fails the test."""
    event = make()
    client = visitor("view")
    asked = AsyncClient()
    asked.cookies = client.cookies

    async def fetch() -> bytes:
        response = await asked.get(url_of("jsonl"))
        assert response.is_async  # type: ignore[attr-defined]
        return b"".join([each async for each in response.streaming_content])  # type: ignore[attr-defined]

    assert event.pk.encode() in in_loop(fetch())


def in_loop(coroutine: Any) -> Any:
    from asgiref.sync import async_to_sync

    async def run() -> Any:
        return await coroutine

    assert asyncio.iscoroutine(coroutine)
    return async_to_sync(run)()
