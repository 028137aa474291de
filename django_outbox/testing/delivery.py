"""Deliver events in tests, in the test's own thread or with a real worker, and let time pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db import connections, models, router

from .. import doorbell, transactions
from ..conf import current
from ..events import Event
from ..exceptions import seconds
from ..models import OutboxEvent, OutboxInbox, OutboxStream
from ..signals import event_settled
from ..worker.drain import drain as _drain
from ..worker.worker import Worker
from ..writing.on_commit import hot_queues


def drain(
    using: str | None = None,
    limit: int | None = None,
    at: datetime | None = None,
    *,
    queues: Collection[str] | None = None,
) -> int:
    """Deliver like ``outbox.drain``, but fail the test, with the errors, if a delivery fails.

    Raises ``AssertionError`` if a delivery fails, and the errors of ``outbox.drain``.

    Example::

        def test_every_listener_succeeds():
            with transaction.atomic():
                outbox.write("order.placed", {"order": 7})
            assert drain() == 1
    """
    with _fail_if_delivery_failed(_alias(using)):
        return _drain(using, limit, at, queues=queues)


@contextmanager
def immediate_delivery(using: str | None = None) -> Iterator[None]:
    """Deliver events written within the block at their commit, in the same thread.

    In a ``TestCase`` nothing commits. Delivery then happens when ``captureOnCommitCallbacks``
    executes the on-commit callbacks, or at the latest at the end of the block.

    Raises ``AssertionError`` at the end of the block if a delivery failed, with its error, and
    ``RuntimeError`` if a worker of this process delivers already.

    Example::

        def test_the_event_is_delivered_at_once():
            with immediate_delivery():
                with transaction.atomic():
                    event_id = outbox.write("order.placed", {"order": 7})
            assert OutboxEvent.objects.done().filter(pk=event_id).exists()
    """
    alias = _alias(using)
    if alias in hot_queues.by_alias:
        raise RuntimeError(f"A worker of this process delivers the events of {alias!r} already.")
    with _fail_if_delivery_failed(alias):
        hot_queues.by_alias[alias] = queue = _ImmediateQueue(alias)
        try:
            yield
            if connections[alias].in_atomic_block:
                queue.poll()
        finally:
            del hot_queues.by_alias[alias]


class _ImmediateQueue:
    """Takes the place of a worker's hot queue; delivers offered events at once."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._in_thread = threading.local()

    def serves(self, queue: str) -> bool:
        return True

    def offer(self, event: Event) -> bool:
        self.poll()
        return True

    def poll(self) -> None:
        if getattr(self._in_thread, "draining", False):
            return  # a listener wrote this; the drain that called it goes on until nothing is due
        if not current().ENABLED:
            return
        self._in_thread.draining = True
        try:
            _drain(self._alias)
        finally:
            self._in_thread.draining = False


@contextmanager
def _fail_if_delivery_failed(alias: str) -> Iterator[None]:
    """Raise ``AssertionError`` at the end of the block if a delivery failed within it."""
    failed: dict[tuple[str, str], str] = {}  # event id and listener: outcome

    def record(*, sender: str, event: Event, outcome: str, **kwargs: Any) -> None:
        if sender == alias and outcome in ("retry", "dead"):
            failed[event.event_id, event.listener] = outcome

    event_settled.connect(record)
    try:
        yield
    finally:
        event_settled.disconnect(record)
    if failed:
        ids = {event_id for event_id, _ in failed}
        rows = OutboxEvent.objects.using(alias).filter(event_id__in=ids).order_by("pk")
        lines = [
            f"{row} ({outcome}): {row.last_error}"
            for row in rows
            if (outcome := failed.get((row.event_id, row.listener or "")))
        ]
        raise AssertionError("\n".join([f"{len(failed)} deliveries failed:", *lines]))


