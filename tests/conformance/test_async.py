"""Async listeners on each database: transactions and sessions of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

import django_outbox as outbox
from tests.reach.effects import session
from tests.table import listening, sessions, write
from tests.test_async import all_done
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_no_listener_is_inside_the_transaction_of_another(settings: Any) -> None:
    """One listener keeps a transaction open while it waits; the others must not run inside it."""
    settings.OUTBOX = {}
    looked: list[tuple[str, bool, int]] = []
    opened = threading.Event()

    def begin(event: outbox.Event) -> Any:
        block = transaction.atomic()
        block.__enter__()
        Effect.objects.create(event_id=event.event_id, pid=0, phase="uncommitted")
        return block, session()

    def look() -> None:
        looked.append((session(), connection.in_atomic_block, Effect.objects.count()))

    def undo(block: Any) -> None:
        transaction.set_rollback(True)
        block.__exit__(None, None, None)

    mine: list[str] = []

    async def listener(event: outbox.Event) -> None:
        if event.payload["n"] == 0:
            block, name = await sync_to_async(begin)(event)
            mine.append(name)
            opened.set()
            while len(looked) < 4:  # noqa: ASYNC110 - a thread ends the wait
                await asyncio.sleep(0.01)
            await sync_to_async(undo)(block)
            return
        while not opened.is_set():  # noqa: ASYNC110 - a thread ends the wait
            await asyncio.sleep(0.01)
        await sync_to_async(look)()

    with listening(listener), outbox.Worker():
        write(5)
        all_done(5)
    assert [(inside, count) for _, inside, count in looked] == [(False, 0)] * 4
    if connection.vendor != "sqlite":
        assert not {*mine} & {name for name, _, _ in looked}
    assert not Effect.objects.exists()


def test_a_delivery_closes_what_it_opened(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONCURRENCY": 10}

    def count() -> int:
        return Effect.objects.count()

    async def listener(event: outbox.Event) -> None:
        await sync_to_async(count)()

    with listening(listener), outbox.Worker():
        write()
        all_done(1)
        before = sessions()  # the worker may open some of its own later
        write(30)
        all_done(31)
        # SQLite keeps the file of a closed connection open for the next one, at most one per slot.
        wait_until(lambda: sessions() < before + 15, what="sessions as before")
