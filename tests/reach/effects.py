"""The effects that listeners of the site leave: in which process, on which database session."""

from __future__ import annotations

import os

from django.db import connection

import django_outbox as outbox
from tests.testapp.models import Effect


def session() -> str:
    """The server's name for this thread's connection; empty where there is no server."""
    connection.ensure_connection()
    if connection.vendor == "postgresql":
        return str(connection.connection.info.backend_pid)
    return str(connection.connection.thread_id()) if connection.vendor == "mysql" else ""


def leave(event: outbox.Event, phase: str) -> None:
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), worker=session(), phase=phase)
