"""The two ends of a doorbell, and how the processes of one table find each other."""

from __future__ import annotations

import hashlib
from typing import Protocol

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import table_name

QUIET = 4  # times DOORBELL_INTERVAL that a writer whose rings are slow keeps quiet after one


class Ear(Protocol):
    """The worker's end; used by one thread, which calls ``listen`` again after any error."""

    sure: bool  # hears every ring, so that no probe is needed beside it

    def listen(self) -> None:
        """Open what is needed. What was rung before is for a claim to find."""

    def wait(self, timeout: float) -> bool:
        """Wait for a ring, at most ``timeout`` seconds; return whether one came."""

    def close(self) -> None:
        """Give everything back; may be called twice."""


class Doorbell(Protocol):
    """The writer's end, and the maker of ears.

    One with an attribute ``waits`` that is true waits for an answer to each ring: where that is
    slow it is rung more seldom. What a socket's datagram takes tells only whom it woke.
    """

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        """Ring every worker of this database. Called after the commit, in autocommit."""

    def ear(self) -> Ear:
        """Return a new ear for a worker of this database."""


def database_identity(alias: str) -> str:
    """Name the table that this alias leads to, alike in all processes that share it."""
    settings = connections.settings[alias]
    place = [settings["ENGINE"], *(str(settings[part]) for part in ("HOST", "PORT", "NAME"))]
    return hashlib.sha256("\0".join([*place, table_name("outbox_event")]).encode()).hexdigest()[:16]


def table_identity() -> str:
    """NOTIFY is private to its database already; the table tells two outboxes in it apart."""
    return hashlib.sha256(table_name("outbox_event").encode()).hexdigest()[:16]
