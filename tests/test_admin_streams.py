"""Streams in the admin: what blocks them, who may see them, how many queries that costs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.messages import get_messages
from django.test import Client, override_settings
from django.urls import reverse

from django_outbox.admin import stream_admin
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests.table import now, row
from tests.test_admin import body
from tests.test_stream_queryset import events, in_ten_minutes, put

pytestmark = pytest.mark.django_db

NEW, RETRY, DEAD = Status.NEW, Status.RETRY, Status.DEAD
LIST = "admin:django_outbox_outboxstream_changelist"
PAGE = "admin:django_outbox_outboxstream_change"
BLOCK = {"ON_DEAD": "block"}


def listed(client: Client, **query: Any) -> set[str]:
    text = body(client, reverse(LIST), **query)
    return {each.key for each in OutboxStream.objects.all() if f">{each.key}</a></th>" in text}


def blocked(key: str = "k", due: datetime | None = None, **fields: Any) -> str:
    """Create a stream whose head waits for its retry, with two events behind; return the head."""
    head, *_ = events(key, RETRY, NEW, NEW, attempts=2, **fields)
    OutboxEvent.objects.filter(pk=head).update(last_error="OSError: refused\nTraceback")
    put(key, due_at=due or in_ten_minutes())
    return head


def test_the_list_shows_blocked_streams_with_what_blocks_them(admin_client: Client) -> None:
    head = blocked(event_type="order.paid")
    for key in ("due", "idle"):
        put(key, due_at=now() if key == "due" else None)

    assert listed(admin_client) == {"k"}
    text = body(admin_client, reverse(LIST))
    assert reverse("admin:django_outbox_outboxevent_change", args=[head]) in text
    for part in ("order.paid", "OSError: refused", "outbox-retry", "in 9 min"):
        assert part in text
    assert '<td class="field-backlog">3</td>' in text
    assert "Traceback" not in text


@override_settings(OUTBOX=BLOCK)
def test_a_dead_head_that_blocks_is_shown(admin_client: Client) -> None:
    head, _ = events("k", DEAD, NEW)
    put()
    text = body(admin_client, reverse(LIST))
    assert (head in text, "not automatically" in text) == (True, True)


def test_states_can_be_chosen(admin_client: Client) -> None:
    blocked("waits")
    put("due", due_at=now())
    put("leased", due_at=in_ten_minutes(), locked_by="w1")
    put("idle")
    assert listed(admin_client, state="due") == {"due"}
    assert listed(admin_client, state="leased") == {"leased"}
    assert listed(admin_client, state="all") == {"waits", "due", "leased", "idle"}
    assert listed(admin_client, state="nonsense") == set()
    assert 'role="alert"' in body(admin_client, reverse(LIST), state="nonsense")


def test_a_stream_is_found_by_its_whole_key(admin_client: Client) -> None:
    for key in ("Order:1", "Order:12"):
        blocked(key)
    assert listed(admin_client, q="Order:1") == {"Order:1"}
    assert listed(admin_client, q="Order") == set()


def test_the_page_of_a_stream(admin_client: Client) -> None:
    blocked("shop.Order:1/2")
    text = body(admin_client, reverse(PAGE, args=[quote(":shop.Order:1/2")]))
    for part in ("shop.Order:1/2", "OSError: refused", "in 9 min"):
        assert part in text


def test_the_page_of_an_event_tells_its_place(admin_client: Client) -> None:
    """The event page shows the stream position."""
    blocked("k")
    last = OutboxEvent.objects.filter(key="k").order_by("-seq")[0]
    text = body(admin_client, reverse("admin:django_outbox_outboxevent_change", args=[last.pk]))
    assert reverse(PAGE, args=[quote(":k")]) in text
    before = [*OutboxEvent.objects.filter(key="k").order_by("seq").values_list("pk", flat=True)]
    links = [reverse("admin:django_outbox_outboxevent_change", args=[each]) for each in before]
    assert [text.count(f'href="{each}"') for each in links] == [1] * (len(links) - 1) + [0]


# --- unblocking ----------------------------------------------------------------------------------


def test_a_waiting_head_is_skipped_from_its_page_unless_a_worker_has_it(
    admin_client: Client,
) -> None:
    heads = [blocked("a"), blocked("b")]
    OutboxStream.objects.filter(stream__of_key="b").update(locked_by="w1")
    urls = [reverse("admin:django_outbox_outboxevent_skip", args=[each]) for each in heads]
    told = [
        " ".join(map(str, get_messages(admin_client.post(each).wsgi_request)))  # as confirmed
        for each in urls
    ]
    assert told[0] == "1 delivery was skipped."
    assert "0 deliveries were skipped. 1 was skipped because of its state" in told[1]
    assert [row(each).status for each in heads] == [DEAD, RETRY]
    assert [*OutboxStream.objects.due().values_list("key", flat=True)] == ["a"]
    assert [*LogEntry.objects.values_list("object_id", flat=True)] == [heads[0]]


# --- what it costs -------------------------------------------------------------------------------


def test_the_list_costs_few_queries(
    admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    for n in range(stream_admin.OutboxStreamAdmin.list_per_page + 5):
        blocked(f"k{n}")
    with django_assert_max_num_queries(15):
        body(admin_client, reverse(LIST))


def test_a_page_costs_few_queries(admin_client: Client, django_assert_max_num_queries: Any) -> None:
    head = blocked()
    with django_assert_max_num_queries(15):
        body(admin_client, reverse(PAGE, args=[quote(":k")]))
    with django_assert_max_num_queries(15):
        body(admin_client, reverse("admin:django_outbox_outboxevent_change", args=[head]))


def test_a_long_backlog_is_counted_no_further_than_its_limit(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_outbox.models.stream_queryset.MAX_BACKLOG", 2)
    monkeypatch.setattr(stream_admin, "MAX_BACKLOG", 2)
    blocked()
    assert '<td class="field-backlog">2+</td>' in body(admin_client, reverse(LIST))
