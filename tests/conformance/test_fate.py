"""What became of an event, asked of each database."""

from __future__ import annotations

from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStream
from tests.table import PLACED, insert, listening, now, write
from tests.test_pause import pause
from tests.test_stream_queryset import events, in_ten_minutes, put

pytestmark = pytest.mark.django_db(transaction=True)

DONE, RETRY, DEAD, NEW = Status.DONE, Status.RETRY, Status.DEAD, Status.NEW


def states(event_id: str) -> dict[str | None, str]:
    return {each.listener: each.state for each in outbox.fate(event_id)}


def test_each_listener_of_an_event_has_its_own() -> None:
    def mail(event: outbox.Event) -> None:
        raise ValueError("no")

    def audit(event: outbox.Event) -> None:
        pass

    with listening(audit, name="audit"), listening(mail, name="mail", retry=outbox.Fixed(600)):
        first, second = write(2)
        pause("listener", f"{PLACED} mail", reason="printer down")
        outbox.drain()
        assert states(first) == {f"{PLACED} audit": "done", f"{PLACED} mail": "held"}
        OutboxPause.objects.all().resume()
        outbox.drain()
        assert states(second) == {f"{PLACED} audit": "done", f"{PLACED} mail": "retrying"}
        rows = OutboxEvent.objects.of_event(first)
        [mailed] = rows.filter(listener=f"{PLACED} mail").values_list("pk", flat=True)
        [found] = outbox.fate(mailed) if mailed != first else outbox.fate(first)[:1]
        assert (found.id, found.attempts, found.reason) == (mailed, 1, "ValueError: no")
        rows.filter(listener=f"{PLACED} audit").delete()
        assert states(first) == {f"{PLACED} audit": "deleted", f"{PLACED} mail": "retrying"}
    assert {f"#{registry.digest(f'{PLACED} audit')}", f"{PLACED} mail"} == {*states(first)}


@pytest.mark.parametrize("head", [RETRY, DEAD])
def test_what_an_event_of_its_key_holds_names_that_event(settings: Any, head: Status) -> None:
    settings.OUTBOX = {"ON_DEAD": "block"}
    first, second = events("k", head, NEW, listener=f"{PLACED} mail", last_error="ValueError: no")
    due = in_ten_minutes() if head is RETRY else None
    put("k", due_at=due)
    [found] = outbox.fate(second)
    assert (found.state, found.until, found.by) == ("held", due, f"event {first}")
    [found] = outbox.fate(first)
    assert found.state == ("retrying" if head is RETRY else "dead")
    OutboxStream.objects.update(due_at=in_ten_minutes(), locked_by="w1", locked_at=now())
    assert [outbox.fate(each)[0].state for each in (first, second)] == [
        "leased" if head is RETRY else "dead",
        "waiting",
    ]


def test_an_open_breaker_and_a_lease_are_named() -> None:
    insert(event_id="e1", due=50, locked_by="w1", locked_at=now())
    insert(event_id="e2", queue="letters")
    until = in_ten_minutes()
    OutboxPause.objects.create(kind="breaker", name="letters", paused_at=now(), until=until)
    assert [(each.state, each.by) for each in outbox.fate("e1")] == [("leased", "w1")]
    [found] = outbox.fate("e2")
    assert (found.state, found.by, found.until) == ("held", "breaker letters", until)


def test_an_unknown_event_has_none_and_an_impossible_id_is_refused() -> None:
    insert(event_id="e10")
    assert outbox.fate("e1") == []
    with pytest.raises(outbox.InvalidEvent):
        outbox.fate("e\0")


def test_an_id_as_long_as_ours_is_first_looked_up_as_it_is_given() -> None:
    def found(event_id: str) -> list[str]:
        rows = [each.pk for each in OutboxEvent.objects.with_ids([event_id])]
        assert [each.id for each in outbox.fate(event_id)] == rows
        return rows

    upper, lower = "A" * 26, "a" * 26
    insert(event_id=upper)
    assert found(lower) == found(upper) == [upper]
    assert outbox.cancel(event_id=lower) == 0  # code knows how it is spelled
    insert(event_id=lower)
    assert (found(lower), found(upper)) == ([lower], [upper])
