"""The search box of the event list, what it costs, and links between related events."""

from __future__ import annotations

import html
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.admin.sites import site
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings
from django.urls import reverse

from django_outbox.admin import changelist, search
from django_outbox.events import least_id
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests import table
from tests.cases import cases
from tests.table import undone
from tests.test_admin import EVIL, HOUR, LIST, PAGE, body, checksum, listed, make, visitor
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db

HIDING = {"REDACT": ["password", "x-request-id"]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
GUIDE = Path(__file__).parent.parent / "docs/how-to/find-an-event.md"


@pytest.fixture
def shop() -> dict[str, str]:
    """Insert events that differ in what a search can tell apart; return their ids by a name."""
    soon = table.now() + HOUR
    OutboxStream.objects.create(key="order-1", seq=9, due_at=soon)
    made = {
        "plain": make(Status.NEW, available_at=soon, aggregate_type="shop.Cart", aggregate_id="1"),
        "http": make(
            last_error="requests.exceptions.HTTPError: 503 for partner\nTrace",
            aggregate_type="shop.Order",
            aggregate_id="17",
            tenant_id="acme",
        ),
        "value": make(
            last_error="ValueError: no\nTrace",
            event_type="order.paid",
            aggregate_type="order",
            aggregate_id="17",
            tenant_id="two words",
        ),
        "retry": make(
            Status.RETRY, last_error="HTTPError\nTrace", available_at=soon, aggregate_id="2"
        ),
        "keyed": make(Status.RETRY, key="order-1", seq=1, available_at=None, aggregate_id="3"),
        "done": make(
            Status.DONE,
            key="order-1",
            seq=0,
            unique_key="invoice:9",
            aggregate_id="4",
            queue="mail",
            headers=f'{{"traceparent":"{PARENT}","x-request-id":"r-7"}}',
        ),
    }
    return {name: each.pk for name, each in made.items()}


@cases(
    ("text", "names"),
    [
        ("id:event-0001", "http"),
        ("unique:invoice:9", "done"),
        ("invoice:9", "done"),
        ("key:order-1", "done keyed"),
        ("order-1", "done keyed"),
        ("key:order-1 state:blocked", "keyed"),
        ("key:order-1 state:done", "done"),
        ("key:order-1 tenant:acme", ""),
        ("order:17", "value http"),
        ("ORDER:17", "value http"),
        ("shop.Order:17", "http"),
        ("aggregate:17", "value http"),
        ("aggregate:shop.Order:17", "http"),
        ("aggregate:Cart:17", ""),
        ("17", "value http"),
        ("17 state:dead tenant:acme", "http"),
        ("tenant:acme", "http"),
        ("acme", "http"),
        ('tenant:"two words"', "value"),
        ("two words", "value"),
        ('"two words"', "value"),
        ("type:order.paid", "value"),
        ("type:order.p*", "done keyed retry value http plain"),
        ("type:order.pa* tenant:acme", ""),
        ("queue:mail", "done"),
        ("state:dead", "value http"),
        ("state:retrying", "retry"),
        ("error:HTTPError", "http"),
        ("error:httperror", "http"),
        ("error:503 tenant:acme", "http"),
        ("error:HTTPError state:retrying", "retry"),
        ('error:"503 for partner"', "http"),
        (f"trace:{TRACE}", "done"),
        ("header:x-request-id=r-7", "done"),
        ("header:x-request-id=r-", ""),
        ("colour:red", ""),
        ("STATE:dead", "value http"),
        ('tenant:"a""b"', ""),
    ],
)
@undone()
def test_words_find_events(shop: dict[str, str], text: str, names: str) -> None:
    assert listed(visitor("view"), q=text) == [shop[each] for each in names.split()]


def test_a_search_and_the_filters_apply_together(shop: dict[str, str]) -> None:
    client = visitor("view")
    assert listed(client, q="tenant:acme", state="dead") == [shop["http"]]
    assert listed(client, q="tenant:acme", event_type="order.paid") == []
    assert listed(client, q="error:HTTPError", state="retrying") == [shop["retry"]]
    assert listed(client, q="key:order-1", up_to=shop["keyed"]) == [shop["keyed"]]


def test_an_error_is_searched_among_the_dead_and_the_page_says_so(shop: dict[str, str]) -> None:
    page = html.unescape(body(visitor("view", "replay"), reverse(LIST), q="error:HTTPError"))
    assert "“error:” searches dead events." in page
    assert "/all/replay/?q=error" in page  # the actions of dead events are offered


@cases(
    ("text", "fault"),
    [
        ("tennant:acme", "Did you mean “tenant:”?"),
        ("state:dead erorr:x", "Did you mean “error:”?"),
        ("tenant:", "“tenant:” has no value"),
        ("tenant: acme", "“tenant:” has no value"),
        ('tenant:"acme', "an open quote"),
        ("state:lost", "There is no state “lost”. The states are: due, leased"),
        ("state:dead state:done", "only one “state:”"),
        ("type:*", "“type:*” is not possible"),
        ("type:a*b", "“type:a*b” is not possible"),
        ("trace:abc", "“abc” is not a trace id"),
        ("header:x", "“header:x” is not possible"),
        ("header:=x", "“header:=x” is not possible"),
        ("a\0b", "a character that no event can have"),
    ],
)
@undone()
def test_what_is_not_understood_lists_nothing_and_says_why(text: str, fault: str) -> None:
    make()
    client = visitor("view", "replay")
    page = html.unescape(body(client, reverse(LIST), q=text, state="dead"))
    assert fault in page
    assert "outbox-id" not in page
    assert "/all/replay/" not in page
    before = checksum()
    url = reverse("admin:django_outbox_outboxevent_replay_all")
    assert client.post(url + f"?q={text}".replace("\0", "%00")).status_code == 302
    assert checksum() == before


def test_a_filter_that_is_not_possible_lists_nothing_and_says_which() -> None:
    make()
    for query in (
        {"state": "lost"},
        {"written": "2026-13"},
        {"no_such_field": "1"},
        {"status__exact": "x"},
        {"event_type": "a\0b"},
    ):
        page = body(visitor("view"), reverse(LIST), **query)
        [name] = query
        assert f"this filter is not possible: {name}=" in page
        assert "outbox-id" not in page


def test_markup_in_a_search_is_escaped() -> None:
    make()
    for text in (EVIL, f"state:{EVIL}", f"trace:{EVIL}", f'tenant:"{EVIL}'):
        page = body(visitor("view"), reverse(LIST), q=text)
        assert "<script>alert" not in page
        assert "<img src=x" not in page


# --- hidden values ------------------------------------------------------------------------------


@override_settings(OUTBOX=HIDING)
@cases(
    "text",
    [
        "error:password=s",
        "error:HTTPError:",
        'error:"a b"',
        "header:X-Request-ID=r-7",
        "header:x-request-id=r",
    ],
)
@undone()
def test_a_search_does_not_probe_hidden_values(text: str) -> None:
    make(last_error="HTTPError: password=s3cret", headers='{"x-request-id":"r-7"}')
    page = body(visitor("view"), reverse(LIST), q=text)
    assert "REDACT" in page
    assert "outbox-id" not in page


# --- what it costs ------------------------------------------------------------------------------

SEARCHES = [
    "17",
    "order:17",
    "key:order-1",
    "aggregate:17",
    "tenant:acme",
    "error:HTTPError",
    "state:dead type:order.*",
    f"trace:{TRACE}",
    "id:event",
    "queue:mail state:blocked",
]


@pytest.mark.parametrize("text", SEARCHES)
def test_a_search_costs_few_queries(
    shop: dict[str, str], text: str, django_assert_max_num_queries: Any
) -> None:
    client = visitor("view", "replay", "discard")
    with django_assert_max_num_queries(15):
        body(client, reverse(LIST), q=text)


def flat(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def test_more_matches_than_the_limit_are_said_and_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changelist, "MATCH_LIMIT", 2)
    events = [make(aggregate_id="17").pk for _ in range(3)]
    client = visitor("view")
    assert listed(client, q="17") == events[:0:-1]
    page = body(client, reverse(LIST), q="17")
    assert "Only the newest 2 events that match were searched." in page
    assert listed(client, q="17", up_to=events[0]) == events[:1]


# --- related events -----------------------------------------------------------------------------


def related(client: Client, event: OutboxEvent) -> dict[str, str]:
    page = body(client, reverse(PAGE, args=[event.pk]))
    block = re.search(r'<ul class="outbox-related">(.*?)</ul>', page, re.DOTALL)
    found = re.findall(r'<a href="([^"]+)">([^<]+)</a>', block[1]) if block else []
    return {html.unescape(label): html.unescape(url) for url, label in found}


def follow(client: Client, url: str) -> list[str]:
    return listed(client, **flat(url))


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


def test_an_event_leads_to_the_events_of_its_trace_and_request() -> None:
    at = datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)
    headers = (
        f'{{"traceparent":"{PARENT}","log.request":"r 7","region":"eu","X-Correlation-ID":""}}'
    )
    ids = [least_id(at)[:10] + tail * 16 for tail in "AB"]
    first, _second = (make(event_id=each, headers=headers, aggregate_id=None) for each in ids)
    make(event_id=least_id(at + 3 * HOUR)[:10] + "C" * 16, headers=headers)
    make(event_id=least_id(at)[:10] + "D" * 16, headers=headers.replace("r 7", "r 8"))
    client = visitor("view")
    links = related(client, first)
    assert [*links] == [
        f"Events of the same hour with {text}" for text in (f"trace {TRACE}", "log.request r 7")
    ]
    assert follow(client, links["Events of the same hour with log.request r 7"]) == ids[::-1]
    assert len(follow(client, links[f"Events of the same hour with trace {TRACE}"])) == 3
    with override_settings(OUTBOX={"REDACT": ["traceparent", "log.request"]}):
        assert related(client, first) == {}
    make(event_id=ids[0][:10] + "E" * 16, headers="{", aggregate_id=None)


