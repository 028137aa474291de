"""Events in the admin: permissions, actions, what the pages show, and their number of queries."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote_plus, urlencode, urljoin, urlsplit

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.urls import reverse

import django_outbox as outbox
from django_outbox.admin import changelist, display, list_filters
from django_outbox.admin.event_admin import OutboxEventAdmin
from django_outbox.events import least_id, stream_of
from django_outbox.inspection.fate import fate_of
from django_outbox.listeners import registry
from django_outbox.listeners.history import normalised
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation
from django_outbox.worker.housekeeper import work_off_all
from tests import table
from tests.browser import scene
from tests.cases import cases
from tests.table import undone

pytestmark = pytest.mark.django_db

LIST = "admin:django_outbox_outboxevent_changelist"
PAGE = "admin:django_outbox_outboxevent_change"
STREAMS = "admin:django_outbox_outboxstream_changelist"
NOW = datetime.now(timezone.utc)
HOUR = timedelta(hours=1)
VERBS = ("replay", "discard")


def make(status: Status = Status.DEAD, **fields: Any) -> OutboxEvent:
    """Insert an event in the state that the engine would leave it in."""
    finished = status in (Status.DONE, Status.DEAD)
    values: dict[str, Any] = {
        "event_id": f"event-{OutboxEvent.objects.count():04}",
        "event_type": "order.placed",
        "aggregate_type": "shop.Order",
        "aggregate_id": "17",
        "payload": '{"sku":"teapot"}',
        "occurred_at": NOW,
        "created_at": NOW,
        "first_due_at": NOW,
        "available_at": None if finished else NOW,
        "done_at": NOW if finished else None,
        "attempts": 3 if status in (Status.DEAD, Status.RETRY) else 0,
        "last_error": "ValueError: no\nTraceback" if status == Status.DEAD else None,
    }
    values |= fields
    values.setdefault("id", values["event_id"])
    if (key := values.get("key")) is not None:
        values.setdefault("stream", stream_of("", key))
    return OutboxEvent.objects.create(
        status=status, cause=normalised(values["last_error"]) or None, **values
    )


def visitor(*codenames: str, is_staff: bool = True, **options: Any) -> Client:
    """Return the client of a user with these permissions, on events unless they say what on."""
    user = User.objects.create_user(f"user-{User.objects.count()}", is_staff=is_staff)
    wanted = [each if "_" in each else f"{each}_outboxevent" for each in codenames]
    found = Permission.objects.filter(codename__in=wanted, content_type__app_label="django_outbox")
    assert len(found) == len(wanted)
    user.user_permissions.set(found)
    client = Client(**options)
    client.force_login(user)
    return client


def act(client: Client, verb: str, *events: OutboxEvent | str, **more: Any) -> Any:
    """Select the events in the list, run the action, and confirm it."""
    ids = [getattr(event, "pk", event) for event in events]
    return tick(client, verb, *ids, outbox_confirmed="yes", **more)


def tick(client: Client, verb: str, *ids: str, **more: Any) -> Any:
    """Select the events in the list and run the action, which asks for confirmation."""
    data = {"action": verb, "_selected_action": ids, "index": "0", "select_across": "0", **more}
    return client.post(reverse(LIST), data)


def say_yes(client: Client, page: Any) -> Any:
    """Submit the form of a confirmation page."""
    text = page.content.decode()
    fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', text)
    data: dict[str, list[str]] = {}
    for name, value in fields:
        data.setdefault(html.unescape(name), []).append(html.unescape(value))
    assert data, text
    return client.post(page.wsgi_request.get_full_path(), data)


def press(client: Client, verb: str, event_id: str) -> Any:
    """Press the button on the page of the event."""
    return client.post(url_of(verb, event_id))


def url_of(verb: str, event_id: str) -> str:
    return reverse(f"admin:django_outbox_outboxevent_{verb}", args=[event_id])


def said(response: Any) -> str:
    return " ".join(str(message) for message in get_messages(response.wsgi_request))


def body(client: Client, url: str, **query: Any) -> str:
    response = client.get(url, query)
    assert response.status_code == 200, response
    return response.content.decode()


def listed(client: Client, **query: Any) -> list[str]:
    """Return the ids in the list, in its order."""
    return re.findall(
        r'<span class="outbox-id" dir="ltr">([^<]+)</span>', body(client, reverse(LIST), **query)
    )


def checksum() -> str:
    """Return a digest of every column of every row."""
    rows = OutboxEvent.objects.order_by("pk").values_list()
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()


def traces() -> list[tuple[str, int]]:
    return sorted(LogEntry.objects.values_list("object_id", "action_flag"))


def operation() -> tuple[str, int, str]:
    """Return what the one operation in the log is, how many it changed, and which."""
    return OutboxOperation.objects.values_list("kind", "done", "about").get()


# --- who may do what ----------------------------------------------------------------------------

ACTORS: dict[str, Callable[[str], Client]] = {
    "anonymous": lambda verb: Client(),
    "no staff": lambda verb: visitor("view", verb, is_staff=False),
    "no permission": lambda verb: visitor(),
    "view only": lambda verb: visitor("view"),
    "edit only": lambda verb: visitor("view", "change", "delete", "add"),
    "without view": visitor,
    "other verb": lambda verb: visitor("view", *(each for each in VERBS if each != verb)),
    "permitted": lambda verb: visitor("view", verb),
}
WAYS: dict[str, Callable[[Client, str, OutboxEvent], Any]] = {
    "action by POST": act,
    "action by GET": lambda client, verb, event: client.get(
        reverse(LIST), {"action": verb, "_selected_action": event.pk, "index": "0"}
    ),
    "button by POST": lambda client, verb, event: press(client, verb, event.pk),
    "button by GET": lambda client, verb, event: client.get(url_of(verb, event.pk)),
    "button by PUT": lambda client, verb, event: client.put(url_of(verb, event.pk)),
}


@cases("way", WAYS)
@cases("actor", ACTORS)
@cases("verb", VERBS)
@undone()
def test_only_a_permitted_post_changes_a_row(verb: str, actor: str, way: str) -> None:
    event = make()
    before = checksum()
    response = WAYS[way](ACTORS[actor](verb), verb, event)
    if actor == "permitted" and way.endswith("POST"):
        assert not OutboxEvent.objects.dead().exists()
        assert traces() == [(event.pk, CHANGE if verb == "replay" else DELETION)]
        return
    assert checksum() == before
    assert traces() == []
    if way.startswith("button"):
        allowed = 200 if actor == "permitted" else 403
        expected = 302 if actor in ("anonymous", "no staff") else allowed
        assert response.status_code == (
            405 if way.endswith("PUT") and expected != 302 else expected
        )


@pytest.mark.parametrize("actor", ["view only", "edit only", "permitted", "boss"])
def test_nothing_can_be_added_edited_or_deleted(actor: str, admin_client: Client) -> None:
    event = make()
    before = checksum()
    client = admin_client if actor == "boss" else ACTORS[actor]("replay")
    add = reverse("admin:django_outbox_outboxevent_add")
    delete = reverse("admin:django_outbox_outboxevent_delete", args=[event.pk])
    change = reverse(PAGE, args=[event.pk])
    for url in (add, delete):
        assert client.get(url).status_code == 403
    for url in (add, delete, change):
        assert client.post(url, {"event_type": "x", "post": "yes"}).status_code == 403
    act(client, "delete_selected", event, post="yes")
    assert checksum() == before
    assert 'name="_save"' not in body(client, change)
    assert 'name="event_type"' not in body(client, change)


def test_offers_what_the_visitor_may_do() -> None:
    event, done = make(), make(Status.DONE)
    page = reverse(PAGE, args=[event.pk])
    for codenames in ((), ("replay",), ("discard",), VERBS):
        client = visitor("view", *codenames)
        found = body(client, reverse(LIST), state="dead"), body(client, page)
        for verb in VERBS:
            assert (f'<option value="{verb}">' in found[0]) is (verb in codenames)
            assert (f"/all/{verb}/" in found[0]) is (verb in codenames)
            assert (url_of(verb, event.pk) in found[1]) is (verb in codenames)
        assert f"/{done.pk}/replay/" not in body(client, reverse(PAGE, args=[done.pk]))


def test_a_get_of_every_page_changes_nothing(admin_client: Client) -> None:
    """A GET of every link, form and button of the admin changes no row and logs nothing."""
    for status in Status:
        make(status)
    make(Status.RETRY, locked_by="worker", available_at=NOW + timedelta(hours=1))
    act(admin_client, "replay", make())
    before, logged = checksum(), traces()
    seen = crawl(admin_client, "/admin/")
    paths = {urlsplit(url).path for url in seen}
    assert {url_of(verb, "event-0003") for verb in VERBS} <= paths
    assert any("state=dead" in url for url in seen)
    assert (checksum(), traces()) == (before, logged)


def test_markup_is_escaped_on_every_page(admin_client: Client) -> None:
    """Every text column of every table has it, also as a key of JSON."""
    scene.evil(EVIL)
    starts = [f"{reverse(LIST)}?{urlencode({'q': EVIL})}", f"{reverse(STREAMS)}?state=all"]
    found = {
        url: page
        for start in ("/admin/", *starts)
        for url, page in crawl(admin_client, start).items()
    }
    for url, page in found.items():
        for bad in ("<script>alert", "<img src=x", "</pre><script"):
            assert bad not in page, url
    paths = " ".join(found)
    for part in ("/replay/", "/groups/", "/all/", "outboxstream/", "outboxpause/", "statistics/"):
        assert part in paths


def crawl(client: Client, *starts: str, root: str = "/admin/") -> dict[str, str]:
    """Get every page of the admin that is linked to, once, and return them by their URLs."""
    waiting, seen, places = [*starts], dict[str, str](), {*starts}
    while waiting:
        url = waiting.pop()
        response = client.get(url, follow=True)
        assert response.status_code in (200, 403, 405), url
        seen[url] = response.content.decode()
        links = re.findall(r'(?:href|action|formaction)="([^"]*)"', seen[url])
        for link in (urljoin(url, html.unescape(each)).partition("#")[0] for each in links):
            # The link back and the sort order of a list do not make a different page.
            place = re.sub(r"(?<=[?&])(_changelist_filters|next|o)=[^&]*&?", "", link)
            # One page of each foreign list, one value of a filter, one filter at a time.
            if "/auth/" in place or "/all/" in place:
                place = urlsplit(place).path
            if place.count("=") > 1:
                continue
            place = re.sub(r"(event_type|listener|written)=.*", r"\1", place)
            if place.startswith(root) and "logout" not in place and place not in places:
                waiting.append(link)
                places.add(place)
    return seen


# --- replay and discard -------------------------------------------------------------------------


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[outbox.Event], Any]], None]]:
    """Register listeners of ``order.placed``; remove them at the end."""
    calls: list[Callable[..., Any]] = []

    def register(call: Callable[[outbox.Event], Any]) -> None:
        outbox.listener("order.placed", retry=outbox.Fixed(delay=0, max_attempts=1))(call)
        calls.append(call)

    yield register
    for call in calls:
        registry.remove(call)


@pytest.mark.parametrize("way", ["action by POST", "button by POST"])
def test_a_replayed_event_is_delivered_as_if_new(listen: Any, way: str) -> None:
    """A dead event that is replayed in the admin is delivered, and its attempts start at zero."""
    seen: list[outbox.Event] = []
    broken = True

    def reserve(event: outbox.Event) -> None:
        seen.append(event)
        if broken:
            raise ValueError("out of stock")

    listen(reserve)
    with transaction.atomic():
        event_id = outbox.write("order.placed", {"sku": "teapot"}, headers={"region": "eu"})
    outbox.drain()
    event = OutboxEvent.objects.dead().get(pk=event_id)
    assert (event.attempts, len(seen)) == (1, 1)
    OutboxEvent.objects.update(rescues=2)
    client = visitor("view", "replay")
    page = body(client, reverse(PAGE, args=[event_id]))
    assert "ValueError: out of stock" in page
    assert "in reserve" in page  # the traceback

    broken = False
    WAYS[way](client, "replay", event)
    event.refresh_from_db()
    assert (event.status, event.attempts, event.rescues) == (Status.NEW, 0, 0)
    assert (event.done_at, event.last_error, event.locked_by) == (None, None, None)
    assert OutboxEvent.objects.due().filter(pk=event_id).exists()

    assert outbox.drain() == 1
    event.refresh_from_db()
    assert event.status == Status.DONE
    first, second = seen
    assert (second.attempts, second.event_id) == (0, first.event_id)
    assert (second.payload, second.headers) == (first.payload, first.headers)


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_done_before_a_page_has_asked(verb: str) -> None:
    """The confirmation page counts and names the events and what it leaves out; its form acts."""
    dead, done = [make() for _ in range(2)], make(Status.DONE)
    before = checksum()
    client = visitor("view", verb)
    page = tick(client, verb, *(each.pk for each in dead), done.pk, "no-such-event")
    text = html.unescape(page.content.decode())
    assert (checksum(), traces()) == (before, [])
    assert f"{verb.title()} 2 deliveries?" in text
    assert "2 of your selection are left out" in text
    assert all(each.pk in text for each in dead)
    response = say_yes(client, page)
    assert response.status_code == 302
    assert said(response).startswith("2 deliveries were")
    assert operation()[1:] == (2, ", ".join(sorted(each.pk for each in dead)))

    page = client.get(url_of(verb, make().pk))
    assert f"{verb.title()} 1 delivery?" in page.content.decode()
    assert OutboxEvent.objects.dead().count() == 1
    assert said(say_yes(client, page)).startswith("1 delivery was")
    assert not OutboxEvent.objects.dead().exists()


def test_what_waits_runs_now() -> None:
    """Scheduled and retrying events become due, attempts kept; dead and leased ones stay."""
    later = NOW + HOUR
    waiting = [make(Status.NEW, available_at=later), make(Status.RETRY, available_at=later)]
    rest = [make(), make(Status.NEW, available_at=later, locked_by="w"), make(Status.DONE)]
    client = visitor("view", "replay")
    response = say_yes(client, tick(client, "run_now", *(e.pk for e in [*waiting, *rest])))
    assert said(response) == (
        "2 deliveries were made due. 3 were skipped because of their state: 1 new, 1 done, 1 dead."
    )
    assert {e.pk for e in OutboxEvent.objects.due()} == {e.pk for e in waiting}
    assert OutboxEvent.objects.get(pk=waiting[1].pk).attempts == 3
    ids = ", ".join(each.pk for each in waiting)
    assert operation() == ("run_now", 2, ids)


def test_events_replayed_together_are_one_operation_and_one_has_an_entry_too() -> None:
    events = [make() for _ in range(3)]
    client = visitor("view", "replay")
    assert said(act(client, "replay", *events)) == "3 deliveries were replayed."
    ids = ", ".join(each.pk for each in events)
    assert operation() == ("replay", 3, ids)
    assert traces() == []
    for event in events:  # who replayed it is in its history
        assert table.history(event.pk)[-1].by == User.objects.get().username
    single = make()
    act(client, "replay", single)
    assert LogEntry.objects.get(object_id=single.pk).get_change_message() == "Replayed."
    history = reverse("admin:django_outbox_outboxevent_history", args=[single.pk])
    assert "Replayed." in body(client, history)


@pytest.mark.parametrize("verb", VERBS)
def test_only_dead_events_are_acted_upon_and_the_rest_is_counted(verb: str) -> None:
    kept = [make(status) for status in (Status.NEW, Status.DONE, Status.DONE, Status.RETRY)]
    before = checksum()
    dead = make()
    response = act(visitor("view", verb), verb, dead, *kept, "no-such-event")
    assert said(response) == (
        f"1 delivery was {'replayed' if verb == 'replay' else 'discarded'}. "
        "4 were skipped because of their state: 1 new, 2 done, 1 retry. "
        "1 was skipped because it is gone or has changed meanwhile."
    )
    OutboxEvent.objects.filter(pk=dead.pk).delete()
    assert checksum() == before
    assert [pk for pk, _flag in traces()] == [dead.pk]


def all_url(verb: str) -> str:
    return reverse(f"admin:django_outbox_outboxevent_{verb}_all")


@pytest.mark.parametrize("verb", VERBS)
def test_a_worker_acts_on_all_that_match(verb: str) -> None:
    """The page names filter and count; a yes changes no event yet, and leads to the operations."""
    these = [make(event_type="a").pk for _ in range(5)]
    others = [make(event_type="b").pk, make(Status.DONE, event_type="a").pk]
    client, before = visitor("view", verb), checksum()
    url = f"{all_url(verb)}?event_type=a&state=dead"
    page = html.unescape(body(client, url))
    assert f"{verb.title()} 5 deliveries?" in page
    assert not OutboxOperation.objects.exists()
    response = client.post(url, {"limit": "4", "rate": "100/s"})
    assert response.url == reverse("admin:django_outbox_outboxoperation_changelist")
    assert checksum() == before
    begun = OutboxOperation.objects.get()
    assert (begun.kind, begun.state, begun.matched, begun.limit) == (verb, "open", 5, 4)
    assert begun.by == User.objects.get().username
    assert begun.rate == ("100/s" if verb == "replay" else None)  # nothing else takes one
    assert "event type: a" in begun.about
    work_off_all(connection)
    changed = OutboxEvent.objects.exclude(status=Status.DEAD).exclude(pk__in=others)
    assert [each.pk for each in changed] == (these[:4] if verb == "replay" else [])
    assert {*OutboxEvent.objects.dead().values_list("pk", flat=True)} == {these[4], others[0]}


@cases(
    ("given", "told"),
    [
        ({"rate": "100"}, "100/m"),
        ({"rate": "0/s"}, "100/m"),
        ({"rate": "\0"}, ""),
        ({"limit": "0"}, ""),
        ({"limit": "x"}, ""),
    ],
)
@undone()
def test_a_rate_or_limit_that_is_none_begins_nothing(given: dict[str, str], told: str) -> None:
    make()
    page = visitor("view", "replay").post(all_url("replay"), given)
    assert page.status_code == 200
    assert 'class="errorlist"' in page.content.decode()
    assert told in page.content.decode()
    assert not OutboxOperation.objects.exists()


@pytest.mark.parametrize("query", [{"state": "lost"}, {"state": "due"}, {"cause": "0" * 16}])
def test_what_no_worker_can_work_off_is_refused(query: dict[str, str]) -> None:
    make()
    client = visitor("view", "replay")
    response = client.post(f"{all_url('replay')}?{urlencode(query)}", {"rate": ""})
    assert response.status_code == 302
    assert not OutboxOperation.objects.exists()


@pytest.mark.parametrize("query", [{}, {"q": "order-1"}, {"created_at__year": "2026"}])
def test_the_search_and_filters_by_column_are_those_of_the_worker(query: dict[str, str]) -> None:
    found, other = make(aggregate_id="order-1"), make(aggregate_id="order-2")
    OutboxEvent.objects.filter(pk=found.pk).update(created_at="2026-05-01T12:00Z")
    OutboxEvent.objects.filter(pk=other.pk).update(created_at="2025-05-01T12:00Z")
    visitor("view", "replay").post(f"{all_url('replay')}?{urlencode(query)}", {"rate": ""})
    work_off_all(connection)
    left = [each.pk for each in OutboxEvent.objects.dead()]
    assert left == ([other.pk] if query else [])


@cases("verb", VERBS)
@cases("forged", ["no-such-event", "../../x", "a\0b", "' OR 1=1 --", "%", "é" * 99])
@undone()
def test_forged_ids_change_nothing(verb: str, forged: str) -> None:
    make()
    before = checksum()
    client = visitor("view", verb)
    quoted = forged.replace("/", "_2F").replace("\0", "%00")
    assert act(client, verb, forged).status_code == 302
    assert tick(client, verb, forged).status_code == 200
    response = client.post(f"/admin/django_outbox/outboxevent/{quoted}/{verb}/")
    assert (response.status_code, response.url) == (302, reverse(LIST))
    assert client.get(f"/admin/django_outbox/outboxevent/{quoted}/change/").status_code == 302
    assert checksum() == before


@pytest.mark.parametrize("verb", VERBS)
def test_deliveries_of_one_event_are_counted_as_such(verb: str) -> None:
    """Each is named with its listener; those that are not ticked stay, and so does their event."""
    event = make(listener="order.placed")
    _, mail, audit = table.siblings(event.pk, "order.placed mail", "* audit")
    client = visitor("view", verb)
    page = tick(client, verb, event.pk, mail, audit)
    text = html.unescape(page.content.decode())
    assert f"{verb.title()} 3 deliveries of 1 event?" in text
    named = re.findall(r'<li>([^<]+) <span class="outbox-id" dir="ltr">([^<]+)</span>', text)
    assert {*named} == {
        ("order.placed", event.pk),
        ("order.placed mail", mail),
        ("order.placed → * audit", audit),
    }
    bulk = html.unescape(body(client, all_url(verb), listener="order.placed mail"))
    assert f"{verb.title()} 1 delivery?" in bulk
    assert said(say_yes(client, tick(client, verb, mail, audit))).startswith("2 deliveries were ")
    assert [each.pk for each in OutboxEvent.objects.dead()] == [event.pk]
    assert operation()[1] == 2


def test_an_id_with_a_slash_can_be_acted_upon() -> None:
    event = make(event_id="2026/01_5F?&#")
    client = visitor("view", "replay")
    page = body(client, reverse(LIST))
    link = re.search(r'<th class="field-event"><a href="([^"]+)"', page)
    assert link is not None
    found = re.search(r'outbox-replay" href="([^"]+)"', body(client, html.unescape(link[1])))
    assert found is not None
    response = say_yes(client, client.get(html.unescape(found[1])))
    assert (said(response), traces()) == ("1 delivery was replayed.", [(event.pk, CHANGE)])


def test_the_way_back_keeps_the_list_s_filters() -> None:
    event = make()
    client = visitor("view", *VERBS)
    kept = "?" + urlencode({"_changelist_filters": "state=dead"})
    page = reverse(PAGE, args=[event.pk])
    assert f'href="{url_of("discard", event.pk)}{kept}"' in body(client, page + kept)
    response = client.post(url_of("replay", event.pk) + kept)
    assert response.url == page + kept
    OutboxEvent.objects.update(status=Status.DEAD)
    response = client.post(url_of("discard", event.pk) + kept)
    assert response.url == f"{reverse(LIST)}?state=dead"


# --- what is shown ------------------------------------------------------------------------------


def test_the_list_says_what_is_stuck() -> None:
    """It has listener, id, aggregate, status, attempts, times and the error's first line."""
    error = "builtins.KeyError: 'sku'\n  File …"
    make(last_error=error, event_id="01DEAD", payload='"secret"', listener="order.placed mail")
    page = body(visitor("view"), reverse(LIST))
    row = re.search(r"<tbody>(.*)</tbody>", page, re.DOTALL)
    assert row is not None
    text = html.unescape(re.sub(r"<[^>]+>", "|", row[1]))
    for part in ("order.placed mail", "01DEAD", "shop.Order 17", "dead", "|3|", "KeyError: 'sku'"):
        assert part in text
    assert "File" not in text
    assert "secret" not in text


