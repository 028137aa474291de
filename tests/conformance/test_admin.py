"""The admin's queries on each database: dates, filters, locks."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox.admin import event_admin
from django_outbox.events import least_id, new_id
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxStream, bulk
from django_outbox.models.bulk import work_off
from tests import table
from tests.cases import cases
from tests.table import undone
from tests.test_admin import (
    HOUR,
    LIST,
    NOW,
    PAGE,
    VERBS,
    act,
    all_url,
    body,
    listed,
    make,
    operation,
    said,
    traces,
    visitor,
)

pytestmark = pytest.mark.django_db

KATHMANDU = timezone(timedelta(hours=5, minutes=45))  # TIME_ZONE of the tests


@pytest.mark.parametrize("verb", VERBS)
def test_an_event_revived_between_look_and_lock_is_left_alone(verb: str) -> None:
    """An event that another user replays first is skipped: not undone, and not logged as ours."""
    ours, theirs = make(), make()
    client = visitor("view", verb)

    def interfere(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if theirs.pk in (params or ()) and "= 3" in sql:
            looked.append(sql)
        if faster and looked and sql.startswith("SAVEPOINT"):
            faster.pop().replay()
        return execute(sql, params, many, context)

    looked: list[str] = []
    faster = [OutboxEvent.objects.filter(pk=theirs.pk)]
    with connection.execute_wrapper(interfere):
        response = act(client, verb, ours, theirs)
    assert "1 was skipped because it is gone or has changed meanwhile." in said(response)
    log = OutboxOperation.objects.exclude(by="")
    assert [*log.values_list("kind", "done")] == [(verb, 1)]
    assert OutboxEvent.objects.get(pk=theirs.pk).status == Status.NEW


def test_all_that_match_are_worked_off_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that do not match stay unchanged."""
    monkeypatch.setattr(bulk, "BATCH_SIZE", 2)
    events = [make(event_type="a") for _ in range(5)]
    others = [make(event_type="b").pk, make(Status.DONE, event_type="a").pk]
    client = visitor("view", "replay")
    data = {"action": "replay", "select_across": "1", "_selected_action": events[0].pk}
    response = client.post(f"{reverse(LIST)}?event_type=a", {**data, "index": "0"})
    assert response.url == f"{all_url('replay')}?event_type=a"
    client.post(response.url, {"rate": ""})
    assert traces() == []
    while work_off(OutboxOperation.objects.get().pk, connection).wait == 0:
        continue
    rest = OutboxEvent.objects.exclude(status=Status.NEW).order_by("pk")
    assert [each.pk for each in rest] == others
    assert operation() == ("replay", 5, "event type: a")


