"""A process that may start no further thread: it costs no attempt, and the worker is not ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
from asgiref.sync import sync_to_async

import django_outbox as outbox
from django_outbox.delivery.decide import thread_limit
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent
from tests.surroundings import deliver
from tests.table import end_leases, histories, listening, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
LINE = "no thread could be started error=can't start new thread"
REASON = "no thread could be started: can't start new thread"


class Limit:
    """Refuses threads whose names have a part, until it is lifted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.part, self.refused, real = "", 0, threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.part and self.part in thread.name:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        monkeypatch.setattr(thread_limit, "refused_at", -inf)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    found = Limit(monkeypatch)
    yield found
    found.part = ""


async def pure(event: outbox.Event) -> None:
    await asyncio.sleep(0)


async def queries(event: outbox.Event) -> None:
    await Effect.objects.acount()


async def blocking_call(event: outbox.Event) -> None:
    await sync_to_async(lambda: None, thread_sensitive=False)()


def starts_a_thread(event: outbox.Event) -> None:
    threading.Thread(target=lambda: None, name="asyncio_mine").start()


def fails(event: outbox.Event) -> None:
    raise ValueError(event.event_id)


def test_events_wait_for_the_thread_of_the_event_loop(
    limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    limit.part = "-loop"
    with listening(pure), outbox.Worker(workers=1) as worker:
        wait_until(lambda: worker.health().is_ready, what="a worker that is ready")
        write(3)
        wait_until(lambda: limit.refused > 3, what="several tries")
        assert worker.health().unready == (REASON,)
        assert worker.health().is_live
        limit.part = ""
        wait_until(lambda: statuses() == {"DONE": 3}, what="DONE")
    assert caplog.messages.count(LINE) == 1
    assert {*OutboxEvent.objects.values_list("attempts", flat=True)} == {0}


@pytest.mark.parametrize(
    ("listener", "part", "options"),
    [
        (queries, "-async", {}),
        (blocking_call, "asyncio_", {}),
        (starts_a_thread, "asyncio_", {}),
        (starts_a_thread, "asyncio_", {"batch": 10}),
        (fails, "asyncio_", {"retry": outbox.Fixed(0, max_attempts=1)}),
    ],
    ids=["ORM", "blocking call", "own thread", "batch", "fallback"],
)
def test_a_listener_without_a_thread_is_called_again_uncounted(
    listener: Callable[..., Any],
    part: str,
    options: dict[str, Any],
    limit: Limit,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit.part = part
    with listening(listener, **options):
        if listener is fails:
            registry.fallback(fails, lambda event, failure: starts_a_thread(event))
        with outbox.Worker(workers=1) as worker:
            ids = write(3)
            wait_until(lambda: worker.health().unready == (REASON,), what="not ready, and why")
            waits = OutboxEvent.objects.filter(
                pk__in=ids, locked_by=None, available_at__isnull=False
            )
            wait_until(lambda: limit.refused and waits.count() == 3, what="deferred events")
        assert caplog.messages.count(LINE) == 1
        assert {(each.status, each.attempts) for each in OutboxEvent.objects.all()} == {(0, 0)}
        assert histories() == []
        limit.part = ""
        end_leases(ids)
        deliver(until={"DONE": 3}, by_drain=False)
