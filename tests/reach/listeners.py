"""Listeners that leave effects; the site's processes find them by autodiscovery."""

from __future__ import annotations

import asyncio
import time

from asgiref.sync import sync_to_async

import django_outbox as outbox
from tests.reach.effects import leave


@outbox.listener("reach.noted")
def note(event: outbox.Event) -> None:
    leave(event, event.source)


@outbox.listener("reach.slow")
def run_for_a_while(event: outbox.Event) -> None:
    leave(event, "start")
    time.sleep(event.payload["seconds"])  # the listener's work
    leave(event, "end")


@outbox.listener("reach.awaited")
async def wait_for_a_while(event: outbox.Event) -> None:
    await sync_to_async(leave)(event, "start")
    await asyncio.sleep(event.payload["seconds"])
    await sync_to_async(leave)(event, "end")


@outbox.listener("reach.exact", atomic=True)
def change_and_take_time(event: outbox.Event) -> None:
    leave(event, "once")
    time.sleep(event.payload["seconds"])  # the listener's work
