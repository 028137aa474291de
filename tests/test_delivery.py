"""Delivery of one event: every return value, every exception and every unreadable row."""

from __future__ import annotations

import asyncio
import gc
from contextvars import copy_context
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox.delivery.call import Call, drain_ending_errors
from django_outbox.delivery.delivery import Delivery
from django_outbox.delivery.drivers import adrive, drive
from django_outbox.delivery.lease import Lease
from django_outbox.delivery.route import is_async
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from django_outbox.sql.values import Branch, Claim
from django_outbox.worker import intake
from django_outbox.worker.effects import perform
from tests.table import PLACED, endings, events_of, insert, listening, now, row, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db


def leases(limit: int = 100) -> list[Lease]:
    """Claim what is due, and route it."""
    claim = Claim(me="me", lease=30, branches=[Branch("default", limit)])
    found = events_of(dialect_of(connection).claim(claim).rows)
    perform(connection, intake.complete(found))
    return found


def delivered(listener: Any, *, event_type: str = PLACED, **options: Any) -> Decision:
    """Deliver the one due row to ``listener``; return the decision."""
    with listening(listener, event_type, **options):
        (lease,) = leases()
        return copy_context().run(decide, lease)


def decide(lease: Lease) -> Decision:
    delivery = Delivery([lease], alias="default", is_current=lambda _: True)
    driver: Any = SimpleNamespace(make=Call.make, tidy=lambda: True, pass_on=lambda: None)
    drive(delivery.steps(), driver)
    ((_, decision),) = delivery.decided
    return decision


def outcome(decision: Decision) -> tuple[Status, float | None, int]:
    return decision.status, decision.delay, decision.spent


def raising(error: BaseException) -> Any:
    def listener(event: outbox.Event) -> None:
        raise error

    return listener


# -- what a listener returns -----------------------------------------------------------------------


def test_333_the_listeners_policy_then_the_settings_then_the_default(settings: Any) -> None:
    settings.OUTBOX = {"RETRY": {"policy": "fixed", "delay": 7}}
    insert()
    assert delivered(raising(ValueError()), retry=outbox.Fixed(10)).delay == 10
    insert()
    assert delivered(raising(ValueError())).delay == 7
    settings.OUTBOX = {}
    insert()
    delay = delivered(raising(ValueError())).delay
    assert delay is not None
    assert 0.1 <= delay <= 0.3


def test_336_number_and_pause_can_be_set_for_all_and_for_one(settings: Any) -> None:
    settings.OUTBOX = {"RETRY": {"policy": "linear", "step": 2, "max_attempts": 3}}
    own = outbox.Linear(step=30, max_attempts=4)
    for attempts, ours, everybodys in ((0, 30, 2), (1, 60, 4), (2, 90, None), (3, None, None)):
        insert(attempts=attempts)
        assert delivered(raising(ValueError()), retry=own).delay == ours
        insert(attempts=attempts)
        assert delivered(raising(ValueError())).delay == everybodys


def test_unroutable_retry_heeds_the_limit_of_its_policy(settings: Any) -> None:
    settings.OUTBOX = {"UNROUTABLE": "retry", "RETRY": outbox.Fixed(3, max_attempts=2)}
    insert(event_type="nobody.listens", attempts=1)
    assert delivered(lambda event: None).status is Status.DEAD


def test_defer_limit(settings: Any) -> None:
    settings.OUTBOX = {"DEFER_LIMIT": 60}
    insert(first_due_at=now() - timedelta(seconds=59))
    assert delivered(lambda event: outbox.Defer(5)).status is Status.NEW
    insert(first_due_at=now() - timedelta(seconds=61))
    decision = delivered(lambda event: outbox.Defer(5))
    assert decision.status is Status.DEAD
    assert "DEFER_LIMIT" in (decision.error or "")


def test_what_escapes_is_not_an_answer() -> None:
    insert()
    with listening(raising(KeyboardInterrupt())):
        (lease,) = leases()
        context = copy_context()
        context.run(drain_ending_errors.set, (KeyboardInterrupt, SystemExit))
        with pytest.raises(KeyboardInterrupt):
            context.run(decide, lease)


# -- what the listener sees ------------------------------------------------------------------------


def test_j16_a_delayed_event_knows_it() -> None:
    (event_id,) = write(deliver_after=0.001)
    seen: list[outbox.Event] = []
    wait_until(OutboxEvent.objects.due().exists)
    with listening(seen.append):
        (lease,) = leases()
        copy_context().run(decide, lease)
    assert seen[0].is_delayed
    assert seen[0].deliver_at == row(event_id).deliver_at


def test_what_waits_to_be_settled_holds_no_decoded_payload() -> None:
    """Otherwise a drain's memory, and the garbage collector's work, would grow with every event."""
    insert(payload='{"deep": [[1]]}')
    seen: list[outbox.Event] = []
    with listening(seen.append):
        (lease,) = leases()
        assert not gc.is_tracked(lease)
        assert lease.event is lease.event
        copy_context().run(decide, lease)
    assert seen[0].payload == {"deep": [[1]]}
    assert lease.event is not seen[0]
    assert (lease.event_id, lease.event.payload) == (seen[0].event_id, {"deep": [[1]]})


