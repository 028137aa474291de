"""Interfaces of doorbells and listener connections, and the identifiers that both sides share."""

from __future__ import annotations

import hashlib
from typing import Protocol

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import table_name

MAX_INTERVALS = 4  # of DOORBELL_INTERVAL that a writer stays quiet after a notification, at most


class Ear(Protocol):
    """A worker's listener connection; one thread uses it, and calls ``listen`` after any error."""

    sure: bool  # receives every notification, so that no probes are needed

    def listen(self) -> None:
        """Open the connection. A claim has to find events that were announced before."""

    def wait(self, timeout: float) -> bool:
        """Wait for a notification, at most ``timeout`` seconds; return whether one came."""

    def close(self) -> None:
        """Close the connection; may be called twice."""


class Doorbell(Protocol):
    """The writer's end; it also creates the listener connections of workers.

    If its attribute ``waits`` is true, ``ring`` waits for an answer, and is called less often if
    that is slow. A datagram waits for none: its duration depends only on the processes it wakes.
    """

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        """Notify every worker of this database. Called after the commit, in autocommit."""

    def ear(self) -> Ear:
        """Return a new listener connection for a worker of this database."""


def database_identity(alias: str) -> str:
    """Return an identifier of this alias's table, the same in all processes that share it."""
    settings = connections.settings[alias]
    place = [settings["ENGINE"], *(str(settings[part]) for part in ("HOST", "PORT", "NAME"))]
    return hashlib.sha256("\0".join([*place, table_name("outbox_event")]).encode()).hexdigest()[:16]


def table_identity() -> str:
    """Return an identifier of the table within its database, which NOTIFY never leaves."""
    return hashlib.sha256(table_name("outbox_event").encode()).hexdigest()[:16]
