"""Every page of the admin: who may open it, and what requests without a token do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.sites import site
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from django_outbox.models import (
    OutboxEvent,
    OutboxOperation,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
)
from tests.cases import cases
from tests.table import stream_row, undone
from tests.test_admin import checksum, make, traces, visitor

pytestmark = pytest.mark.django_db

MODELS = OutboxEvent, OutboxStream, OutboxPause, OutboxOperation, OutboxStatistics
LISTED = ("changelist", "change", "history")
READ = [
    *(f"{kind}_{page}" for kind in ("event", "stream", "pause", "operation") for page in LISTED),
    "event_groups",
    "statistics_changelist",
    "statistics_refresh",
]
REPLAY = ["event_replay", "event_replay_all", "event_run_now", "event_run_now_all"]
DISCARD = ["event_discard", "event_discard_all", "event_skip"]
# Django's pages for rows, closed to all.
CLOSED = [
    *(f"{kind}_{page}" for kind in ("event", "stream", "operation") for page in ("add", "delete")),
    "pause_delete",
]


def pages() -> Iterator[tuple[str, str]]:
    """Yield the model and name of each page, and its URL."""
    event = quote(make(key="k", seq=1).pk)
    stream_row("k").save()
    OutboxPause.objects.pause("stream", "k")
    pause = OutboxPause.objects.get().pk
    operation = OutboxOperation.objects.begin("replay", OutboxEvent.objects.all()).pk
    rows = {OutboxEvent: event, OutboxStream: ":k", OutboxPause: pause, OutboxStatistics: ""}
    rows[OutboxOperation] = operation
    for model in MODELS:
        for each in site.get_model_admin(model).get_urls():
            if each.name is None:  # Django's old URL of a page, which redirects
                continue
            takes = [rows[model]] if "object_id" in each.pattern.converters else []
            name = each.name.removeprefix("django_outbox_outbox")
            yield name, reverse(f"admin:{each.name}", args=takes)


def person(*codenames: str) -> Client:
    """Return a client that checks CSRF tokens, logged in as staff with these permissions.

    With any of them, the user may view events, streams and pauses, too.
    """
    views = [f"view_outbox{each}" for each in ("event", "stream", "pause")] if codenames else []
    return visitor(*{*views, *codenames}, enforce_csrf_checks=True)


def customer() -> Client:
    client = person("view_outboxevent")
    User.objects.update(is_staff=False)
    return client


ACTORS: dict[str, tuple[Callable[[], Client], list[str] | None]] = {
    "anonymous": (lambda: Client(enforce_csrf_checks=True), None),
    "customer": (customer, None),
    "staff without rights": (person, []),
    "view": (lambda: person("view_outboxevent"), READ),
    "replay": (lambda: person("replay_outboxevent"), [*READ, *REPLAY]),
    "discard": (lambda: person("discard_outboxevent"), [*READ, *DISCARD]),
    "pause": (lambda: person("pause_outboxpause"), [*READ, "pause_add"]),
    "resume": (lambda: person("resume_outboxpause"), READ),
}


@cases("actor", ACTORS)
@undone()
def test_each_page_opens_only_with_its_permission(actor: str) -> None:
    """By GET nothing changes; a POST without a token changes nothing either."""
    make_client, opened = ACTORS[actor]
    found = list(pages())
    every = {*READ, *REPLAY, *DISCARD, *CLOSED, "pause_add", "operation_stop"}
    assert {name for name, _url in found} == every
    before, client = checksum(), make_client()
    for name, url in found:
        expected = 302 if opened is None else 200 if name in opened else 403
        if name == "operation_stop" and opened is not None:
            expected = 405
        assert client.get(url).status_code == expected, url
        data = {"action": "replay", "_selected_action": "k", "outbox_confirmed": "yes"}
        refused = client.post(url, {**data, "progress": "x"})
        assert refused.status_code == 403, url
    assert (checksum(), traces()) == (before, [])
    assert OutboxPause.objects.exists()
    assert OutboxOperation.objects.open().count() == 1