# -- unroutable ------------------------------------------------------------------------------------


def unroutable(settings: Any, age: float, **options: Any) -> Decision:
    settings.OUTBOX = options
    insert(event_type="nobody.listens", first_due_at=now() - timedelta(seconds=age))
    return delivered(lambda event: None)


def test_x4_unroutable_waits_for_the_grace(settings: Any) -> None:
    decision = unroutable(settings, 599, UNROUTABLE_GRACE=600)
    assert (decision.status, decision.spent) == (Status.NEW, 0)
    assert decision.delay is not None
    assert 0 < decision.delay <= 1.5  # due again at about the end of the grace period
    assert "nobody.listens" in (decision.error or "")


def test_unroutable_past_the_grace_is_dead_and_says_what_is_known(settings: Any) -> None:
    decision = unroutable(settings, 601, UNROUTABLE_GRACE=600)
    assert outcome(decision) == (Status.DEAD, None, 0)
    assert "UnroutableEvent" in (decision.error or "")
    assert PLACED in (decision.error or "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"UNROUTABLE_GRACE": 0}, (Status.DEAD, None, 0)),
        ({"UNROUTABLE": "retry", "RETRY": outbox.Fixed(delay=3)}, (Status.RETRY, 3.0, 1)),
        ({"UNROUTABLE": "ignore"}, (Status.DONE, None, 0)),
    ],
    ids=["no grace", "retry", "ignore"],
)
def test_unroutable_is_what_the_settings_say(
    settings: Any, options: dict[str, Any], expected: Any
) -> None:
    assert outcome(unroutable(settings, 0, **options)) == expected


# -- last_error ------------------------------------------------------------------------------------


def kept_error(error: BaseException) -> str:
    """Return last_error as the database stores it."""
    (event_id,) = insert()
    decision = delivered(raising(error), retry=outbox.Fixed())
    dialect_of(connection).settle_all(me="me", endings=endings([(event_id, decision)]))
    return row(event_id).last_error or ""


def test_185_class_message_and_the_end_of_the_traceback() -> None:
    class Refused(Exception):
        pass

    kept = kept_error(Refused("the card was refused"))
    head, _, trace = kept.partition("\n")
    assert head.endswith("Refused: the card was refused")
    assert __name__ in head
    assert trace.startswith("Traceback")
    assert "raise error" in trace


# -- async -----------------------------------------------------------------------------------------


def test_220_an_async_listener_is_awaited_here_too() -> None:
    insert()
    seen: list[str] = []

    async def listener(event: outbox.Event) -> outbox.Defer:
        await asyncio.sleep(0)
        seen.append(event.event_type)
        return outbox.Defer(4)

    assert outcome(delivered(listener)) == (Status.NEW, 4.0, 0)
    assert seen == [PLACED]


def adelivered(listener: Any, **options: Any) -> Decision:
    with listening(listener, **options):
        (lease,) = leases()
        assert is_async(lease)
        delivery = Delivery([lease], alias="default", is_current=lambda _: True)
        asyncio.run(adrive(delivery.steps(), tidy=AsyncMock(), pass_on=lambda: None))
        ((_, decision),) = delivery.decided
        return decision


def test_27_an_async_listener_past_its_timeout_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def endless(event: outbox.Event) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    insert()
    decision = adelivered(endless, timeout=0.02, retry=outbox.Fixed(delay=3))
    assert outcome(decision) == (Status.RETRY, 3.0, 1)
    assert "ListenerTimeout" in (decision.error or "")
    assert cancelled == [True]


def test_180_the_event_as_it_was_written() -> None:
    (event_id,) = write(
        event_type="order.paid",
        payload={"sku": "☕", "n": 1.5},
        headers={"trace": "7"},
        aggregate_type="shop.Order",
        aggregate_id="9",
        tenant_id="north",
        unique_key="once",
    )
    OutboxEvent.objects.update(attempts=4)
    seen: list[outbox.Event] = []
    assert delivered(seen.append, event_type="order.paid") is DONE
    (event,) = seen
    stored = row(event_id)
    assert event.event_id == event_id
    assert (event.event_type, event.payload) == ("order.paid", {"sku": "☕", "n": 1.5})
    assert dict(event.headers) == {"trace": "7"}
    assert (event.aggregate_type, event.aggregate_id) == ("shop.Order", "9")
    assert (event.tenant_id, event.unique_key) == ("north", "once")
    assert (event.attempts, event.source, event.is_delayed) == (4, "cold", False)
    assert event.occurred_at == stored.occurred_at
    assert (event.created_at, event.first_due_at) == (stored.created_at, stored.first_due_at)
    assert event.available_at == stored.first_due_at  # the due time, not the end of the lease
    with pytest.raises(TypeError):
        event.headers["trace"] = "8"  # type: ignore[index]
    with pytest.raises(AttributeError):
        event.attempts = 0  # type: ignore[misc]