def test_what_somebody_else_has_locked_is_left_to_them() -> None:
    """Rows that another transaction has locked are skipped, so that the action does not wait."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has no SKIP LOCKED")
    assert "SKIP LOCKED" in " ".join(
        each["sql"] for each in queries_of(lambda: act(visitor("view", "replay"), "replay", make()))
    )


def test_streams_are_locked_before_the_events_in_them() -> None:
    """A cancel does the same: otherwise each could wait for the other."""
    event = make(key="k", stream=":k", seq=1)
    sent = queries_of(lambda: act(visitor("view", "replay"), "replay", event))
    locking = re.compile("(INSERT|UPDATE).*outbox_|SELECT.*outbox_.* FOR UPDATE", re.DOTALL)
    assert "outbox_stream" in next(each["sql"] for each in sent if locking.match(each["sql"]))


def queries_of(work: Callable[[], Any]) -> list[dict[str, str]]:
    with CaptureQueriesContext(connection) as sent:
        work()
    return sent.captured_queries


@pytest.mark.parametrize("use_tz", [True, False])
def test_times_are_right_with_and_without_time_zones(settings: Any, use_tz: bool) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    settings.USE_TZ = use_tz
    event = make(done_at=at, created_at=at)
    client = visitor("view")
    page = body(client, reverse(PAGE, args=[event.pk]))
    assert page.count("2026-01-02 08:49:05.000+05:45") == 3
    assert at.astimezone(KATHMANDU).isoformat(" ", "milliseconds") in body(client, reverse(LIST))
    assert act(visitor("view", "replay"), "replay", event).status_code == 302
    assert not OutboxEvent.objects.dead().exists()


@cases("use_tz", [True, False])
@cases(
    ("lookup", "value", "found"),
    [
        ("created_at__gte", "2026-01-02 03:04:00+00:00", True),
        ("created_at__gte", "2026-01-02 03:05:00+00:00", False),
        ("created_at__lt", "2026-01-02 03:05:00+00:00", True),
        ("created_at__year", "2026", True),
        ("created_at__year", "2025", False),
        ("done_at__isnull", "0", True),
    ],
)
@undone()
def test_date_lookups(settings: Any, use_tz: bool, lookup: str, value: str, found: bool) -> None:
    settings.USE_TZ = use_tz
    make(created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))
    assert bool(listed(visitor("view"), **{lookup: value})) is found


def test_filter_by_state() -> None:
    """Each state lists only its own events, and pending events in the order of delivery."""
    later, lease = NOW + timedelta(hours=1), {"locked_by": "w", "available_at": NOW + HOUR / 2}
    expected = {
        "due": [make(Status.NEW, available_at=NOW - HOUR).pk, make(Status.RETRY).pk],
        "scheduled": [make(Status.NEW, available_at=later).pk],
        "retrying": [make(Status.RETRY, available_at=later + n * HOUR).pk for n in range(2)],
        "leased": [make(Status.NEW, **lease).pk, make(Status.RETRY, **lease).pk],
        "paused": [make(Status.NEW, available_at=NOW - HOUR, queue="paused:7").pk],
        "blocked": keyed_events("k", Status.RETRY, Status.NEW),
        "done": [make(Status.DONE).pk],
        "dead": [make().pk, make(key="other", seq=1).pk][::-1],
    }
    client = visitor("view", "replay")
    for state, ids in expected.items():
        assert listed(client, state=state) == ids, state
    offered = body(client, reverse(LIST))
    assert {*re.findall(r'\?state=(\w+)"', offered)} == {*expected}
    assert len(listed(client)) == sum(map(len, expected.values()))


def keyed_events(key: str, *statuses: Status) -> list[str]:
    """Insert events of a stream whose head waits for its next attempt."""
    OutboxStream.objects.create(stream=f":{key}", key=key, seq=len(statuses), due_at=NOW + HOUR)
    places = enumerate(statuses, 1)
    columns = {"key": key, "stream": f":{key}", "available_at": None}
    return [make(each, seq=seq, **columns).pk for seq, each in places]


@cases("state", ["due", "leased", "scheduled", "retrying", "blocked", "dead"])
@undone()
def test_a_state_and_a_time_together(state: str) -> None:
    """Both filters apply, whichever of them an index serves."""
    soon, held = table.now() + HOUR, {"locked_by": "w", "locked_at": NOW}
    fields: dict[str, Any] = {
        "due": {"status": Status.NEW},
        "leased": {"status": Status.NEW, "available_at": soon, **held},
        "scheduled": {"status": Status.NEW, "available_at": soon},
        "retrying": {"status": Status.RETRY, "available_at": soon},
        "blocked": {"status": Status.NEW, "available_at": None, "key": "k", "stream": ":k"},
        "dead": {"status": Status.DEAD},
    }[state]
    if state == "blocked":
        OutboxStream.objects.create(stream=":k", key="k", seq=9, due_at=soon)
    old = least_id(table.now() - timedelta(days=2))
    for number, pk in enumerate((old, new := new_id())):
        make(event_id=pk, seq=number if state == "blocked" else None, **fields)
    client = visitor("view")
    assert {*listed(client, state=state)} == {old, new}
    assert listed(client, state=state, written="hour") == [new]


def test_the_page_of_an_event_shows_those_before_and_after_it_also_done_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = table.keyed("k", 9)
    table.keyed("other", 2)
    OutboxEvent.objects.filter(pk__in=[*ids[:4], ids[5]]).update(status=Status.DONE)

    def shown() -> list[str]:
        page = body(visitor("view"), reverse(PAGE, args=[ids[4]]))
        linked = re.findall(r"outboxevent/(\w+)/change", page.partition("same key")[2])
        return sorted({*linked} - {ids[4]})

    assert shown() == [*ids[1:4], *ids[5:8]]
    monkeypatch.setattr(event_admin, "NEAR", 1)
    assert shown() == [ids[3], *ids[5:8]]
