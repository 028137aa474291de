"""Dead events by cause: what the page shows, and what can be done about one cause."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox.admin import bulk_actions, error_groups
from django_outbox.inspection.causes import load_causes
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.cases import cases
from tests.table import now, undone
from tests.test_admin import EVIL, body, checksum, listed, make, said, say_yes, traces, visitor

pytestmark = pytest.mark.django_db

GROUPS = "admin:django_outbox_outboxevent_groups"
ACTIONS = ("replay_cause", "discard_cause")


def rows_of(page: str) -> list[str]:
    """Return the HTML of each cause on the page."""
    return re.findall(r"<tr[^>]*>\s*<td class=.outbox-count.>(.*?)</tr>", page, re.DOTALL)


def links_of(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r'href="([^"]+)"', text)]


def url(name: str, digest: str) -> str:
    return reverse(f"admin:django_outbox_outboxevent_{name}", args=[digest])


def digests() -> list[str]:
    return [each.digest for each in load_causes("default", limit=100).causes]


def refused(count: int, host: str, **fields: Any) -> list[OutboxEvent]:
    """Insert dead events whose errors differ in numbers only."""
    return [
        make(last_error=f"OSError: {host} refused order {17 * n}, {n} s\nTraceback", **fields)
        for n in range(count)
    ]


def test_causes_are_listed_largest_first_with_their_types_inside() -> None:
    clock = now()
    refused(2, "a.example", done_at=clock - timedelta(hours=3))
    refused(1, "a.example", done_at=clock - timedelta(minutes=30), event_type="parcel.requested")
    refused(1, "b.example")
    make(last_error=None)
    make(Status.RETRY, last_error="OSError: a.example refused order 1, 1 s")
    client = visitor("view", "replay")
    rows = rows_of(body(client, reverse(GROUPS)))
    assert [row.partition("<")[0] for row in rows] == ["3", "1", "1"]
    for part in (
        "OSError",
        "a.example refused order #",
        "Newest: a.example refused order 0, 0 s",
        "30 min ago",
        "3 h ago",
        "order.placed</a> 2",
        "parcel.requested</a> 1",
    ):
        assert part in rows[0]
    assert "no error text" in "".join(rows)
    [first, second] = [each for each in links_of(rows[0]) if "state=dead" in each]
    assert len(re.findall("outbox-id", body(client, first))) == 2
    assert "parcel.requested" in second
    assert not [each for each in links_of(rows[0]) if "/discard/" in each]  # without permission


def test_the_events_of_a_cause_are_listed() -> None:
    these = refused(3, "a.example")
    refused(1, "b.example")
    client = visitor("view", "replay")
    query = {"state": "dead", "cause": digests()[0]}
    assert listed(client, **query) == [each.pk for each in reversed(these)]
    page = body(client, reverse("admin:django_outbox_outboxevent_changelist"), **query)
    assert "one cause: at most 1000 of its newest events" in page
    assert "all that match" not in page  # "Replay" of the cause itself is exact
    answer = client.get(reverse("admin:django_outbox_outboxevent_replay_all"), query)
    assert answer.url.startswith(reverse(GROUPS))


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_an_action_touches_all_events_of_one_cause_and_no_others(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over several pages, and although other causes have the same class and types."""
    monkeypatch.setattr(bulk_actions, "BATCH_SIZE", 2)
    monkeypatch.setattr(bulk_actions, "SECONDS_PER_REQUEST", 0)
    these, others = [], []
    for _ in range(3):
        these += refused(1, "a.example") + refused(1, "a.example", event_type="parcel.requested")
        others += refused(1, "b.example")
        others.append(make(last_error="OSErrors: a.example refused order 1"))
    others.append(make(Status.RETRY, last_error=these[0].last_error))
    client = visitor("view", "replay", "discard")
    before = {*OutboxEvent.objects.filter(pk__in=[each.pk for each in others]).values_list()}
    [row, *_] = rows_of(body(client, reverse(GROUPS)))
    [link] = [each for each in links_of(row) if each.endswith(f"/{verb}/")]
    page = client.get(link)
    text = page.content.decode()
    assert f"{verb.capitalize()} 6 events?" in text
    for part in ("OSError: a.example refused order #", "order.placed: 3", "and 4 more"):
        assert part in text
    assert OutboxEvent.objects.dead().count() == 12
    steps = 0
    while (page := say_yes(client, page)).status_code == 200:
        steps += 1
    assert steps == 6  # the last finds that none is left
    assert (
        said(page) == f"6 events were {verb}{'ed' * (verb != 'replay')}{'ed' * (verb == 'replay')}."
    )
    left = OutboxEvent.objects.filter(pk__in=[each.pk for each in these])
    assert [*left.values_list("status", flat=True)] == ([0] * 6 if verb == "replay" else [])
    assert {
        *OutboxEvent.objects.filter(pk__in=[each.pk for each in others]).values_list()
    } == before
    assert client.get(link, follow=True).redirect_chain[0][0] == reverse(GROUPS)