@cases(
    ("status", "fields", "phrase", "is_late"),
    [
        (Status.DEAD, {"done_at": NOW - timedelta(hours=3)}, "for 3 h", False),
        (Status.DONE, {"done_at": NOW - timedelta(days=9)}, "9 d ago", False),
        (Status.NEW, {"available_at": NOW - timedelta(seconds=59)}, "due for 59 s", False),
        (Status.RETRY, {"available_at": NOW - timedelta(seconds=150)}, "due for 2 min", True),
        (Status.RETRY, {"available_at": NOW + timedelta(seconds=20)}, "due in 20 s", False),
        (Status.NEW, {"available_at": None, "key": "k"}, "when its key's turn comes", False),
        (
            Status.NEW,
            {"available_at": NOW + timedelta(seconds=25), "locked_by": "worker"},
            "leased for another 25 s",
            False,
        ),
        (
            Status.NEW,
            {"available_at": NOW - timedelta(seconds=90), "locked_by": "worker"},
            "due for 1 min",
            True,
        ),
        (Status.DONE, {"done_at": None}, "", False),
    ],
)
@undone()
def test_timing(status: Status, fields: dict[str, Any], phrase: str, is_late: bool) -> None:
    shown = display.timing(fate_of(make(status, **fields), NOW, []), NOW)
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)) == phrase
    assert ("outbox-late" in shown) is is_late