def test_an_event_leads_to_its_object_if_the_user_may_see_it(admin_user: User) -> None:
    order = Permission.objects.get(codename="view_permission")
    event = make(aggregate_type="auth.User", aggregate_id=str(admin_user.pk))
    client = visitor("view")
    label = f"Object auth.User {admin_user.pk}"
    assert label not in related(client, event)
    boss = Client()
    boss.force_login(admin_user)
    assert boss.get(related(boss, event)[label]).status_code == 200
    for kind in (
        "auth.user",
        "auth.Nothing",
        "no.Model",
        "User",
        order._meta.label,
        "a.b.c",
        ".",
        Order._meta.label,
    ):
        links = related(boss, make(aggregate_type=kind, aggregate_id="1"))
        assert not any(each.startswith("Object") for each in links), kind
    assert site.is_registered(User)


def test_the_page_of_an_event_costs_few_queries(django_assert_max_num_queries: Any) -> None:
    event = make(key="k", seq=1, headers=f'{{"traceparent":"{PARENT}"}}')
    OutboxStream.objects.create(key="k", seq=1)
    client = visitor("view", "replay", "discard")
    with django_assert_max_num_queries(15):
        body(client, reverse(PAGE, args=[event.pk]))


def test_every_word_has_an_example_that_works() -> None:
    for name, word in search.WORDS.items():
        assert word.example.startswith(f"{name}:")
        search.parse(word.example)
    assert {*re.findall(r"^\| `(\w+):", GUIDE.read_text(), re.MULTILINE)} == {*search.WORDS}
