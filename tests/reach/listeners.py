"""Listeners that leave effects; the site's processes find them by autodiscovery."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

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


@outbox.listener("reach.gated")
def run_until_told(event: outbox.Event) -> None:
    """Run until the file that the payload names is there."""
    leave(event, "start")
    wait_for_file(event)
    leave(event, "end")


def wait_for_file(event: outbox.Event) -> None:
    while not Path(event.payload["until"]).exists():
        time.sleep(0.02)


@outbox.listener("reach.awaited")
async def wait_for_a_while(event: outbox.Event) -> None:
    await sync_to_async(leave)(event, "start")
    await asyncio.sleep(event.payload["seconds"])
    await sync_to_async(leave)(event, "end")


@outbox.listener("reach.blocking")
async def block_the_loop(event: outbox.Event) -> None:
    await sync_to_async(leave)(event, "start")
    while not Path(event.payload["until"]).exists():  # noqa: ASYNC240 - it shall block
        time.sleep(0.02)  # noqa: ASYNC251
    await sync_to_async(leave)(event, "end")


@outbox.listener("reach.exact", atomic=True)
def change_and_take_time(event: outbox.Event) -> None:
    leave(event, "once")
    time.sleep(event.payload["seconds"])  # the listener's work


@outbox.listener("reach.hangs")
def hang_at_first(event: outbox.Event) -> None:
    leave(event, f"try {event.attempts}")
    if event.attempts < event.payload["times"]:
        time.sleep(120)  # what no timeout of its own ends


@outbox.listener("reach.patient", timeout=120)
def take_its_time(event: outbox.Event) -> None:
    leave(event, "start")
    wait_for_file(event)
