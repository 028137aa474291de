"""Every page of the admin of events and streams: who may open it, what forged requests do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.sites import site
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_outbox.admin import bulk_actions
from django_outbox.inspection.causes import load_causes
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from tests.cases import cases
from tests.table import now, undone
from tests.test_admin import EVIL, EVIL_ID, LIST, acting_id, checksum, make, tick, traces, visitor

pytestmark = pytest.mark.django_db

READ = ("changelist", "change", "history", "groups")
REPLAY = ("replay", "replay_all", "replay_cause", "run_now", "run_now_all")
DISCARD = ("discard", "discard_all", "discard_cause", "skip")
NOBODY = ("add", "delete")  # Django's pages for rows, closed to all


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of each page, without that of its model, and its URL."""
    rows = {OutboxEvent: acting_id(make(key="k", seq=1)), OutboxStream: "k"}
    OutboxStream.objects.create(key="k", seq=1)
    cause = load_causes("default", limit=1).causes[0].digest
    for model, object_id in rows.items():
        prefix = f"{model._meta.app_label}_{model._meta.model_name}_"
        for each in site.get_model_admin(model).get_urls():
            if each.name is None:  # Django's old URL of a page, which redirects
                continue
            known = {"object_id": object_id, "digest": cause}
            takes = [value for name, value in known.items() if name in each.pattern.converters]
            yield each.name.removeprefix(prefix), reverse(f"admin:{each.name}", args=takes)


def person(*codenames: str) -> Client:
    """Return a client that checks CSRF tokens, logged in as staff with these permissions.

    With any of them, the user may view events and streams, too.
    """
    user = User.objects.create_user(f"person-{User.objects.count()}", is_staff=True)
    views = ["view_outboxevent", "view_outboxstream"] if codenames else []
    wanted = [f"{each}_outboxevent" for each in codenames if each != "view"]
    user.user_permissions.set(Permission.objects.filter(codename__in=[*views, *wanted]))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def unknown_name() -> Client:
    return Client(enforce_csrf_checks=True)


ACTORS: dict[str, tuple[Callable[[], Client], tuple[str, ...] | None]] = {
    "anonymous": (unknown_name, None),
    "staff without rights": (person, ()),
    "view": (lambda: person("view"), READ),
    "replay": (lambda: person("view", "replay"), (*READ, *REPLAY)),
    "discard": (lambda: person("view", "discard"), (*READ, *DISCARD)),
}


@cases("actor", ACTORS)
@undone()
def test_each_page_opens_only_with_its_permission(actor: str) -> None:
    """By GET nothing changes; a POST without a token changes nothing either."""
    make_client, opened = ACTORS[actor]
    found = list(pages())
    names = {name for name, _url in found}
    assert names == {*READ, *REPLAY, *DISCARD, *NOBODY}
    before, client = checksum(), make_client()
    for name, url in found:
        expected = 302 if opened is None else 200 if name in opened else 403
        assert client.get(url).status_code == expected, url
        data = {"action": "replay", "_selected_action": "k", "outbox_confirmed": "yes"}
        refused = client.post(url, {**data, "outbox_event": "event-0000", "progress": "x"})
        assert refused.status_code == 403, url
    assert (checksum(), traces()) == (before, [])


def test_markup_is_escaped_on_pages_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_actions, "SECONDS_PER_REQUEST", 0)
    texts = dict.fromkeys(["event_type", "payload", "headers", "last_error", "tenant_id"], EVIL)
    event = make(event_id=EVIL_ID, aggregate_type=EVIL[:64], **texts)
    make(Status.RETRY, event_id=f"{EVIL_ID[:-1]}2", available_at=now(), **texts)
    client = visitor("view", "replay", "discard")
    name = "admin:django_outbox_outboxevent_"
    pages = [
        tick(client, "replay", event.pk),
        client.get(reverse(f"{name}discard", args=[acting_id(event)])),
        client.get(reverse(f"{name}replay_all"), {"event_type": EVIL, "q": "x"}),
        client.get(reverse(f"{name}replay_all"), {"event_type": EVIL}),
        client.get(reverse(f"{name}groups")),
    ]
    for page in pages:
        text = page.content.decode()
        assert page.status_code == 200
        assert "&lt;script&gt;" in text
        assert "<script>alert" not in text
        assert "<img src=x" not in text


@pytest.mark.parametrize("verb", ["replay", "discard", "run_now"])
def test_forged_filters_of_a_bulk_action_break_nothing(verb: str) -> None:
    make()
    before, client = checksum(), visitor("view", "replay", "discard")
    url = reverse(f"admin:django_outbox_outboxevent_{verb}_all")
    for query in (
        {"state": "lost"},
        {"written": "2026-13"},
        {"up_to": "a\0"},
        {"cause": "a\0"},
        {"no_such_field": "1"},
        {"p": "99"},
        {"o": "x.-9"},
        {"q": "a\0b"},
        {"e": "1"},
        {"event_type": "' OR 1=1 --"},
        {"payload__regex": "("},
        {"last_error__contains": "%"},
        {"payload__contains": "s"},
        {"headers": "x"},
        {"last_error__regex": "("},
    ):
        assert client.get(url, query, follow=True).status_code == 200, query
    assert checksum() == before


@pytest.mark.parametrize("name", ["payload__startswith", "headers", "result__contains"])
def test_hidden_values_cannot_be_probed_by_a_filter(name: str) -> None:
    make(payload='{"password":"s3cret"}')
    response = visitor("view").get(reverse(LIST), {name: "{"})
    assert "this filter is not possible" in response.content.decode()
    assert "outbox-id" not in response.content.decode()
