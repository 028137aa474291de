"""Time in tests: let the outbox's time pass, and wait for a condition with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connections, models, router

from .. import doorbell
from ..exceptions import seconds
from ..models import OutboxEvent, OutboxInbox, OutboxStream
from ..writing.on_commit import hot_queues

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
