"""The fence of a lease: what a worker does by an old lease leaves its newer one of the same row."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from django_outbox.listeners.history import Entry
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.listeners.queues import Route
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql.values import STREAMS as STREAM_TABLE
from django_outbox.sql.values import Ending, LeaseKind, Release, StreamQuery, Unclaimed
from tests.cases import cases
from tests.table import (
    claim,
    endings,
    insert,
    keyed,
    leases,
    now,
    row,
    stream_claim,
    stream_leases,
    undone,
)

pytestmark = pytest.mark.django_db(transaction=True)

RETRY = Decision(status=Status.RETRY, delay=5.0, spent=1, error="it failed", outcome="retry")
DEAD = Decision(status=Status.DEAD, error="it is over", outcome="dead")
ROUTE = Route("order.placed", "a" * 16, "default", "")
Act = Callable[[Any, str, Any], Any]  # by the dialect, on a row or stream, and when it was leased


def settled(decision: Decision, **more: Any) -> Act:
    def act(d: Any, each: str, at: Any, **kind: Any) -> Any:
        given = [Ending(each, at, 0, decision)]
        return d.settle_all(me="me", endings=given, **kind, **more)

    return act


def noted(d: Any, each: str, at: Any, **kind: Any) -> Any:
    entry = Entry(at=now(), kind="lost", number=1, by="w")
    return d.note_lost(me="me", leases={each: at}, entry=entry, **kind)


def routed(d: Any, each: str, at: Any, **kind: Any) -> Any:
    held = {each: at}
    return d.route_rows(me="me", leases=held, route=ROUTE, receipt="r", **kind)


def put_back(d: Any, each: str, at: Any) -> bool:
    d.unclaim(me="me", due=[Unclaimed(each, at, now(), "b")])
    return row(each).locked_by is None


DONE_BY: dict[str, Any] = {"done": settled(DONE), "deleted": settled(DONE, delete_done=True)}
EITHER: dict[str, Any] = {
    "retried": settled(RETRY),
    "dead": settled(DEAD),
    "noted in the history": noted,
    "routed": routed,
}
ROWS: dict[str, Act] = {
    **EITHER,
    "renewed": lambda d, each, at: d.renew(me="me", leases={each: at}, lease=90)[1],
    "released": lambda d, each, at: d.release(me="me", leases={each: at}),
    "put back": put_back,
}
KEYED: dict[str, Any] = {**EITHER}
STREAMS: dict[str, Act] = {
    "read": lambda d, each, at: d.read_streams(StreamQuery(me="me", streams={each: at}, limit=9)),
    "renewed": lambda d, each, at: d.renew(
        me="me", leases={each: at}, lease=90, table=STREAM_TABLE
    )[1],
    "released": lambda d, each, at: d.release_streams(
        me="me", streams=[Release(each, at, None, 0.0)]
    ),
    "kept suspected": lambda d, each, at: d.keep_suspected(me="me", leases={each: at}, rescues=2),
    "handed back": lambda d, each, at: d.release(
        me="me", leases={each: at}, after=1.0, table=STREAM_TABLE
    ),
}


def dialect() -> Any:
    return dialect_of(connection)


def tables() -> list[dict[str, Any]]:
    return [*OutboxEvent.objects.values(), *OutboxStream.objects.values()]


def take_streams() -> None:
    assert dialect().claim(stream_claim("me")).rows


def leased_event() -> tuple[str, Any]:
    [event_id] = insert(due=-1)
    claim("me")
    return event_id, leases([event_id])[event_id]


def leased_stream() -> tuple[str, Any]:
    keyed("a", rescues=1)
    take_streams()
    return ":a", stream_leases([":a"])[":a"]


def only_by_the_present_lease(act: Act, given: str, leased_at: Any, **kind: Any) -> None:
    before, old = tables(), leased_at - timedelta(seconds=30)
    assert not act(dialect(), given, old, **kind)
    assert tables() == before
    assert act(dialect(), given, leased_at, **kind)


@cases("name", ROWS, ids=ROWS)
def test_a_row_is_changed_only_by_its_present_lease(name: str) -> None:
    with undone():
        only_by_the_present_lease(ROWS[name], *leased_event())


@cases("name", KEYED, ids=KEYED)
def test_the_row_of_a_key_is_changed_only_by_the_present_lease_of_its_stream(name: str) -> None:
    with undone():
        _, leased_at = leased_stream()
        event_id = OutboxEvent.objects.get().pk
        only_by_the_present_lease(KEYED[name], event_id, leased_at, kind=LeaseKind.STREAM)


@cases("name", DONE_BY, ids=DONE_BY)
def test_what_is_done_is_settled_whichever_of_its_leases_the_worker_has_now(name: str) -> None:
    """A claim of this worker may have leased the row anew while its listener ran."""
    for kind, leased in ((LeaseKind.ROW, leased_event), (LeaseKind.STREAM, leased_stream)):
        with undone():
            _, leased_at = leased()
            event_id = OutboxEvent.objects.get().pk
            before = tables()
            given = [Ending(event_id, leased_at, 0, DONE)]
            more = {"delete_done": name == "deleted", "kind": kind}
            assert not dialect().settle_all(me="another", endings=given, **more)
            assert tables() == before
            old = leased_at - timedelta(seconds=30)
            assert DONE_BY[name](dialect(), event_id, old, kind=kind) == 1


@cases("name", STREAMS, ids=STREAMS)
def test_a_stream_is_changed_only_by_its_present_lease(name: str) -> None:
    with undone():
        only_by_the_present_lease(STREAMS[name], *leased_stream())


@pytest.mark.parametrize("decision", [RETRY, DEAD], ids=["retry", "dead"])
def test_a_failure_is_settled_by_its_own_lease_and_not_by_one_of_its_batch(
    decision: Decision,
) -> None:
    """Otherwise a call by an old lease would end the call that runs."""
    old, new = insert(2, due=-1)
    claim("me")
    first, second = endings([(old, decision), (new, decision)])
    late = first._replace(locked_at=first.locked_at - timedelta(seconds=30))
    assert dialect().settle_all(me="me", endings=[late, second]) == 1
    assert (row(old).locked_by, row(new).locked_by) == ("me", None)


@pytest.mark.parametrize("decision", [RETRY, DEAD], ids=["retry", "dead"])
def test_a_failure_counts_once_though_its_stream_is_still_leased(decision: Decision) -> None:
    """A settle whose answer was lost is repeated."""
    leased_stream()
    [event_id] = OutboxEvent.objects.values_list("pk", flat=True)
    [ending] = endings([(event_id, RETRY)])
    repeated = [ending, ending._replace(decision=decision)]
    settle = {"me": "me", "kind": LeaseKind.STREAM}
    assert [dialect().settle_all(endings=[each], **settle) for each in repeated] == [1, 0]
    assert (row(event_id).attempts, row(event_id).status) == (1, Status.RETRY)


def test_each_claim_is_a_lease_of_its_own() -> None:
    """Also of what its worker leased: a statement of the older lease may still be on its way."""
    event_id, _ = leased_event()
    leased_stream()
    later = now() - timedelta(seconds=1)
    OutboxEvent.objects.filter(pk=event_id).update(available_at=later, locked_at=later)
    OutboxStream.objects.update(due_at=later, locked_at=later)
    claim("me")
    take_streams()
    assert leases([event_id])[event_id] > later
    assert stream_leases([":a"])[":a"] > later
