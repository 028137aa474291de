"""Tasks on each database: their transactions, and a worker that runs them."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_outbox as outbox
from django_outbox.contrib.tasks.framework import task_started
from django_outbox.models import OutboxEvent
from django_outbox.testing import running_worker, wait_until
from tests.table import claim, now, row, statuses
from tests.test_tasks import FAILED, READY, RUNNING, both, finished, outside_alone
from tests.testapp import tasks
from tests.testapp.models import Order


@both
def test_a_refused_task_leaves_the_transaction_usable(outside: bool) -> None:
    with transaction.atomic():
        Order.objects.create(sku="before")
        with pytest.raises(TypeError, match="Unsupported type"):
            tasks.add.enqueue(datetime.now())  # noqa: DTZ005
        with pytest.raises(outbox.InvalidEvent):
            tasks.add.enqueue(float("nan"))
        Order.objects.create(sku="after")
    assert Order.objects.count() == 2
    assert not OutboxEvent.objects.exists()


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


@outside_alone
def test_in_a_worker() -> None:
    with finished() as told, running_worker() as worker:
        added, failed, exited, interrupted = (
            tasks.add.enqueue(1),
            tasks.fail.enqueue(),
            tasks.fail.enqueue("SystemExit"),
            tasks.fail.enqueue("KeyboardInterrupt"),
        )
        wait_until(lambda: statuses() == {"DONE": 1, "DEAD": 3})
        slept = tasks.add.using(run_after=timezone.now() + timedelta(seconds=0.1)).enqueue(2)
        wait_until(lambda: tasks.add.get_result(slept.id).is_finished)
    slept.refresh()
    for each in (added, failed, exited, interrupted):
        each.refresh()
    assert (added.return_value, added.worker_ids) == (1, [worker.id])
    assert failed.status == exited.status == interrupted.status == FAILED
    assert exited.errors[0].exception_class is SystemExit
    assert interrupted.errors[0].exception_class is KeyboardInterrupt
    assert {each.id: each.status for each in told} == {
        each.id: each.status for each in (added, slept, failed, exited, interrupted)
    }


@outside_alone
def test_a_run_that_was_written_off_keeps_nothing_while_its_retry_runs(settings: Any) -> None:
    settings.OUTBOX = {"LISTENER_TIMEOUT": 2}
    gates = [threading.Event(), threading.Event()]
    threads: list[threading.Thread] = []

    def hold(sender: type, task_result: Any, **facts: Any) -> None:
        threads.append(threading.current_thread())
        gates[len(threads) - 1].wait(30)

    task_started.connect(hold)
    try:
        with running_worker() as worker:
            result = tasks.add.using(backend="retried").enqueue(1)
            wait_until(lambda: len(threads) == 2)
            gates[0].set()
            wait_until(lambda: not threads[0].is_alive())
            assert row(result.id).result is None
            gates[1].set()
            wait_until(lambda: statuses() == {"DONE": 1})
            result.refresh()
    finally:
        for gate in gates:
            gate.set()
        task_started.disconnect(hold)
    assert (result.return_value, result.worker_ids) == (1, [worker.id])
