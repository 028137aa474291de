"""Listeners of two queues in worker processes; each leaves a line in the test's file."""

from __future__ import annotations

import time

import django_outbox as outbox

from .fault_listeners import testify


@outbox.listener("hook.sent", queue="hooks")
def send_hook(event: outbox.Event) -> None:
    """Take ``seconds``, as a call of a partner does."""
    testify(event, "start")
    time.sleep(event.payload.get("seconds", 0))
    testify(event, "end")


@outbox.listener("shared.sent", name="local")
def note_locally(event: outbox.Event) -> None:
    testify(event, "local")
    time.sleep(0.001)  # a thread whose calls take longer than RUN_AHEAD waits for each settle


@outbox.listener("shared.sent", name="hook", queue="hooks")
def send_shared(event: outbox.Event) -> None:
    testify(event, "hook")
