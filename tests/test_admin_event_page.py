"""The page of an event in the admin: hidden values, and the history."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest
from django.contrib.admin.utils import quote
from django.test import Client, override_settings
from django.urls import reverse

from django_outbox.admin import redaction
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream, OutboxWorker
from tests.cases import cases
from tests.table import keyed, now, undone
from tests.test_admin import LIST, PAGE, body, make, press, visitor

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
EVENT = "admin:django_outbox_outboxevent"
HIDING = {"REDACT": ["password", "Customer.Email", "x-api-key"]}
SECRETS = (
    '{"price":1.10,"Password":"s3cret1","customer":{"email":"s3cret2","name":"Ann"},'
    '"email":"shown","list":[{"password":["s3cret3"]},{"password":{"deep":"s3cret4"}}]}'
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
def test_no_page_shows_a_hidden_value_of_an_error(admin_client: Client) -> None:
    error = 'HTTPError: 400 {"password": "s3cret"}\nHTTPError: password=s3cret'
    keyed("k", event_type="order.placed", last_error=error, status=Status.RETRY, attempts=1)
    event = make(last_error=error, status=Status.DEAD)
    make(last_error=error, event_id=event.event_id, id=f"{event.event_id}.1")  # its table of both
    pages = (
        reverse(PAGE, args=[event.pk]),
        f"{reverse(LIST)}?state=dead",
        reverse(GROUPS),
        f"{reverse(STREAMS)}?state=all",
        reverse(STREAM, args=[quote(":k")]),
        reverse(DASHBOARD),
    )
    for url in pages:
        page = body(admin_client, url)
        assert "s3cret" not in page, url
        assert "HTTPError" in page, url


@pytest.mark.parametrize("name", ["payload__startswith", "headers", "result__contains"])
def test_no_filter_reads_a_long_text(name: str) -> None:
    make(payload='{"password":"s3cret"}')
    page = body(visitor("view"), reverse(LIST), **{name: "{"})
    assert "this filter is not possible" in page
    assert "outbox-id" not in page


@pytest.mark.parametrize("lookup", ["last_error", "last_error__startswith", "last_error__contains"])
def test_no_filter_guesses_a_hidden_value_of_an_error(lookup: str) -> None:
    make(last_error="HTTPError: password=s3cret", status=Status.DEAD)
    client, url = visitor("view"), f"{reverse(LIST)}?{lookup}=HTTPError: password=s3cret"
    assert client.get(url).status_code == 200
    with override_settings(OUTBOX=HIDING):
        page = body(client, url)
        assert "this filter is not possible" in page
        assert "outbox-id" not in page


@override_settings(OUTBOX=HIDING)
@cases(
    "text",
    ['{"a":1.10,"b":[1E+400,{}],"c":{"":[[]]}}', "[]", '"x"', "12345678901234567890.0", "null"],
)
def test_what_is_not_hidden_is_shown_unchanged(text: str) -> None:
    assert "".join(redaction.hide_in_json(text).split()) == text


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
    keyed = make(Status.NEW, key="k", stream=":k", seq=1, available_at=None)
    OutboxStream.objects.create(
        stream=":k", key="k", seq=1, due_at=later, locked_by="host:1:x", locked_at=now()
    )
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


# --- what holds it --------------------------------------------------------------------------------


@cases("way", ["queue", "event_type", "breaker"])
@undone()
def test_what_a_pause_holds_offers_neither_a_run_nor_another_pause(way: str) -> None:
    """It says by what and until when, in the list and on its page, which leads to the pause."""
    keyed("k", event_type="order.placed", status=Status.RETRY, attempts=1)
    held = [make(Status.NEW).pk, OutboxEvent.objects.get(key="k").pk]
    client = visitor("view", "replay", "discard", "pause_outboxpause")
    urls = [reverse(PAGE, args=[each]) for each in held]
    run = reverse(f"{EVENT}_run_now", args=[held[1]])
    assert run in body(client, urls[1])
    assert all("outboxpause/add/?kind" in body(client, url) for url in urls)
    name, until = "order.placed" if way == "event_type" else "default", now() + timedelta(hours=9)
    OutboxPause.objects.create(
        kind=way, name=name, reason="printer <down>", paused_at=now(), until=until
    )
    for page in (body(client, url) for url in urls):
        assert "printer &lt;down&gt;" in page
        assert f'datetime="{until.isoformat()}"' in page
        assert reverse("admin:django_outbox_outboxpause_changelist") in page
        assert run not in page
        assert "outboxpause/add/?kind" not in page
    assert body(client, reverse(LIST)).count("printer &lt;down&gt;") == 2


@cases("status", Status)
@undone()
def test_the_page_says_what_happens_next(status: Status) -> None:
    page = body(visitor("view"), reverse(PAGE, args=[make(status, listener="order.placed").pk]))
    found = re.search(r'class="outbox-actions[^>]*>\s*<p>(.+?)</p>', page)
    assert bool(found) is (status != Status.DONE)
