"""The search box of the event list, what it costs, and links between related events."""

from __future__ import annotations

import html
import re
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.contrib.admin.sites import site
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.cases import cases
from tests.table import siblings, undone
from tests.test_admin import LIST, PAGE, body, checksum, listed, make, visitor
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


@cases(
    ("text", "names"),
    [
        ("event-0001", "paid"),
        (" event-0001 ", "paid"),
        ("EVENT-0001", ""),
        ("event-000", ""),
        ("invoice:9", "done"),
        ("order-1", "done"),
        ("17", "done paid"),
        ("17 acme", "paid"),
        ("acme", "paid"),
        ('"two words"', "done"),
        ("two", ""),
        ("%", ""),
        ("", "done paid"),
    ],
)
@undone()
def test_whole_words_find_events(text: str, names: str) -> None:
    made = {
        "none": make(Status.NEW, aggregate_id="1", tenant_id="other"),
        "paid": make(aggregate_id="17", tenant_id="acme"),
        "done": make(
            Status.DONE,
            aggregate_id="17",
            tenant_id="two words",
            key="order-1",
            seq=1,
            unique_key="invoice:9",
        ),
    }
    made["none"].delete()
    assert listed(visitor("view"), q=text) == [made[each].pk for each in names.split()]


def test_an_events_id_finds_all_its_deliveries_and_a_rows_own_that_one() -> None:
    event, _ = make(listener="order.placed"), make()
    _, mail = siblings(event.pk, "order.placed mail")
    client = visitor("view")
    assert listed(client, q=event.pk) == listed(client, q=event.pk, state="dead") == [event.pk] * 2
    assert listed(client, q=mail) == [event.pk]
    ours = make(event_id="01KAW3J5Q8ZV7N2M4X6R9T0BCD")
    for text in (ours.pk, ours.pk.lower(), f" {ours.pk.title()} "):
        assert listed(client, q=text) == [ours.pk]
    twin = make(event_id=ours.pk.lower())
    assert listed(client, q=twin.pk) == [twin.pk]
    assert reverse(PAGE, args=[quote(mail)]) in body(client, reverse(LIST), q=mail)


def test_a_search_and_the_filters_apply_together() -> None:
    dead, done = make(tenant_id="acme"), make(Status.DONE, tenant_id="acme")
    client = visitor("view")
    assert listed(client, q="acme", state="dead") == [dead.pk]
    assert listed(client, q="acme", event_type="order.paid") == []
    assert listed(client, tenant_id="acme") == [done.pk, dead.pk]


@cases(
    "query",
    [
        {"q": "a\0b"},
        {"state": "lost"},
        {"written": "2026-13"},
        {"no_such_field": "1"},
        {"status__exact": "x"},
        {"event_type": "a\0b"},
    ],
    ids="".join,
)
@undone()
def test_what_is_not_possible_lists_nothing_and_says_why(query: dict[str, str]) -> None:
    make()
    before, client = checksum(), visitor("view", "replay")
    page = html.unescape(body(client, reverse(LIST), **query))
    assert 'role="alert"' in page
    assert "outbox-id" not in page
    assert "/all/replay/" not in page
    url = reverse("admin:django_outbox_outboxevent_replay_all")
    assert client.post(f"{url}?{urlencode(query)}").status_code == 302
    assert checksum() == before


# --- related events -----------------------------------------------------------------------------


def related(client: Client, event: OutboxEvent) -> dict[str, str]:
    page = body(client, reverse(PAGE, args=[event.pk]))
    block = re.search(r'<ul class="outbox-related">(.*?)</ul>', page, re.DOTALL)
    found = re.findall(r'<a href="([^"]+)">([^<]+)</a>', block[1]) if block else []
    return {html.unescape(label): html.unescape(url) for url, label in found}


def follow(client: Client, url: str) -> list[str]:
    query = parse_qs(urlsplit(url).query)
    return listed(client, **{name: values[0] for name, values in query.items()})


def test_an_event_leads_to_the_events_of_its_object_and_key() -> None:
    kinds = "shop.Order", 'odd "type": x\\'
    made = [
        make(Status.DONE, aggregate_type=kind, aggregate_id="17 b", key="k 1", seq=n)
        for n, kind in enumerate(kinds)
    ]
    client = visitor("view")
    for each in made:
        links = related(client, each)
        assert follow(client, links[f"Events of {each.aggregate_type} 17 b"]) == [each.pk]
        assert follow(client, links["Events of key k 1"]) == [e.pk for e in reversed(made)]
    assert related(client, make(aggregate_type="__GLOBAL__", aggregate_id=None)) == {}


def test_an_event_leads_to_its_object_if_the_user_may_see_it(
    admin_client: Client, admin_user: User
) -> None:
    order = Permission.objects.get(codename="view_permission")
    event = make(aggregate_type="auth.User", aggregate_id=str(admin_user.pk))
    client = visitor("view")
    label = f"Object auth.User {admin_user.pk}"
    assert label not in related(client, event)
    assert admin_client.get(related(admin_client, event)[label]).status_code == 200
    unknown = "auth.user auth.Nothing no.Model User a.b.c .".split()
    for kind in (*unknown, order._meta.label, Order._meta.label):
        links = related(admin_client, make(aggregate_type=kind, aggregate_id="1"))
        assert not any(each.startswith("Object") for each in links), kind
    assert site.is_registered(User)