def test_a_cause_that_is_gone_is_no_error() -> None:
    client = visitor("view", "replay", "discard")
    for name in ACTIONS:
        answer = client.get(url(name, "0" * 16))
        assert answer.url == reverse(GROUPS)
        assert "No dead event has this cause any more." in said(answer)
    before = checksum()
    assert client.post(url("replay_cause", "0" * 16), {"progress": "x"}).status_code == 400
    assert checksum() == before


def test_pauses_are_linked_from_a_cause() -> None:
    progress = {"order.placed mail": {"state": "dead"}, "order.placed stock": {"state": "done"}}
    make(progress=json.dumps(progress))
    make(event_type="parcel.requested")
    user = User.objects.create_user("pauser", is_staff=True)
    codes = ["view_outboxevent", "pause_outboxpause"]
    user.user_permissions.set(Permission.objects.filter(codename__in=codes))
    client = Client()
    client.force_login(user)
    [row] = rows_of(body(client, reverse(GROUPS)))
    pauses = [each.partition("?")[2] for each in links_of(row) if "outboxpause/add" in each]
    assert pauses == [
        "kind=event_type&name=order.placed",
        "kind=event_type&name=parcel.requested",
        "kind=listener&name=order.placed+mail",
    ]
    page = body(visitor("view"), reverse(GROUPS))
    assert "order.placed mail" in page
    assert "order.placed stock" not in page
    for absent in ("outboxpause/add", "/replay/", "/discard/"):
        assert absent not in page


def test_a_page_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = visitor("view", "replay")
    assert "No event is dead." in body(client, reverse(GROUPS))
    for number, letter in enumerate("abcdefgh"):
        for _ in range(8 - number):
            make(last_error=f"E: {letter}", event_type=f"type.{number}")
        make(last_error="E: a", event_type=f"more.{number}")
    monkeypatch.setattr(error_groups, "MAX_CAUSES", 3)
    page = body(client, reverse(GROUPS))
    assert len(rows_of(page)) == 3
    assert "There are 5 further causes." in page
    assert "and 4 more types" in rows_of(page)[0]
    assert rows_of(page)[0].startswith("16<")


def test_few_queries_show_many_causes() -> None:
    for number in range(30):
        make(last_error=f"E{number}: {chr(97 + number % 26)}", event_type=f"type.{number}")
    client = visitor("view", "replay", "discard")
    for page in (reverse(GROUPS), *(url(each, digests()[0]) for each in ACTIONS)):
        with CaptureQueriesContext(connection) as captured:
            assert client.get(page).status_code == 200
        assert len(captured) <= 15, page


def test_hidden_values_are_hidden_on_each_page() -> None:
    make(last_error="ValueError: password=sesam, token: 'open up' for sesam2")
    make(last_error="password: sesam")
    client = visitor("view", "replay", "discard")
    with override_settings(OUTBOX={"REDACT": ("password", "token")}):
        for page in (reverse(GROUPS), *(url(name, each) for name in ACTIONS for each in digests())):
            text = body(client, page)
            assert "•••" in text
            assert "sesam<" not in text
            assert "password=sesam" not in text
            assert "open up" not in text
            assert not re.search('password:? *</?[a-z ="-]*>* *sesam', text)


def test_causes_are_seen_by_permission_and_escaped() -> None:
    make(last_error=EVIL, event_type=EVIL, progress=json.dumps({EVIL: {"state": "dead"}}))
    make(last_error=f"E: {EVIL}", event_type=EVIL)
    assert visitor().get(reverse(GROUPS)).status_code == 403
    client = visitor("view", "replay", "discard")
    for page in (reverse(GROUPS), *(url(name, each) for name in ACTIONS for each in digests())):
        text = body(client, page)
        assert "<script>alert" not in text
        assert "<img src=x" not in text
    for error in ("a\0b", "%", "_", "\\", "'"):
        query = {"state": "dead", "cause": error}
        assert client.get("/admin/django_outbox/outboxevent/", query).status_code in (200, 302)


@cases(
    ("codenames", "opened"),
    [
        ((), ()),
        (("view",), ()),
        (("view", "replay"), ("replay_cause",)),
        (("view", "discard"), ("discard_cause",)),
        (("replay", "discard"), ()),
    ],
    ids=lambda each: "+".join(each) or "none",
)
@undone()
def test_each_action_needs_its_permission_and_a_token(
    codenames: tuple[str, ...], opened: tuple[str, ...]
) -> None:
    refused(1, "a.example")
    before, digest = checksum(), digests()[0]
    client = visitor(*codenames, enforce_csrf_checks=True)
    for name in ACTIONS:
        assert client.get(url(name, digest)).status_code == (200 if name in opened else 403)
        data = {"progress": "x"}
        assert client.post(url(name, digest), data).status_code == 403
    assert (checksum(), traces()) == (before, [])
    unchecked = Client()
    unchecked.cookies = client.cookies
    progress = bulk_actions.begin("default", total=1, is_all=True).token
    for name in {*ACTIONS} - {*opened}:
        assert unchecked.post(url(name, digest), {"progress": progress}).status_code == 403
    assert (checksum(), traces()) == (before, [])
