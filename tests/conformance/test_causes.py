"""Causes of dead events: which errors are the same, and their counts."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_outbox.inspection import causes
from django_outbox.inspection.causes import add_examples, find_cause, load_causes
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.plans import effort
from tests.table import dead, insert, now

pytestmark = pytest.mark.django_db

REFUSED = (
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='{host}', port=443): Max "
    "retries exceeded with url: /orders/{order}?token={order} (Caused by NewConnectionError("
    "'<urllib3.connection.HTTPSConnection object at 0x7f8e1c{order}e50>: Failed'))"
)
FAILED = "HTTPError: 503 Server Error: Service Unavailable for url: https://{host}/orders/{order}"
UUIDS = "3f2b1c4d-1a2b-4c3d-8e9f-0a1b2c3d4e5f", "abcdefab-cdef-abcd-efab-cdefabcdefab"

SAME = {
    "number": ("ValueError: order 17 is unknown", "ValueError: order 4711 is unknown"),
    "decimal": ("ValueError: 12.50 EUR", "ValueError: 1,200 EUR"),
    "uuid": tuple(f"ValueError: no customer {each}" for each in UUIDS),
    "event id": ("E: 01KAW3J5Q8ZV7N2M4X6R9T0BCD", "E: 01JD3KXYZ8ZV7N2M4X6R9T0AAA"),
    "hex id": ("E: commit 9fceb02d0a", "E: commit 1e0f55cbaa77"),
    "address": ("E: <Order object at 0x7f8e1c2d3e50>", "E: <Order object at 0xdeadbeef>"),
    "quoted": ("E: no user 'Ann Lee'", "E: no user 'Björn O'Hara'"),
    "double quotes": ('E: "a@b.example" is taken', 'E: "c@d.example" is taken'),
    "bytes": (r"E: b'\x00 a' is no text", "E: b'1 b' is no text"),
    "list": ("E: ids [1, 2, 3] are unknown", "E: ids [7] are unknown"),
    "cut off": ("E: no user 'Ann Lee' here"[:18], "E: no user 'A 1"),
    "traceback": ("E: no\nTraceback, line 17", "E: no\nTraceback of another"),
    "requests": tuple(REFUSED.format(host="a.example", order=each) for each in (123, 4567)),
    "status": tuple(FAILED.format(host="a.example", order=each) for each in (123, 4567)),
    "in a sentence": (
        "E: (1062, \"Duplicate entry '17' for key 'order.number'\")",
        "E: (1062, \"Duplicate entry 'x 18' for key 'order.number'\")",
    ),
}
OTHERS = {
    "class": ("ValueError: no", "KeyError: no"),
    "host": tuple(FAILED.format(host=each, order=1) for each in ("a.example", "b.example")),
    "quoted host": tuple(REFUSED.format(host=each, order=1) for each in ("a.example", "host-b")),
    "quoted URL": ("E: url 'https://a.example/1'", "E: url 'https://b.example/1'"),
    "attribute": ("E: 'Order' has no 'price'", "E: 'Order' has no 'total'"),
    "key": ("KeyError: 'sku'", "KeyError: 'price'"),
    "word of hex letters": ("E: facade is bad", "E: decade is bad"),
    "letter": ("E: shard a is away", "E: shard b is away"),
    "sentence": ("E: (2, 'the server has gone')", "E: (2, 'the lock was not free')"),
    "HTTP status": (
        "E: Server error '503 Service Unavailable' for url 'https://a.example/'",
        "E: Server error '502 Bad Gateway' for url 'https://a.example/'",
    ),
    "nothing": ("", "E"),
}


def test_causes_are_counted_with_their_types_largest_first() -> None:
    clock = now()
    old = clock - timedelta(hours=3)
    dead(2, "ValueError: order 17 is unknown", done_at=old)
    dead(2, "ValueError: order 18 is unknown", event_type="parcel.requested")
    dead(1, "ValueError: order 19 is unknown", event_type="parcel.requested", key="k", seq=1)
    (other,) = dead(1, "KeyError: 'sku'")
    dead(1, None)
    insert(3, last_error="KeyError: 'sku'")  # waits
    found = load_causes("default", limit=2)
    assert (found.others, found.total) == (1, 7)
    first, second = found.causes
    assert (first.error, first.message) == ("ValueError", "order # is unknown")
    assert (first.title, first.count) == ("ValueError: order # is unknown", 5)
    assert [*first.types.items()] == [("parcel.requested", 3), ("order.placed", 2)]
    add_examples("default", found.causes)
    assert first.example == "ValueError: order 19 is unknown"  # the newest
    assert first.oldest is not None and abs(first.oldest - old) < timedelta(seconds=1)
    assert first.newest is not None and abs(first.newest - clock) < timedelta(seconds=1)
    assert second.count == 1
    [nameless] = [each for each in load_causes("default", limit=9).causes if not each.title]
    assert (nameless.count, nameless.example) == (1, "")
    of_rows = load_causes("default", limit=9, rows=OutboxEvent.objects.filter(pk=other))
    assert [(each.title, each.count) for each in of_rows.causes] == [("KeyError: 'sku'", 1)]


@pytest.mark.parametrize(("bound", "more"), [(2, "5+ 1+"), (3, "6+ 2+"), (4, "6 2")])
def test_a_count_of_causes_that_is_ended_is_said_to_be_more(
    bound: int, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(causes, "MAX_GROUPS", bound)
    for count, error in enumerate(("KeyError", "OSError", "ValueError"), 1):
        dead(count, error)
    found = load_causes("default", limit=1)
    assert f"{found.total} {found.others}" == f"{found.lately} {found.others}" == more
    call_command("outbox_dead", "list", "--limit=1")
    assert f"further causes: {more.split()[1]};" in capsys.readouterr().out


def test_listeners_that_gave_up_are_named() -> None:
    for event_type in ("order.placed", "order.paid"):
        dead(1, "OSError: 1", event_type=event_type, listener=f"{event_type} mail")
        insert(1, due=None, status=Status.DONE, event_type=event_type, listener=f"{event_type} x")
    [cause] = load_causes("default", limit=9).causes
    assert {*cause.listeners} == {"order.placed mail", "order.paid mail"}


def test_a_digest_finds_the_cause_and_its_events_only() -> None:
    ids = [dead(1, f"ValueError: order {n} is unknown")[0] for n in range(5)]
    dead(1, "ValueError: order x is unknown"), dead(1, "ValueErrors: order 1")
    insert(1, last_error="ValueError: order 1 is unknown")
    cause = load_causes("default", limit=1).causes[0]
    found = find_cause("default", cause.digest)
    assert found is not None and found.title == cause.title and cause.count == 5
    dead_of_it = OutboxEvent.objects.dead().filter(found.condition)
    assert {each.pk for each in dead_of_it} == {*ids}
    assert find_cause("default", "0" * 16) is None


def test_causes_of_the_last_hour_come_first() -> None:
    hour = timedelta(hours=1)
    dead(3, "ValueError: a", done_at=now() - 2 * hour)
    dead(2, "ValueError: b", done_at=now() - hour / 2)
    dead(1, "ValueError: c")
    dead(1, "ValueError: c", key="k", seq=1)
    dead(2, "ValueError: c", done_at=now() - 2 * hour)
    for rows in (None, OutboxEvent.objects.all()):
        found = load_causes("default", limit=9, rows=rows).causes
        assert [(each.message, each.count, each.lately) for each in found] == [
            ("c", 4, 2),
            ("b", 2, 2),
            ("a", 3, 0),
        ]


def test_a_class_of_errors_is_one_cause_where_every_text_differs() -> None:
    """Of one listener; what many deliveries share, or another listener has, stays apart."""
    mail = {"listener": "order.placed mail"}
    ids = [dead(1, f"ValueError: {chr(97 + n)}", **mail)[0] for n in range(25)]
    others = [*dead(1, "ValueError: a"), *dead(1, "KeyError: a", **mail)]
    found = load_causes("default", limit=9)
    first = found.causes[0]
    assert (first.title, first.count, first.texts, len(found.causes)) == ("ValueError", 25, 25, 3)
    assert {*OutboxEvent.objects.dead().filter(first.condition)} == {
        *OutboxEvent.objects.filter(pk__in=ids)
    }
    for each in found.causes:
        again = find_cause("default", each.digest)
        assert again is not None and again.condition == each.condition
    same = OutboxEvent.objects.dead().filter(found.causes[-1].condition)
    assert [each.pk for each in same] == others[:1]
    dead(30, "ValueError: a", **mail)  # now two in three have a text of their own
    assert len(load_causes("default", limit=99).causes) == 26


def test_the_number_of_queries_is_bounded() -> None:
    for n in range(30):
        dead(1, f"ValueError: {chr(97 + n % 26)}", event_type=f"type.{n}")
    with CaptureQueriesContext(connection) as captured:
        load_causes("default", limit=20)
    assert len(captured) == 3


def test_causes_with_texts_of_their_own_are_read_but_once() -> None:
    """The statement does not group by what differs: that took several times as long."""
    mail = {"listener": "order.placed mail"}
    dead(300, "ValueError: no", **mail)
    same = effort(lambda: load_causes("default", limit=20))
    for n, row in enumerate(OutboxEvent.objects.dead()):
        row.cause = f"ValueError: {chr(97 + n // 26)}{chr(97 + n % 26)}"
        row.save()
    differ = effort(lambda: load_causes("default", limit=20))
    assert differ < 1.3 * same
    [cause] = load_causes("default", limit=20).causes
    assert (cause.title, cause.count) == ("ValueError", 300)