def test_the_page_shows_everything_the_event_has() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=timezone.utc)
    event = make(
        Status.RETRY,
        payload='{"price":1.10,"name":"é","sku":["teapot"]}',
        headers='{"region":"eu"}',
        tenant_id="acme",
        unique_key="order-17",
        last_error="ValueError: no\nTraceback (most recent call last):\n  File",
        locked_by="host:1:abc",
        locked_at=at,
        available_at=at,
        occurred_at=at,
    )
    page = html.unescape(body(visitor("view"), reverse(PAGE, args=[event.pk])))
    for part in ('"price": 1.10,\n', '"name": "é"', '"teapot"\n', '{\n  "region": "eu"\n}'):
        assert part in page
    for part in ("acme", "order-17", "Traceback (most recent call last):\n  File", "host:1:abc"):
        assert part in page
    assert page.count("2026-01-02 08:49:05.678+05:45") == 6  # the lease accounts for two of them
    assert "<th>done</th>" not in page


@pytest.mark.parametrize("text", ['{"a":', "<xml/>", "NaN", "[" * 5000])
def test_undecodable_text_is_shown_as_it_is(text: str) -> None:
    event = make(payload=text, headers=text)
    page = html.unescape(body(visitor("view"), reverse(PAGE, args=[event.pk])))
    assert page.count(f'<pre class="outbox-text" dir="ltr">{text}</pre>') == 2


