"""A row that the database refuses holds up no other, whatever it raises; nothing counts twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.db import DataError, OperationalError

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxInbox
from tests.faulty import ERRORS, Fault, failing
from tests.surroundings import by_whom, deliver
from tests.table import (
    history,
    insert,
    listening,
    now,
    purging,
    rest_of,
    row,
    statuses,
    stream,
    write,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


TWICE = outbox.Fixed(delay=0, max_attempts=2)


SKULL = "\N{SKULL AND CROSSBONES}"


SETTLE = r"last_error = COALESCE"


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2, "LEASE": 6}


def bad(event: outbox.Event) -> None:
    """Fail, with a text that is refused every third time."""
    raise ValueError(f"grün {SKULL if event.payload['n'] % 3 == 0 else ''}")


def calls_of(event_id: str) -> list[tuple[str, int]]:
    return [(each.kind, each.number) for each in history(event_id)]


@by_whom
@pytest.mark.parametrize("error", ERRORS)
def test_a_text_that_is_refused_is_stored_in_ascii(error: str, by_drain: bool) -> None:
    with listening(bad, retry=TWICE), failing(Fault(SETTLE, ERRORS[error], text=SKULL)) as fault:
        ids = write(7)
        deliver(until={"DEAD": 7}, by_drain=by_drain)
    assert fault.count
    for number, event_id in enumerate(ids):
        found = row(event_id)
        assert found.attempts == 2
        assert calls_of(event_id) == [("failed", 1), ("dead", 2)]
        assert found.last_error is not None
        assert found.last_error.isascii() == (number % 3 == 0)
        assert len(found.last_error) > 10


@by_whom
def test_an_event_with_a_key_too(by_drain: bool) -> None:
    with listening(bad, retry=TWICE), failing(Fault(SETTLE, ERRORS["RuntimeError"], text=SKULL)):
        for key in ("a", "b", "c"):
            write(2, key=key)
        deliver(until={"DEAD": 6}, by_drain=by_drain)


@by_whom
@pytest.mark.parametrize("size", [None, 2], ids=["alone", "in a batch"])
def test_what_an_atomic_listener_answers_too(size: int | None, by_drain: bool) -> None:
    """Its changes are committed although its reason is refused."""

    def give_up(given: Any) -> Any:
        for event in [given] if size is None else given:
            OutboxInbox.objects.create(source="x", message_id=event.event_id, received_at=now())
        return outbox.Dead(SKULL) if size is None else [outbox.Dead(SKULL)] * len(given)

    options: dict[str, Any] = {} if size is None else {"batch": size}
    with (
        listening(give_up, atomic=True, **options),
        failing(Fault(SETTLE, ERRORS["DataError"], text=SKULL)),
    ):
        write(4)
        deliver(until={"DEAD": 4}, by_drain=by_drain)
    assert {*OutboxEvent.objects.values_list("last_error", flat=True)} == {"?"}
    assert OutboxInbox.objects.count() == 4


@by_whom
@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_that_is_refused_in_any_form_stays_leased_alone(
    count: int, key: str | None, by_drain: bool
) -> None:
    calls: list[str] = []

    def listen(event: outbox.Event) -> Any:
        calls.append(event.event_id)
        sum(range(200_000))  # a few milliseconds, so that its thread waits for the settle
        return outbox.Dead("over") if event.payload["n"] < 0 else None

    insert(count, payload='{"n": -1}')
    with listening(listen):
        fault = Fault(SETTLE, ERRORS["DataError"])
        with failing(fault):
            if by_drain:
                write(5, key=key)
                outbox.drain()
                assert statuses() == {"DONE": 5, "NEW": count}
                fault.stop()
            else:
                with outbox.Worker(workers=1) as worker:
                    wait_until(lambda: fault.count, what="a refusal")
                    for _ in range(3):
                        write(5, key=key)
                    wait_until(lambda: statuses() == {"DONE": 15, "NEW": count})
                    wait_until(lambda: worker.health().is_ready)
                    fault.stop()
                    wait_until(lambda: statuses() == {"DONE": 15, "DEAD": count})
    assert max(Counter(calls).values()) == 1


def test_a_drain_leaves_the_key_of_a_refused_decision_leased() -> None:
    """Its event is still pending, so that its stream must not be idle."""
    with (
        listening(lambda event: outbox.Dead("over") if event.key else None),
        failing(Fault(SETTLE, ERRORS["DataError"])),
    ):
        write(key="k")
        write(5)
        outbox.drain()
    assert statuses() == {"DONE": 5, "NEW": 1}
    assert stream("k").locked_by is not None


@by_whom
@pytest.mark.parametrize("what", ["DONE", "DEAD"])
def test_a_settle_whose_answer_is_lost_counts_once(what: str, by_drain: bool) -> None:
    def lost() -> Exception:
        return OperationalError(2013, "Lost connection during query")

    def listen(event: outbox.Event) -> None:
        if what == "DEAD":
            raise ValueError

    where = SETTLE if what == "DEAD" else r"status = 1|DELETE"
    fault = Fault(where, lost, times=3, after=True)
    with listening(listen, retry=outbox.Fixed(0, max_attempts=4)), failing(fault):
        ids = write(6)
        deliver(until={what: 6}, by_drain=by_drain)
    assert fault.count == 3
    attempts = 4 if what == "DEAD" else 0
    assert [row(each).attempts for each in ids] == [attempts] * 6
    expected = [*[("failed", n) for n in range(1, attempts)], ("dead", attempts)] * (what == "DEAD")
    assert [calls_of(each) for each in ids] == [expected] * 6


def test_a_row_that_cannot_be_deleted_keeps_no_other(settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0, "RETENTION_INBOX": 0, "PURGE_BATCH_SIZE": 4}
    ids = insert(10, due=None, status=1, done_at=now())
    OutboxInbox.objects.create(source="x", message_id="1", received_at=now())
    with failing(Fault(r"DELETE.*outbox_event\b", ERRORS["IntegrityError"], text=ids[5])) as fault:
        rest_of(purging(3600))
    assert fault.count
    assert [*OutboxEvent.objects.values_list("pk", flat=True)] == [ids[5]]
    assert not OutboxInbox.objects.exists()


def test_a_table_that_cannot_be_purged_keeps_no_other(settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0, "RETENTION_INBOX": 0}
    insert(10, due=None, status=1, done_at=now())
    OutboxInbox.objects.create(source="x", message_id="1", received_at=now())
    purger = purging(3600)
    no_delete = Fault(r"DELETE.*outbox_event\b", ERRORS["DataError"])
    with failing(no_delete), pytest.raises(DataError):
        purger.run()
    assert OutboxEvent.objects.count() == 10
    assert not OutboxInbox.objects.exists()
