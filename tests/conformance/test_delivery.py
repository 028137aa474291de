"""The event as it was written, from each database."""

from __future__ import annotations

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import DONE
from django_outbox.models import OutboxEvent
from tests.table import row, write
from tests.test_delivery import delivered

pytestmark = pytest.mark.django_db


# -- what the listener sees ------------------------------------------------------------------------


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
