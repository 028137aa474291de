"""The connections of async listeners on each database: how many, and of which database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import django_outbox as outbox
from tests.table import listening, sessions, write
from tests.test_async_connections import Gauge, all_done, none_failed
from tests.testapp.models import Effect

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
