"""Queues in the admin: columns and filters of the lists, and the table on the dashboard."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from django_outbox.models import OutboxPause, OutboxStream
from tests import test_admin, test_dashboard
from tests.table import insert, keyed, listening, now
from tests.test_queue_status import breaker, serving

pytestmark = pytest.mark.django_db

EVENTS = "admin:django_outbox_outboxevent_changelist"


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}


def body(client: Client, page: str, **query: str) -> str:
    return test_admin.body(client, reverse(page), **query)


def offered(text: str) -> list[str]:
    """Return the queues that the filter offers."""
    return re.findall(r'href="\?[^"]*\bqueue=([\w.]+)', text)


def cells(text: str) -> list[str]:
    return re.findall(r'<td class="field-queue">([^<]*)</td>', text)


def in_both() -> None:
    insert(2, queue="hooks")
    insert(1)
    for key, queue in (("a", "hooks"), ("b", "default")):
        keyed(key, queue=queue)
        OutboxStream.objects.filter(stream__of_key=key).update(queue=queue)


# --- lists ----------------------------------------------------------------------------------------


def test_the_event_list_shows_and_filters_queues(admin_client: Client) -> None:
    in_both()
    text = body(admin_client, EVENTS)
    assert sorted(cells(text)) == ["default"] * 2 + ["hooks"] * 3
    assert offered(text) == ["default", "hooks"]
    assert cells(body(admin_client, EVENTS, queue="hooks")) == ["hooks"] * 3
    assert cells(body(admin_client, EVENTS, queue="hooks", state="due")) == ["hooks"] * 2
    assert cells(body(admin_client, EVENTS, queue="nowhere")) == []


@pytest.mark.parametrize("page", ["event", "stream"])
def test_a_page_shows_the_queue(admin_client: Client, page: str) -> None:
    [event_id] = keyed("k", queue="hooks")
    OutboxStream.objects.update(queue="hooks")
    url = reverse(
        f"admin:django_outbox_outbox{page}_change", args=[":k" if page == "stream" else event_id]
    )
    text = admin_client.get(url).content.decode()
    assert re.search(r'field-queue.*?<div class="readonly">hooks</div>', text, re.DOTALL)


def test_with_one_queue_neither_column_nor_filter_is_there(
    admin_client: Client, settings: Any
) -> None:
    settings.OUTBOX = {}
    in_both()
    text = body(admin_client, EVENTS, state="due")
    assert (cells(text), offered(text)) == ([], [])


def test_a_queue_that_no_database_can_hold_is_refused(admin_client: Client) -> None:
    page = body(admin_client, EVENTS, queue="a\0b")
    assert "this filter is not possible: queue=" in page


@pytest.mark.parametrize("kind", ["queue", "breaker"])
def test_due_events_of_a_closed_queue_are_shown_as_paused(admin_client: Client, kind: str) -> None:
    insert(2, queue="hooks")
    insert(1)
    insert(1, due=-60, queue="paused:7")  # parked by a pause of its type
    insert(1, queue="hooks", due=60, locked_by="w1", locked_at=now())
    assert cells(body(admin_client, EVENTS, state="paused")) == ["paused:7"]
    if kind == "queue":
        OutboxPause.objects.pause("queue", "hooks")
    else:
        breaker()
    assert cells(body(admin_client, EVENTS, state="paused")) == ["paused:7", "hooks", "hooks"]
    assert cells(body(admin_client, EVENTS, state="paused", queue="hooks")) == ["hooks"] * 2


# --- dashboard ------------------------------------------------------------------------------------


def queues(client: Client) -> str:
    return test_dashboard.part(test_dashboard.body(client), "queues")


def test_the_dashboard_shows_what_each_queue_does(admin_client: Client) -> None:
    insert(2, queue="hooks", due=-90)
    serving("one", "default", "hooks")
    found = queues(admin_client)
    assert "default 0 1 Pause default hooks 2 1 min 1 Pause hooks" in found


def test_the_dashboard_shows_default_and_what_is_not_configured(
    admin_client: Client, settings: Any
) -> None:
    settings.OUTBOX = {}
    insert(2)
    assert "default no live worker serves it 2" in queues(admin_client)
    insert(1, queue="gone")
    assert "not in OUTBOX[&quot;QUEUES&quot;]" in test_dashboard.body(admin_client)


def test_a_queue_with_due_events_that_no_worker_serves_is_a_problem(admin_client: Client) -> None:
    serving("one", "default")
    insert(1, queue="hooks", due=60)
    assert test_dashboard.verdict(test_dashboard.body(admin_client)) == ["All is well"]
    assert "no live worker serves it" in queues(admin_client)
    insert(2, queue="hooks")
    with listening(lambda event: None):
        text = test_dashboard.body(admin_client)
    assert SAYS in test_dashboard.verdict(text)[1]
    assert "queues" in test_dashboard.order(text)[:3]
    serving("two", "hooks")
    assert SAYS not in test_dashboard.body(admin_client)


SAYS = "No live worker serves queue"


def test_a_queue_that_is_not_configured_is_a_problem_only_without_default(
    admin_client: Client,
) -> None:
    insert(2, queue="gone")
    serving("one", "hooks")
    assert SAYS in test_dashboard.body(admin_client)
    serving("two", "default")
    assert SAYS not in test_dashboard.body(admin_client)


def test_without_any_worker_that_alone_is_the_problem(admin_client: Client) -> None:
    insert(2, queue="hooks")
    assert SAYS not in test_dashboard.body(admin_client)


def test_the_dashboard_shows_closed_queues(admin_client: Client) -> None:
    serving("one", "default", "hooks")
    OutboxPause.objects.pause("queue", "default")
    breaker(reason="<b>5</b> failures")
    found = queues(admin_client)
    assert "default paused 0 1 hooks paused 0 1" in found
    assert "&lt;b&gt;5&lt;/b&gt; failures" in test_dashboard.body(admin_client)
