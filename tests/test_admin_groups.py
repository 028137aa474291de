"""Dead events by cause: what the page shows, and what can be done about one cause."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox.admin import error_groups
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.worker.housekeeper import work_off_all
from tests.table import now
from tests.test_admin import LIST, body, checksum, listed, make, operation, visitor

pytestmark = pytest.mark.django_db

GROUPS = "admin:django_outbox_outboxevent_groups"


def rows_of(page: str) -> list[str]:
    """Return the HTML of each cause on the page."""
    return re.findall(r"<tr[^>]*>\s*<td class=.outbox-count.[^>]*>(.*?)</tr>", page, re.DOTALL)


def links_of(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r'href="([^"]+)"', text)]


def refused(count: int, host: str, **fields: Any) -> list[OutboxEvent]:
    """Insert dead events whose errors differ in numbers only."""
    return [
        make(last_error=f"OSError: {host} refused order {17 * n}, {n} s\nTraceback", **fields)
        for n in range(count)
    ]


def test_causes_of_the_last_hour_come_first_with_their_types_inside() -> None:
    clock = now()
    refused(2, "a.example", done_at=clock - timedelta(hours=3))
    refused(1, "a.example", done_at=clock - timedelta(hours=2), event_type="parcel.requested")
    refused(1, "b.example", done_at=clock)
    make(last_error=None, done_at=clock - timedelta(hours=4))
    make(Status.RETRY, last_error="OSError: a.example refused order 1, 1 s")
    rows = rows_of(body(visitor("view", "replay"), reverse(GROUPS)))
    assert [row.partition("<")[0] for row in rows] == ["1", "3", "1"]
    for part in (
        "OSError",
        "a.example refused order #",
        "Newest: a.example refused order 0, 0 s",
        "2 h ago",
        "3 h ago",
        "order.placed</a> 2",
        "parcel.requested</a> 1",
    ):
        assert part in rows[1]
    assert "b.example" in rows[0]
    assert "no error text" in rows[2]
    assert not [each for each in links_of(rows[0]) if "/discard/" in each]  # without permission


def test_the_events_of_a_cause_are_listed() -> None:
    these, other = refused(3, "a.example"), refused(1, "a.example", event_type="parcel.requested")
    refused(1, "b.example")
    client = visitor("view", "replay")
    [row, _] = rows_of(body(client, reverse(GROUPS)))
    queries = [dict(parse_qsl(urlsplit(each).query)) for each in links_of(row) if LISTED in each]
    found = [listed(client, **each) for each in queries]
    assert found == [[each.pk for each in reversed(these)], [other[0].pk]]
    page = body(client, reverse(LIST), **queries[0])
    assert "OSError: a.example refused order #" in page
    assert "/all/replay/" in page


LISTED = "outboxevent/?"


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_an_action_touches_all_events_of_one_cause_and_no_others(verb: str) -> None:
    """Although other causes have the same class and types."""
    these, others = [], []
    for _ in range(3):
        these += refused(1, "a.example") + refused(1, "a.example", event_type="parcel.requested")
        others += refused(1, "b.example")
        others.append(make(last_error="OSErrors: a.example refused order 1"))
    others.append(make(Status.RETRY, last_error=these[0].last_error))
    client = visitor("view", "replay", "discard")
    kept = OutboxEvent.objects.filter(pk__in=[each.pk for each in others])
    before = {*kept.values_list()}
    [row, *_] = rows_of(body(client, reverse(GROUPS)))
    [link] = [each for each in links_of(row) if f"/all/{verb}/" in each]
    page = client.get(link)
    text = page.content.decode()
    assert f"{verb.capitalize()} 6 deliveries?" in text
    assert "cause: OSError: a.example refused order #" in text
    assert OutboxEvent.objects.dead().count() == 12
    assert client.post(link, {"rate": ""}).status_code == 302
    work_off_all(connection)
    assert operation()[:2] == (verb, 6)
    left = OutboxEvent.objects.filter(pk__in=[each.pk for each in these])
    assert [*left.values_list("status", flat=True)] == ([0] * 6 if verb == "replay" else [])
    assert {*kept.values_list()} == before
    assert "There is nothing to do." in client.get(link).content.decode()


@pytest.mark.parametrize("digest", ["0" * 16, "a\0b", "%", "'"])
def test_a_cause_that_is_gone_or_never_was_has_no_events(digest: str) -> None:
    make()
    client, query = visitor("view", "replay"), {"state": "dead", "cause": digest}
    assert listed(client, **query) == []
    before = checksum()
    url = reverse("admin:django_outbox_outboxevent_replay_all")
    page = client.get(url, query)
    if page.status_code == 200:
        assert "There is nothing to do." in page.content.decode()
    assert checksum() == before


def test_a_page_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = visitor("view", "replay", "discard")
    assert "No event is dead." in body(client, reverse(GROUPS))
    for number, letter in enumerate("abcdefgh"):
        for _ in range(8 - number):
            make(last_error=f"E: {letter}", event_type=f"type.{number}")
        make(last_error="E: a", event_type=f"more.{number}")
    with CaptureQueriesContext(connection) as captured:
        assert len(rows_of(body(client, reverse(GROUPS)))) == 8
    assert len(captured) <= 15
    monkeypatch.setattr(error_groups, "MAX_CAUSES", 3)
    page = body(client, reverse(GROUPS))
    assert len(rows_of(page)) == 3
    assert "Further causes: 5." in page
    assert "and 4 more types" in rows_of(page)[0]
    assert rows_of(page)[0].startswith("16<")


def test_hidden_values_are_hidden_on_each_page() -> None:
    make(last_error="ValueError: password=sesam, token: 'open up' for sesam2")
    make(last_error="password: sesam")
    client = visitor("view", "replay", "discard")
    pages = [reverse(GROUPS)]
    pages += [each for each in links_of(body(client, pages[0])) if "cause=" in each]
    assert len(pages) == 7
    with override_settings(OUTBOX={"REDACT": ("password", "token")}):
        for page in pages:
            text = body(client, page)
            assert "•••" in text
            assert "password=sesam" not in text
            assert "open up" not in text
            assert not re.search('password:? *</?[a-z ="-]*>* *sesam', text)