@contextmanager
def accept_test_transaction() -> Iterator[None]:
    """Count the block that a ``TestCase`` opens as a transaction that allows writing events.

    Example::

        class Tests(TestCase):
            def test_without_a_transaction_of_its_own(self):
                with accept_test_transaction():
                    outbox.write("order.placed", {"order": 7})
    """
    token = transactions.test_blocks_count.set(True)
    try:
        yield
    finally:
        transactions.test_blocks_count.reset(token)


@contextmanager
def running_worker(using: str | None = None) -> Iterator[Worker]:
    """Run a worker during the block; fail if a listener has to be abandoned at its end.

    Its threads see only committed rows: use a ``TransactionTestCase`` (in pytest the fixture
    ``transactional_db``), and a database that is not in memory.

    Raises ``RuntimeError`` if a transaction is open, and ``AssertionError`` for the listener that
    still runs at the end.

    Example::

        class WorkerTests(TransactionTestCase):
            def test_a_worker_delivers(self):
                with running_worker():
                    with transaction.atomic():
                        event_id = outbox.write("order.placed", {"order": 7})
                    wait_until(OutboxEvent.objects.done().filter(pk=event_id).exists)
    """
    worker = Worker(using=using, purge=False)
    if connections[worker.alias].in_atomic_block:
        raise RuntimeError(
            f"A transaction is open on {worker.alias!r}, so that no worker sees what the test "
            "writes. Use a TransactionTestCase (in pytest transactional_db), or drain()."
        )
    worker.start()
    try:
        yield worker
    finally:
        finished = worker.stop()
    if not finished:
        raise AssertionError("The worker was stopped, and a listener still runs.")


def _alias(using: str | None) -> str:
    return using or router.db_for_write(OutboxEvent)


# -- time ------------------------------------------------------------------------------------------


T = TypeVar("T")


def wait_until(fact: Callable[[], T], *, within: float = 10.0, what: str = "") -> T:
    """Return the first truthy result of ``fact``; fail if there is none ``within`` seconds.

    Raises ``AssertionError`` then; its message begins with ``what``.

    Example::

        def test_time_passes():
            start = time.monotonic()
            wait_until(lambda: time.monotonic() > start, what="the clock")
    """
    deadline = time.monotonic() + within
    while not (answer := fact()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what or fact} was still {answer!r} after {within:g} s")
        time.sleep(0.01)  # seconds between two tries
    return answer


def pass_time(delta: float | timedelta, *, using: str | None = None) -> None:
    """Shift the times in the outbox's tables as if ``delta`` (seconds or timedelta) had passed.

    Due times, retries, ages and retention shift; clocks, ``occurred_at`` and leases do not.

    Raises ``ValueError`` unless ``delta`` is a finite duration of zero or more.

    Example::

        def test_a_reminder_is_due_a_day_later():
            with transaction.atomic():
                event_id = outbox.write("reminder.due", deliver_after=timedelta(days=1))
            pass_time(timedelta(days=1))
            assert OutboxEvent.objects.due().filter(pk=event_id).exists()
    """
    alias = using or router.db_for_write(OutboxEvent)
    delta = timedelta(seconds=seconds(delta, of="pass_time"))
    events = "created_at first_due_at deliver_at available_at done_at".split()
    _shift(OutboxEvent, alias, delta, events, locked_by=None)
    _shift(OutboxStream, alias, delta, ["due_at"], locked_by=None)
    _shift(OutboxInbox, alias, delta, ["received_at"])
    queue = hot_queues.by_alias.get(alias)
    if queue is not None:
        queue.poll()
    else:
        doorbell.ring(connections[alias])


def _shift(
    model: type[models.Model], alias: str, delta: timedelta, columns: list[str], **unleased: None
) -> None:
    rows = model._default_manager.using(alias)
    for row in rows.filter(**unleased):
        old = {name: getattr(row, name) for name in columns}
        new: dict[str, Any] = {name: at and at - delta for name, at in old.items()}
        # Leave the row alone if it was leased or changed meanwhile.
        rows.filter(pk=row.pk, **unleased, **old).update(**new)
