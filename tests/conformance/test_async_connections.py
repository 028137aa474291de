"""The connections of async listeners on each database: how many, and of which database."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections

import django_outbox as outbox
from tests.table import listening, sessions, statuses, write
from tests.test_async_connections import PLAIN, Gauge, all_done, none_failed
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


OWN = 8  # connections that a worker itself uses, at most


def test_a_burst_takes_no_more_connections_than_the_setting_says(settings: Any) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 3}
    gauge = Gauge()
    gauge.most_sessions = sessions() + OWN + 3
    with listening(gauge), outbox.Worker():
        ids = write(200)
        all_done(200)
    none_failed(ids)
    assert gauge.most == 3


def test_listeners_after_a_batch_listener_wait_like_others(settings: Any) -> None:
    """Their deliveries are begun from within that of the batch, and must not use its thread."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 3}
    gauge = Gauge()
    gauge.most_sessions = sessions() + OWN + 3

    async def first(events: list[outbox.Event]) -> None:
        await asyncio.sleep(0.01)

    with listening(first, batch=10, name="a"), listening(gauge, name="b"), outbox.Worker():
        ids = write(100)
        all_done(100)
    none_failed(ids)
    assert gauge.most == 3


def test_a_failed_connect_gives_its_slot_back(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener continues without a connection, and others must not wait for it."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1}
    refused: list[threading.Thread] = []
    failed: list[str] = []
    go_on = threading.Event()
    backend = type(connections["default"])
    connect = backend.get_new_connection

    def get_new_connection(self: Any, parameters: Any) -> Any:
        if threading.current_thread() in refused:
            raise OperationalError("refused")
        return connect(self, parameters)

    monkeypatch.setattr(backend, "get_new_connection", get_new_connection)

    def fail() -> None:
        refused.append(threading.current_thread())
        with pytest.raises(OperationalError, match="refused"):
            connection.ensure_connection()
        failed.append("refused")

    async def unlucky(event: outbox.Event) -> None:
        await sync_to_async(fail)()
        while not go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)

    gauge = Gauge()
    with listening(unlucky, PLAIN), listening(gauge), outbox.Worker():
        try:
            write(event_type=PLAIN)
            wait_until(lambda: failed == ["refused"], what="the refusal")
            write(5)
            wait_until(lambda: statuses() == {"NEW": 1, "DONE": 5}, what="five DONE")
        finally:
            go_on.set()
        all_done(6)


def test_a_connection_that_the_listener_closes_and_opens_again_keeps_its_slot(
    settings: Any,
) -> None:
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 1}
    inside = []

    def close() -> None:
        connection.close()

    gauge = Gauge()

    async def listener(event: outbox.Event) -> None:
        await Effect.objects.acount()
        with gauge.connected():
            await sync_to_async(close)()
            await asyncio.sleep(0.01)
            inside.append(await Effect.objects.acount())

    with listening(listener), outbox.Worker():
        ids = write(20)
        all_done(20)
    none_failed(ids)
    assert len(inside) == 20
    assert gauge.most == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_listeners_of_several_databases_need_one_slot(settings: Any) -> None:
    """With a slot for each connection, two listeners could wait for each other's forever."""
    settings.OUTBOX = {"ASYNC_CONNECTIONS": 2}
    gauge = Gauge()

    async def listener(event: outbox.Event) -> None:
        aliases = ["default", "other"] if event.payload["n"] % 2 else ["other", "default"]
        await Effect.objects.using(aliases[0]).acount()
        with gauge.connected():
            await asyncio.sleep(0.02)
            await Effect.objects.using(aliases[1]).acount()

    with listening(listener), outbox.Worker():
        ids = write(20)
        all_done(20)
    none_failed(ids)
    assert gauge.most == 2