def test_long_text_is_cut_and_said_to_be() -> None:
    event = make(payload='"' + "é" * 5_000_000 + '"')
    page = body(visitor("view"), reverse(PAGE, args=[event.pk]))
    assert page.count("é") == display.MAX_TEXT_LENGTH - 1
    assert "Only the first 100000 of 5000002 characters are shown." in page


def test_the_page_of_a_delivery_shows_those_of_the_other_listeners(admin_client: Client) -> None:
    """Each with its own state, and a link to its own page, where its error is whole."""
    first = make(Status.DONE, event_id="e", listener="order.placed stock")
    error = "SMTPError: <no> answer\nTraceback"
    others = [
        make(Status.DEAD, event_id="e", id="e.1", listener="order.placed mail", last_error=error),
        make(Status.RETRY, event_id="e", id="e.2", listener="order.placed post", attempts=2),
        make(Status.NEW, event_id="e", id="e.3", listener="order.placed audit"),
    ]
    make(event_id="e1", listener="order.placed other")  # of another event, whose id begins alike
    for event in (first, *others):
        page = body(admin_client, reverse(PAGE, args=[event.pk]))
        for each in (first, *others):
            assert f'<tr><th><a href="{reverse(PAGE, args=[quote(each.pk)])}"' in page
        rows = re.findall(r"<tr><th><a .*?>order\.placed (.*?)</td></tr>", page, re.DOTALL)
        cells = [[*re.sub(r"<[^>]+>|\n", "|", row).split("|")] for row in rows]
        told = [[cell for cell in row if cell.strip()] for row in cells]
        assert [[row[0], row[1], *row[3:]] for row in told] == [
            ["stock", "done", "0"],
            ["mail", "dead", "3", "SMTPError: &lt;no&gt; answer"],
            ["post", "retrying", "2"],
            ["audit", "waiting", "0"],
        ]


