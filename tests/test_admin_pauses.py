"""Pauses in the admin: who may pause and resume, what is shown and logged."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, DELETION, LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause
from tests.cases import cases
from tests.table import insert, keyed, undone
from tests.test_admin import body, said, visitor

pytestmark = pytest.mark.django_db

LIST, ADD, PAGE = (
    f"admin:django_outbox_outboxpause_{page}" for page in ("changelist", "add", "change")
)
SENT = "parcel.sent"
FORM = {"kind": "event_type", "name": SENT, "reason": "carrier down", "force": "on"}


def paused(name: str = SENT, kind: str = "event_type") -> OutboxPause:
    OutboxPause.objects.pause(kind, name, reason="why", by="ada")
    return OutboxPause.objects.get(kind=kind, name=name)


def act(client: Client, *pauses: OutboxPause) -> Any:
    data = {"action": "resume", "_selected_action": [each.pk for each in pauses], "index": "0"}
    return client.post(reverse(LIST), data)


def test_the_form_pauses(admin_client: Client, admin_user: User) -> None:
    response = admin_client.post(reverse(ADD), FORM)
    assert response.status_code == 302
    found = OutboxPause.objects.get()
    assert (found.kind, found.name, found.reason) == ("event_type", SENT, "carrier down")
    assert found.paused_by == admin_user.username
    assert f"event type {SENT}” was added" in said(response)
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id) == (ADDITION, str(found.pk))
    assert "carrier down" in entry.get_change_message()
    operation = OutboxOperation.objects.get()
    assert (operation.kind, operation.by) == ("pause", admin_user.username)


def test_the_form_refuses_an_unknown_name_unless_it_is_forced(admin_client: Client) -> None:
    insert(event_type="seen.before")
    given = {**FORM, "name": "seen.befroe", "force": ""}
    page = admin_client.post(reverse(ADD), given).content.decode()
    assert "No event type &#x27;seen.befroe&#x27;" in page
    assert "Did you mean &#x27;seen.before&#x27;?" in page
    assert not OutboxPause.objects.exists()
    for changes in ({"name": "seen.before"}, {"force": "on"}):
        assert admin_client.post(reverse(ADD), {**given, **changes}).status_code == 302
    assert OutboxPause.objects.count() == 2


@cases(
    ("given", "error"),
    [
        ({"kind": "worker"}, "Select a valid choice"),
        ({"name": ""}, "This field is required"),
        ({"name": "n" * 256}, "at most 255 characters"),
        ({"until": "2001-02-03T04:05"}, "The end of the pause, 2001-02-03 04:05:00"),
        ({"until": "tomorrow"}, "Enter a valid date/time."),
        ({"name": "paused"}, "already exists"),
    ],
    ids=str,
)
@undone()
def test_what_cannot_be_paused_is_said_at_its_field(
    admin_client: Client, given: dict[str, str], error: str
) -> None:
    kept = paused("paused")
    errors = admin_client.post(reverse(ADD), {**FORM, **given}).context["adminform"].form.errors
    assert error in errors["__all__" if error == "already exists" else next(iter(given))].as_text()
    assert [*OutboxPause.objects.values_list("pk", "reason")] == [(kept.pk, "why")]


def test_a_link_may_fill_the_form(admin_client: Client) -> None:
    page = body(admin_client, f"{reverse(ADD)}?kind=stream&name=Order:1&paused_by=mallory")
    assert 'value="Order:1"' in page
    assert '<option value="stream" selected>' in page
    assert "mallory" not in page


# -- an end time -----------------------------------------------------------------------------------


@cases("use_tz", [True, False])
@undone()
def test_the_form_gives_a_pause_an_end(admin_client: Client, settings: Any, use_tz: bool) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Kathmandu"
    form = body(admin_client, reverse(ADD))
    assert "(time zone Asia/Kathmandu)" in form
    assert re.search(r'<input type="datetime-local" name="until"', form)
    admin_client.post(reverse(ADD), {**FORM, "until": "2126-11-26T09:00"})
    found = OutboxPause.objects.get()
    assert found.until is not None
    assert found.until.isoformat() == "2126-11-26T03:15:00+00:00"
    message = LogEntry.objects.latest("pk").get_change_message()
    assert message == "Paused until 2126-11-26 09:00:00.000+05:45. carrier down"
    for url in (reverse(LIST), reverse(PAGE, args=[found.pk])):
        assert "2126-11-26 09:00, in " in body(admin_client, url)


EVENT, GROUPS = (
    f"admin:django_outbox_{page}" for page in ("outboxevent_change", "outboxevent_groups")
)


def pause_links(client: Client, url: str) -> list[str]:
    block = body(client, url).partition('<p class="outbox-pauses">')[2].partition("</p>")[0]
    return [unescape(each) for each in re.findall(r'href="([^"]*)"', block)]


def test_an_event_and_an_error_are_paused_from_their_pages(admin_client: Client) -> None:
    [pk] = keyed("Order 7&8", event_type=SENT)
    insert(event_type=SENT, status=OutboxEvent.Status.DEAD)
    links = pause_links(admin_client, reverse(EVENT, args=[pk]))
    assert links == [
        f"{reverse(ADD)}?kind=event_type&name={SENT}",
        f"{reverse(ADD)}?kind=queue&name=default",
        f"{reverse(ADD)}?kind=stream&name=Order+7%268",
    ]
    assert pause_links(admin_client, reverse(GROUPS)) == links[:1]
    page = body(admin_client, links[2])
    assert 'value="Order 7&amp;8"' in page
    assert '<option value="stream" selected>' in page


def test_a_link_to_pause_needs_the_permission() -> None:
    [pk] = insert(event_type=SENT)
    assert pause_links(visitor("view_outboxevent"), reverse(EVENT, args=[pk])) == []
    pauser = visitor("view_outboxevent", "pause_outboxpause")
    assert len(pause_links(pauser, reverse(EVENT, args=[pk]))) == 2


def test_the_list_asks_a_bounded_number_of_questions(
    admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(20):
        paused(f"type.{number}")
    with django_assert_max_num_queries(15):
        body(admin_client, reverse(LIST))


def test_the_action_resumes(admin_client: Client) -> None:
    ids = insert(2, event_type=SENT)
    one, other = paused(), paused("k", "stream")
    outbox.drain()
    response = act(admin_client, one)
    assert f"Resumed: event type {SENT}." in said(response)
    assert [*OutboxPause.objects.all()] == [other]
    assert {*OutboxEvent.objects.due().values_list("pk", flat=True)} == {*ids}
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_repr) == (DELETION, f"event type {SENT}")
    operation = OutboxOperation.objects.get(kind="resume")
    assert (operation.by, operation.done) == (User.objects.get().username, 2)


def test_the_page_has_a_button_that_resumes(admin_client: Client) -> None:
    pause = paused()
    page = body(admin_client, reverse(PAGE, args=[pause.pk]))
    form = page.partition('<div class="outbox-actions">')[2].partition("</div>")[0]
    fields = dict(re.findall(r'name="([^"]+)" value="([^"]+)"', form))
    assert f'formaction="{reverse(LIST)}"' in form
    assert admin_client.post(reverse(LIST), fields).status_code == 302
    assert not OutboxPause.objects.exists()
    assert "It is no longer paused." in said(admin_client.post(reverse(LIST), fields))


@pytest.mark.django_db(transaction=True)
def test_workers_are_rung_after_the_commit(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[bool] = []
    monkeypatch.setattr(
        doorbell, "ring", lambda connection: rings.append(connection.in_atomic_block)
    )
    admin_client.post(reverse(ADD), FORM)
    act(admin_client, OutboxPause.objects.get())
    assert rings == [False, False]


PEOPLE = {
    "nobody": ((), {"is_staff": True}),
    "viewer": (("view_outboxpause",), {}),
    "replayer": (("view_outboxevent", "replay_outboxevent"), {}),
    "pauser": (("pause_outboxpause",), {}),
    "resumer": (("resume_outboxpause",), {}),
}


@cases(
    ("who", "looks", "pauses", "resumes"),
    [
        ("nobody", False, False, False),
        ("viewer", True, False, False),
        ("replayer", False, False, False),
        ("pauser", True, True, False),
        ("resumer", True, False, True),
    ],
    ids=[*PEOPLE],
)
@undone()
def test_each_verb_has_its_permission(who: str, looks: bool, pauses: bool, resumes: bool) -> None:
    codenames, user = PEOPLE[who]
    client, pause = visitor(*codenames, **user), paused("other")
    for url in (reverse(LIST), reverse(PAGE, args=[pause.pk])):
        assert (client.get(url).status_code == 200) is looks
    assert (client.get(reverse(ADD)).status_code == 200) is pauses
    client.post(reverse(ADD), FORM)
    assert OutboxPause.objects.filter(name=SENT).exists() is pauses
    act(client, pause)
    assert OutboxPause.objects.filter(name="other").exists() is not resumes
    delete = reverse("admin:django_outbox_outboxpause_delete", args=[pause.pk])
    assert client.post(delete, {"post": "yes"}).status_code in (302, 403)
    assert OutboxPause.objects.filter(name="other").exists() is not resumes
