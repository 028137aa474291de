"""The test kit's clock on each database: SQL moves every time in the tables."""

from __future__ import annotations

from datetime import timedelta

from django_outbox.models import OutboxStream
from django_outbox.testing import drain, pass_time
from tests.surroundings import both
from tests.table import claim, insert, listening, now, row
from tests.test_kit import no_queue_left, place, ship

__all__ = ["no_queue_left"]  # fixtures


@both
def test_time_moves_what_is_delayed(outside: bool) -> None:
    with listening(ship):
        event_id = place(deliver_after=timedelta(hours=24))
        before = row(event_id)
        pass_time(timedelta(hours=23))
        assert drain() == 0
        pass_time(3601)
        assert drain() == 1
    after = row(event_id)
    day = timedelta(hours=23, seconds=3601)
    assert before.deliver_at and before.created_at and before.first_due_at
    assert after.deliver_at == before.deliver_at - day
    assert after.created_at == before.created_at - day
    assert after.first_due_at == before.first_due_at - day
    assert after.occurred_at == before.occurred_at


@both
def test_time_moves_streams_and_leaves_leases_alone(outside: bool) -> None:
    clock = now()
    free = OutboxStream.objects.create(stream=":free", key="free", seq=1, due_at=clock)
    OutboxStream.objects.create(
        stream=":held", key="held", seq=1, due_at=clock, locked_by="another"
    )
    (held,) = insert()
    claim("another", lease=30)
    lease = row(held).available_at
    pass_time(60)
    free.refresh_from_db()
    assert free.due_at == clock - timedelta(seconds=60)
    assert OutboxStream.objects.get(stream__of_key="held").due_at == clock
    assert row(held).available_at == lease
    assert drain() == 0