def test_the_page_of_the_only_delivery_lists_no_others(admin_client: Client) -> None:
    page = body(admin_client, reverse(PAGE, args=[make(listener="order.placed mail").pk]))
    assert "order.placed mail" in page
    assert "outbox-deliveries" not in page


EVIL = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>{{ 7 }}"


# --- finding ------------------------------------------------------------------------------------


def test_newest_first_and_by_the_primary_key() -> None:
    events = [
        make(event_type=text, aggregate_id=text, attempts=n, last_error=text).pk
        for n, text in ((3, "c"), (2, "b"), (1, "a"))
    ]
    client = visitor("view", "replay")
    assert listed(client) == events[::-1]
    assert listed(client, o="1") == events
    for column in range(9):  # no other column sorts the table
        assert listed(client, o=f"-{column}") == events[::-1]


def test_when_events_were_written() -> None:
    """The last hour and the last day are ranges of the primary key."""
    clock = table.now()
    ids = [least_id(clock - age * HOUR) for age in (30, 20, 0.5)]
    for each in ids:
        make(event_id=each)
    client = visitor("view")
    assert listed(client, written="hour") == ids[2:]
    assert listed(client, written="day") == ids[:0:-1]
    assert listed(client) == ids[::-1]


def test_filter_by_type(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter offers types with listeners, recent types, and the selected one."""
    monkeypatch.setattr(list_filters, "TYPES_SCAN_LIMIT", 2)
    old, *recent = (make(event_type=f"type-{n}").pk for n in range(3))
    listen(lambda event: None)
    client = visitor("view", "replay")
    heard = {  # those of the test app and of the package, without patterns
        each.event_type for each in registry.listeners() if "*" not in each.event_type
    }
    offered = offered_types(body(client, reverse(LIST)))
    assert offered == sorted({"order.placed", "type-1", "type-2"} | heard)
    assert listed(client, event_type="type-0") == [old]
    assert "type-0" in offered_types(body(client, reverse(LIST), event_type="type-0"))
    assert listed(client, event_type="type-2") == [recent[1]]
    assert listed(client, event_type="type") == []


def test_filter_by_listener(listen: Any) -> None:
    """By the exact title, of those registered here or the selected one, with any other filter."""
    listen(lambda event: None)
    event = make(listener="order.placed", key="k", seq=1)
    mail = table.siblings(event.pk, "order.placed mail")[1]
    make(Status.DONE, listener="order.placed mailing")
    client = visitor("view", "replay")
    page = body(client, reverse(LIST))
    titles = {each.title for each in registry.listeners()}
    assert {*re.findall(r'\?listener=([^"&]+)"', page)} == {quote_plus(each) for each in titles}
    for more in ({}, {"state": "dead"}):
        found = body(client, reverse(LIST), listener="order.placed mail", **more)
        assert re.findall(r'<th class="field-event"><a href="[^"]+">([^<]+) <', found) == [
            "order.placed mail"
        ]
        assert reverse(PAGE, args=[quote(mail)]) in found
        assert "listener=order.placed+mail" in found  # the selected one is offered, too
    assert listed(client, listener="mail") == []
    page = body(client, reverse(PAGE, args=[quote(mail)]))
    assert "kind=listener&amp;name=order.placed+mail" not in page
    page = body(visitor("view", "pause_outboxpause"), reverse(PAGE, args=[quote(mail)]))
    assert "kind=listener&amp;name=order.placed+mail" in page


def offered_types(page: str) -> list[str]:
    return sorted(set(re.findall(r'\?event_type=([^"&]+)"', page)))


@cases(
    "query",
    [
        {"event_type": "a\0b"},
        {"state": "lost"},
        {"state": "dead\0"},
        {"event_type": "é" * 5000},
        {"written": "2026-01\0"},
        {"written": "٢٠٢٦-01"},
        {"status__exact": "dead"},
        {"status__exact": "9" * 30},
        {"q": "a\0b"},
        {"p": "99"},
        {"p": "x"},
        {"o": "x.-9.99"},
        {"created_at__gte": "yesterday"},
        {"no_such_field": "1"},
        {"event_type__no_such_lookup": "1"},
        {"_facets": "True"},
        {"event_type": "' OR 1=1 --"},
        {"cause": "a\0"},
        {"e": "1"},
        {"payload__regex": "("},
        {"last_error__contains": "%"},
    ],
)
@undone()
def test_forged_queries_change_nothing_and_break_nothing(query: dict[str, str]) -> None:
    make()
    before = checksum()
    client = visitor("view", *VERBS)
    for url in (reverse(LIST), all_url("replay")):
        assert client.get(url, query, follow=True).status_code == 200
    assert checksum() == before


# --- what it costs ------------------------------------------------------------------------------


def fill(count: int) -> None:
    OutboxEvent.objects.bulk_create(
        OutboxEvent(
            id=f"{n:06}",
            event_id=f"{n:06}",
            event_type="order.placed",
            payload="{}",
            status=n % 4,
            occurred_at=NOW,
            created_at=NOW,
            available_at=None if n % 2 else NOW,
        )
        for n in range(count)
    )


def test_the_list_costs_few_queries(django_assert_max_num_queries: Any) -> None:
    fill(120)
    client = visitor("view", *VERBS)
    with django_assert_max_num_queries(10) as done:
        assert len(listed(client)) == OutboxEventAdmin.list_per_page
    rows = [each["sql"] for each in done.captured_queries if "outbox_event" in each["sql"]]
    assert len(rows) == 4  # ids, count, types, page
    assert all("LIMIT" in sql or '"id" IN (' in sql for sql in rows)
    assert not any("payload" in sql or "DISTINCT" in sql for sql in rows)
    with django_assert_max_num_queries(10):  # nor do "show counts" facets add queries
        body(client, reverse(LIST), _facets="True")


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ({"state": "done"}, "status"),
        ({"q": "17"}, "aggregate_id"),
        ({"event_type": "none"}, "event_type"),
    ],
)
def test_a_short_list_is_read_once(
    query: Any, column: str, django_assert_max_num_queries: Any
) -> None:
    """Without a usable index, the table is not read a second time to count the results."""
    make()
    client = visitor("view", *VERBS)
    with django_assert_max_num_queries(12) as done:
        body(client, reverse(LIST), **query)
    conditions = [each["sql"].partition("WHERE")[2] for each in done.captured_queries]
    assert sum(column in condition for condition in conditions) == 1


def test_actions_cost_few_queries_per_batch(django_assert_max_num_queries: Any) -> None:
    fill(100)
    client = visitor("view", "replay")
    with django_assert_max_num_queries(25):
        client.post(all_url("replay"), {"rate": ""})
    with django_assert_max_num_queries(25):
        work_off_all(connection)
    assert operation()[1] == 25


def test_the_list_goes_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(120)
    client = visitor("view", "replay")
    assert "Only the first" not in body(client, reverse(LIST))
    monkeypatch.setattr(changelist, "MATCH_LIMIT", 119)
    page = body(client, reverse(LIST))
    assert "Only the first 119 that match are listed" in page
    assert len(listed(client, p="3")) == 19
    beyond = body(client, reverse(LIST), p="4")
    assert "There is no page 4 of this list." in beyond
    assert "outbox-id" not in beyond
    monkeypatch.setattr(changelist, "MATCH_LIMIT", 120)
    assert "Only the first" not in body(client, reverse(LIST))


class ReplicaRouter:
    """Reads events from a replica that lags behind (here it is empty)."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model is OutboxEvent else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "default" if model is OutboxEvent else None


@pytest.mark.django_db(databases=["default", "other"])
def test_a_replica_is_never_asked(settings: Any) -> None:
    settings.DATABASE_ROUTERS = ["tests.test_admin.ReplicaRouter"]
    event = make()
    assert not OutboxEvent.objects.exists()
    client = visitor("view", "replay")
    assert listed(client) == [event.pk]
    assert said(press(client, "replay", event.pk)) == "1 delivery was replayed."
    assert OutboxEvent.objects.using("default").get().status == Status.NEW


@pytest.mark.django_db(transaction=True)
def test_database_errors_are_raised() -> None:
    """An outage raises; it is never shown as an empty list or as nothing to do."""
    event = make()
    client = visitor("view", "replay")
    name = OutboxEvent._meta.db_table
    rename(name, "elsewhere")
    try:
        for request in (
            lambda: client.get(reverse(LIST)),
            lambda: client.get(reverse(LIST), {"status__exact": "3"}),
            lambda: client.get(reverse(PAGE, args=[event.pk])),
            lambda: act(client, "replay", event),
            lambda: press(client, "replay", event.pk),
        ):
            with pytest.raises(DatabaseError):
                request()
    finally:
        rename("elsewhere", name)
    assert traces() == []


def rename(table: str, to: str) -> None:
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {quote(table)} RENAME TO {quote(to)}")
