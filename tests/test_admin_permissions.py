"""Every page of the admin of events and streams: who may open it, what forged requests do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.admin.sites import site
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_outbox.inspection.causes import load_causes
from django_outbox.models import OutboxEvent, OutboxStream
from tests.cases import cases
from tests.table import undone
from tests.test_admin import acting_id, checksum, make, traces

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
