"""Tasks on each database: their transactions, and a worker that runs them."""

from __future__ import annotations

from datetime import timedelta

from django_outbox.models import OutboxEvent
from tests.table import claim, now, row
from tests.test_tasks import READY, RUNNING, both
from tests.testapp import tasks


@both
def test_running_is_what_a_worker_holds(outside: bool) -> None:
    result = tasks.add.enqueue(1)
    claim("worker-1")
    result.refresh()
    assert (result.status, result.worker_ids) == (RUNNING, ["worker-1"])
    assert result.started_at == row(result.id).locked_at
    OutboxEvent.objects.update(available_at=now() - timedelta(seconds=1))
    result.refresh()
    assert result.status == READY  # the lease has ended, so its worker is lost
