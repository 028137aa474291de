"""The admin: hidden values, edit and replay, and the history of an event."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import reverse

import django_outbox as outbox
from django_outbox.admin import edit_diff, editing, redaction
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, OutboxWorker
from tests.cases import cases
from tests.table import keyed, listening, now, undone
from tests.test_admin import LIST, PAGE, body, checksum, make, press, said, traces, url_of, visitor

pytestmark = pytest.mark.django_db

GROUPS, STREAMS, STREAM, DASHBOARD = (
    f"admin:django_outbox_{page}"
    for page in (
        "outboxevent_groups",
        "outboxstream_changelist",
        "outboxstream_change",
        "outboxstatistics_changelist",
    )
)
HIDING = {"REDACT": ["password", "Customer.Email", "x-api-key"]}
SECRETS = (
    '{"price":1.10,"Password":"s3cret1","customer":{"email":"s3cret2","name":"Ann"},'
    '"email":"shown","list":[{"password":["s3cret3"]},{"password":{"deep":"s3cret4"}}],'
    '"twice":1,"twice":2}'
)


# --- hiding ---------------------------------------------------------------------------------------


@override_settings(OUTBOX=HIDING)
def test_named_values_are_hidden_wherever_they_stand() -> None:
    event = make(payload=SECRETS, headers='{"X-API-Key":"s3cret5","region":"eu"}', result=SECRETS)
    page = html.unescape(body(visitor("view"), reverse(PAGE, args=[event.pk])))
    assert "s3cret" not in page
    for part in ('"price": 1.10', '"name": "Ann"', '"email": "shown"', '"region": "eu"', "•••"):
        assert part in page
    assert page.count('"Password": "•••"') == 2
    assert '"twice": 1,\n  "twice": 2' in page


@override_settings(OUTBOX=HIDING)
@cases("text", ["{", '{"password": "s3cret"', "s3cret", "[" * 5000 + "s3cret", "NaN"])
@undone()
def test_text_that_cannot_be_searched_is_hidden_as_a_whole(text: str) -> None:
    event = make(payload=text, headers=text)
    page = body(visitor("view"), reverse(PAGE, args=[event.pk]))
    assert "s3cret" not in page
    assert page.count("it cannot be decoded, and REDACT is set") == 2


@override_settings(OUTBOX=HIDING)
def test_a_long_text_is_hidden_before_it_is_cut() -> None:
    text = '{"password":"' + "s3cret" * 200_000 + '","a":1}'
    page = body(visitor("view"), reverse(PAGE, args=[make(payload=text).pk]))
    assert "s3cret" not in page
    assert len(page) < 100_000


@override_settings(OUTBOX=HIDING)
@cases(
    ("text", "shown"),
    [
        ("no password=s3cret, region=eu", "no password=•••, region=eu"),
        ("PASSWORD: s3cret; region: eu", "PASSWORD: •••; region: eu"),
        ("{'password': 's3\\'cret x', 'a': 1}", "{'password': •••, 'a': 1}"),
        ('{"email": "s3cret", "name": "Ann"}', '{"email": •••, "name": "Ann"}'),
        ("password={'deep': 's3cret', 'b': 's3cret'}\nnext", "password=•••\nnext"),
        ("X-Api-Key: Bearer s3cret", "X-Api-Key: •••"),
        ("[('x-api-key', 's3cret x'), ('a', 1)]", "[('x-api-key', •••), ('a', 1)]"),
        ("password=b's3cret x'", "password=•••"),
        ('{"password": "cut s3cret', '{"password": •••'),
        ("the password is wrong", "the password is wrong"),
        ("my_password=shown", "my_password=shown"),
    ],
)
def test_a_named_value_is_hidden_in_a_text(text: str, shown: str) -> None:
    assert redaction.hide_in_text(text) == shown


def test_without_names_a_text_stays() -> None:
    assert redaction.hide_in_text("password=s3cret") == "password=s3cret"


@override_settings(OUTBOX=HIDING)
def test_no_page_shows_a_hidden_value_of_an_error(admin_user: User) -> None:
    error = 'HTTPError: 400 {"password": "s3cret"}\nHTTPError: password=s3cret'
    progress = {"order.placed mail": {"state": "dead", "attempts": 1, "error": error}}
    keyed("k", event_type="order.placed", last_error=error, status=Status.RETRY, attempts=1)
    event = make(last_error=error, status=Status.DEAD, progress=json.dumps(progress))
    client = Client()
    client.force_login(admin_user)
    pages = (
        reverse(PAGE, args=[event.pk]),
        f"{reverse(LIST)}?state=dead",
        reverse(GROUPS),
        f"{reverse(STREAMS)}?state=all",
        reverse(STREAM, args=["k"]),
        reverse(DASHBOARD),
    )
    for url in pages:
        page = body(client, url)
        assert "s3cret" not in page, url
        assert "HTTPError" in page, url


@pytest.mark.parametrize("lookup", ["last_error", "last_error__startswith", "last_error__contains"])
def test_no_filter_guesses_a_hidden_value_of_an_error(lookup: str) -> None:
    make(last_error="HTTPError: password=s3cret", status=Status.DEAD)
    client, url = visitor("view"), f"{reverse(LIST)}?{lookup}=HTTPError: password=s3cret"
    assert client.get(url).status_code == 200
    with override_settings(OUTBOX=HIDING):
        page = body(client, url)
        assert "this filter is not possible" in page
        assert "outbox-id" not in page


@cases(
    "text",
    ['{"a":1.10,"a":[1e400,{}],"b":{"":[[]]}}', "[]", '"x"', "12345678901234567890.0", "null"],
)
def test_what_is_taken_apart_is_put_together_unchanged(text: str) -> None:
    assert redaction.dump(redaction.parse(text)) == text
    assert json.loads(redaction.dump(redaction.parse(text), "  ")) == json.loads(text)


# --- edit and replay ------------------------------------------------------------------------------


def form_of(client: Any, event: OutboxEvent) -> dict[str, str]:
    page = body(client, url_of("edit", event.pk))
    fields = dict(re.findall(r'<textarea name="(\w+)"[^>]*>\n?(.*?)</textarea>', page, re.DOTALL))
    seen = re.search(r'name="seen" value="(\w+)"', page)
    assert seen is not None
    return {name: html.unescape(text) for name, text in fields.items()} | {"seen": seen[1]}


def save(client: Any, event: OutboxEvent, data: dict[str, str]) -> Any:
    """Submit the form, and confirm the page that shows what changes."""
    before = checksum()
    page = client.post(url_of("edit", event.pk), data).content.decode()
    assert (checksum(), traces()) == (before, [])
    fields = re.findall(r'<input type="hidden" name="(payload|headers|seen)" value="([^"]*)"', page)
    hidden = {name: html.unescape(value) for name, value in fields}
    assert len(re.findall('name="confirmed"', page)) == 1, page
    return client.post(url_of("edit", event.pk), {"headers": "", **hidden, "confirmed": "yes"})


def test_an_edited_event_is_delivered_with_its_new_text() -> None:
    """The log keeps the old value, and numbers keep their digits."""
    event = make(payload='{"sku":"teapto","price":1.10}', headers='{"region":"eu"}', event_type="e")
    client = visitor("view", "edit")
    assert url_of("edit", event.pk) in body(client, reverse(PAGE, args=[event.pk]))
    data = form_of(client, event)
    assert data["payload"] == '{\n  "sku": "teapto",\n  "price": 1.10\n}'
    data["payload"] = data["payload"].replace("teapto", "teapot")
    data["headers"] = '{"region": "us"}'
    response = save(client, event, data)
    assert said(response) == "1 event was edited and replayed."
    event.refresh_from_db()
    assert (event.payload, event.headers) == ('{"sku":"teapot","price":1.10}', '{"region":"us"}')
    assert (event.status, event.attempts, event.last_error) == (Status.NEW, 0, None)
    assert traces() == [(event.pk, CHANGE)]
    log = LogEntry.objects.get().change_message
    assert "teapto" in log
    assert '"eu"' in log

    got: list[outbox.Event] = []
    with listening(got.append, "e"):
        outbox.drain()
    assert [(each.payload, dict(each.headers)) for each in got] == [
        ({"sku": "teapot", "price": 1.1}, {"region": "us"})
    ]


def diff_of(page: str) -> list[str]:
    """Return the lines that the page shows as removed and added."""
    found = re.findall(r"<(?:del|ins)>(.*?)</(?:del|ins)>", page, re.DOTALL)
    return [html.unescape(each) for each in found]


def test_what_changes_is_shown_before_it_is_saved() -> None:
    event = make(payload='{"sku":"teapto","price":1.10,"n":[1,2,3,4,5,6,7,8,9]}', headers=None)
    client = visitor("view", "edit")
    data = form_of(client, event)
    data["payload"] = data["payload"].replace("teapto", "<b>teapot")
    data["headers"] = '{"region": "eu"}'
    before = checksum()
    page = client.post(url_of("edit", event.pk), data).content.decode()
    assert diff_of(page) == [
        '-   "sku": "teapto",',
        '+   "sku": "<b>teapot",',
        "+ {",
        '+   "region": "eu"',
        "+ }",
    ]
    assert "<b>teapot" not in page
    assert '"price": 1.10' in html.unescape(page)
    assert "    9" not in page.partition("<form")[0]  # far from what changes
    again = client.post(url_of("edit", event.pk), {**data, "again": "yes", "confirmed": "yes"})
    assert "<textarea" in again.content.decode()
    assert "teapot" in again.content.decode()
    assert (checksum(), traces()) == (before, [])


def test_an_edit_that_changes_nothing_says_so() -> None:
    event = make(payload='{"a": 1}', headers='{"region":"eu"}')
    client = visitor("view", "edit")
    page = client.post(url_of("edit", event.pk), form_of(client, event)).content.decode()
    assert "Nothing changes." in page
    assert diff_of(page) == []


def test_a_forged_confirmation_is_checked_like_a_form() -> None:
    event = make()
    before = checksum()
    client = visitor("view", "edit")
    data = {**form_of(client, event), "payload": "{", "confirmed": "yes"}
    assert "This is not JSON" in client.post(url_of("edit", event.pk), data).content.decode()
    assert checksum() == before


@override_settings(OUTBOX=HIDING)
def test_what_changes_does_not_show_hidden_values() -> None:
    event = make(payload='{"password":"s3cret1","x":{"password":"s3cret2"},"a":1}')
    client = visitor("view", "edit")
    data = form_of(client, event)
    data["payload"] = data["payload"].replace("•••2", "new-s3cret").replace('"a": 1', '"a": 2')
    page = client.post(url_of("edit", event.pk), data).content.decode()
    assert diff_of(page) == [
        '-     "password": "•••2"',
        '+     "password": "••• (changed)"',
        '-   "a": 1',
        '+   "a": 2',
    ]
    assert "s3cret" not in page.replace("new-s3cret", "")


@override_settings(OUTBOX=HIDING)
def test_text_that_cannot_be_searched_for_hidden_values_is_not_compared() -> None:
    assert edit_diff.compare("s3cret a", "s3cret b").lines == [
        ("old", redaction.MASK),
        ("new", redaction.CHANGED),
    ]
    assert edit_diff.compare("s3cret", "s3cret").is_empty


def test_a_large_change_is_shown_in_part() -> None:
    old, new = (json.dumps([f"{name}{n}" for n in range(30_000)]) for name in "ab")
    diff = edit_diff.compare(old, new)
    assert (len(diff.lines), diff.is_cut) == (edit_diff.MAX_SHOWN, True)
    far = [*range(3000)]
    some = edit_diff.compare(json.dumps(far), json.dumps([*far[:1500], -1, *far[1501:]])).lines
    assert [each for each in some if each.kind in ("old", "new")] == [
        ("old", "  1500,"),
        ("new", "  -1,"),
    ]
    assert [some[0].kind, some[-1].kind] == ["gap", "gap"]


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2000})
@cases(
    ("name", "text", "fault"),
    [
        ("payload", "{", "This is not JSON"),
        ("payload", "", "required"),
        ("payload", '{"a": NaN}', "NaN is not JSON"),
        ("payload", '"\\ud800"', "surrogate"),
        ("payload", '"' + "x" * 3000 + '"', "at most 2000"),
        ("payload", "[" * 150 + "]" * 150, "nested deeper than 100"),
        ("payload", "[" * 5000, "This is not JSON"),
        ("headers", "[]", "must be a JSON object"),
        ("headers", '{"a": 1}', "is not text"),
        ("headers", '{"a": "1", "a": "2"}', "unique keys"),
        ("headers", '{"a": null}', "is not text"),
        ("headers", "{", "are not JSON"),
        ("headers", '{"a": "\\ud800"}', "lone surrogate"),
    ],
    ids=range(13),
)
@undone()
def test_what_could_not_be_written_is_not_saved(name: str, text: str, fault: str) -> None:
    event = make()
    before = checksum()
    client = visitor("view", "edit")
    data = {**form_of(client, event), name: text}
    response = client.post(url_of("edit", event.pk), data)
    assert response.status_code == 200
    assert fault in html.unescape(response.content.decode())
    assert (checksum(), traces()) == (before, [])


@override_settings(OUTBOX=HIDING)
def test_hidden_values_are_kept_by_an_edit_and_no_mask_is_saved() -> None:
    event = make(payload=SECRETS, headers='{"X-API-Key":"s3cret5","region":"eu"}')
    client = visitor("view", "edit")
    data = form_of(client, event)
    assert "s3cret" not in json.dumps(data)
    assert '"X-API-Key": "•••1"' in data["headers"]
    data["payload"] = data["payload"].replace("Ann", "Bob").replace('"•••2"', '"new@example.org"')
    save(client, event, data)
    event.refresh_from_db()
    assert event.payload == SECRETS.replace("Ann", "Bob").replace("s3cret2", "new@example.org")
    assert event.headers == '{"X-API-Key":"s3cret5","region":"eu"}'
    assert "s3cret" not in LogEntry.objects.get().change_message


@override_settings(OUTBOX=HIDING)
@pytest.mark.parametrize(
    "change",
    [('"Ann"', '"•••1"'), ('"•••1"', '"•••9"'), ('"•••1"', '"•••"'), ('"Password"', '"note"')],
    ids=["shown elsewhere", "unknown", "bare", "renamed"],
)
def test_a_mask_that_would_show_a_value_or_be_saved_is_refused(change: tuple[str, str]) -> None:
    event = make(payload=SECRETS)
    before = checksum()
    client = visitor("view", "edit")
    data = form_of(client, event)
    data["payload"] = data["payload"].replace(*change)
    response = client.post(url_of("edit", event.pk), data)
    assert "contains a mask" in response.content.decode()
    assert checksum() == before


def test_an_edit_of_what_has_changed_meanwhile_is_refused() -> None:
    event = make()
    client = visitor("view", "edit")
    data = form_of(client, event)
    OutboxEvent.objects.update(payload='{"other":1}')
    response = client.post(url_of("edit", event.pk), {**data, "confirmed": "yes"})
    assert "gone or has changed meanwhile" in said(response)
    assert OutboxEvent.objects.get().payload == '{"other":1}'
    assert traces() == []


@pytest.mark.parametrize("status", [Status.NEW, Status.DONE, Status.RETRY])
def test_only_dead_events_are_edited(status: Status) -> None:
    event = make(status)
    before = checksum()
    client = visitor("view", "edit")
    assert client.get(url_of("edit", event.pk)).status_code == 302
    data = {"payload": "{}", "headers": "", "seen": editing.digest(event)}
    assert client.post(url_of("edit", event.pk), data).status_code == 302
    assert checksum() == before


def test_editing_needs_its_own_permission() -> None:
    event = make()
    before = checksum()
    client = visitor("view", "replay", "discard", "change")
    assert client.get(url_of("edit", event.pk)).status_code == 403
    data = {"payload": "{}", "headers": "", "seen": editing.digest(event)}
    assert client.post(url_of("edit", event.pk), data).status_code == 403
    assert url_of("edit", event.pk) not in body(client, reverse(PAGE, args=[event.pk]))
    strict = visitor("view", "edit", enforce_csrf_checks=True)
    assert strict.post(url_of("edit", event.pk), data).status_code == 403
    assert checksum() == before


# --- the history ----------------------------------------------------------------------------------


def test_the_page_tells_what_happened_in_order() -> None:
    clock = now()
    event = make(
        occurred_at=clock - timedelta(hours=5),
        created_at=clock - timedelta(hours=4),
        first_due_at=clock - timedelta(hours=3),
        done_at=clock - timedelta(hours=2),
    )
    client = visitor("view", "replay")
    press(client, "replay", event.pk)
    page = body(client, reverse(PAGE, args=[event.pk]))
    found = re.search(r'<table class="outbox-timeline">(.*?)</table>', page, re.DOTALL)
    assert found is not None
    told = re.findall(r"<td>([^<]+)</td><th>([^<]+)</th>", found[1])
    assert [said for _ago, said in told][:2] == ["occurred", "written"]
    assert [ago for ago, _said in told][:2] == ["5 h ago", "4 h ago"]
    assert any(said.endswith(": Replayed.") for _ago, said in told)


def test_the_page_tells_who_holds_an_event_and_whether_it_lives() -> None:
    later = now() + timedelta(seconds=20)
    event = make(Status.NEW, locked_by="host:1:x", locked_at=now(), available_at=later)
    keyed = make(Status.NEW, key="k", seq=1, available_at=None)
    OutboxStream.objects.create(key="k", seq=1, due_at=later, locked_by="host:1:x", locked_at=now())
    client = visitor("view")
    pages = [reverse(PAGE, args=[each.pk]) for each in (event, keyed)]
    for page in pages:
        assert "No live worker has this name" in body(client, page)
    OutboxWorker.objects.create(
        id="host:1:x", hostname="host", pid=17, started_at=now(), heartbeat_at=now()
    )
    for page in pages:
        assert "The worker is alive: host, process 17" in body(client, page)
    OutboxWorker.objects.update(heartbeat_at=now() - timedelta(hours=1))
    for page in pages:
        assert "The worker is lost: no heartbeat for" in body(client, page)


def test_a_sequence_number_and_a_missing_aggregate_are_no_noise() -> None:
    plain = make(aggregate_type="__GLOBAL__", aggregate_id=None)
    [pk] = keyed("k", event_type="order.placed")
    client = visitor("view")
    page = body(client, reverse(PAGE, args=[plain.pk]))
    assert "__GLOBAL__" not in page
    assert "field-seq" not in page
    assert "field-seq" in body(client, reverse(PAGE, args=[pk]))
