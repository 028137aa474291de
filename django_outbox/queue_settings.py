"""The settings of queues and relays: one dict each in ``QUEUES`` and ``RELAYS``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .redaction import without_secrets

DEFAULT_QUEUE: Final = "default"  # of listeners without a queue; the column's default, too
MAX_QUEUES: Final = 16  # "default" included; each is a branch of the statement that polls
MAX_QUEUE_NAME: Final = 64  # characters
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)/([smh])")
PARKED: Final = "paused:"  # start of the queues in which what is paused waits; no NAME has a colon
PARKED_END: Final = "paused;"  # behind all of them
MAX_RATE: Final = 1e6  # its number
RATE_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
RELAY_PREFIX: Final = "relay."  # of the titles and queues of relays
RELAY_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,49}")
FORMATS: Final = ("plain", "cloudevents", "cloudevents-structured")
# What TO and SOURCE may name; headers by {headers[name]}.
FIELDS: Final = "event_type aggregate_type aggregate_id tenant_id key event_id".split()
MAX_BATCH: Final = 500  # messages; as many as the events in a call of a batch listener
DEFAULT_WORKERS: Final = 2  # threads of a relay's queue: one prepares while the other waits


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a queue's circuit breaker opens, and for how long."""

    failures: int = 5  # consecutive ones in a process that open it
    within: float = 60.0  # seconds in which they must come
    pause: float = 30.0  # seconds until the first probe; doubled by each that fails


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of one queue; those that it does not set are the top-level ones."""

    name: str
    WORKERS: int
    ASYNC_CONCURRENCY: int
    ASYNC_CONNECTIONS: int
    RATE: float | None  # events per second, of all workers together
    BREAKER: BreakerSettings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The settings of one relay."""

    name: str
    BACKEND: str  # dotted path of a class
    EVENTS: tuple[str, ...]  # event types and patterns
    TO: str = field(default="{event_type}", repr=False)  # str.format over the event's fields
    FORMAT: str = "plain"
    SOURCE: str = "/django-outbox"  # CloudEvents' source, str.format over the event's fields
    BATCH: int = MAX_BATCH  # messages in a call, at most
    WITHIN: float = 0.0  # seconds that the first event may wait for more
    RETRY: Any = None  # as OUTBOX["RETRY"]; None: that one
    OPTIONS: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the backend

    @property
    def title(self) -> str:
        """The listener's title, and the name of its queue."""
        return f"{RELAY_PREFIX}{self.name}"

    @property
    def backend_name(self) -> str:
        """The name of the backend's class, such as ``Kafka``."""
        return self.BACKEND.rpartition(".")[2]

    def where(self, key: str) -> str:
        """Return how an error names one of these settings."""
        return f'OUTBOX["RELAYS"][{self.name!r}]["{key}"]'

    @property
    def shown_to(self) -> str:
        """TO without the credentials and the query of a URL, for people."""
        return without_secrets(self.TO)


def queues_from(given: Mapping[str, Any], top: Any) -> dict[str, QueueSettings]:
    """Return the settings of all queues by name: ``default`` first, then in the given order.

    ``top`` has the top-level settings as attributes.
    """
    found = {}
    for name in dict.fromkeys([DEFAULT_QUEUE, *given]):
        own = given.get(name, {})
        threads = own.get("WORKERS", top.WORKERS)
        breaker = own.get("BREAKER")
        found[name] = QueueSettings(
            name=name,
            WORKERS=threads,
            ASYNC_CONCURRENCY=own.get("ASYNC_CONCURRENCY", top.ASYNC_CONCURRENCY),
            ASYNC_CONNECTIONS=own.get("ASYNC_CONNECTIONS") or top.ASYNC_CONNECTIONS or 2 * threads,
            RATE=per_second(own["RATE"]) if own.get("RATE") else None,
            BREAKER=None if breaker is None else BreakerSettings(**breaker),
        )
    return found


def relays_from(given: Mapping[str, Any] | None) -> dict[str, RelaySettings]:
    """Return the settings of all relays by name, from a valid setting."""
    return {
        name: RelaySettings(name=name, **{**own, "EVENTS": tuple(own["EVENTS"])})
        for name, own in (given or {}).items()
    }


def parked_queue(pause: int) -> str:
    """Return the queue in which waits what the pause with this id holds; no worker serves it."""
    return f"{PARKED}{pause}"


def parked_by(queue: str | None) -> int | None:
    """Return the id of the pause whose queue this is; None for another queue."""
    return int(queue[len(PARKED) :]) if queue and queue.startswith(PARKED) else None


def is_rate(value: Any) -> bool:
    """Return whether this is a rate above zero, such as "50/s", "100/m" or "10/h"."""
    match = RATE.fullmatch(value) if isinstance(value, str) else None
    return match is not None and 0 < float(match[1]) <= MAX_RATE


def per_second(rate: str) -> float:
    """Return the events per second of a valid rate such as "50/s", "100/m" or "10/h"."""
    match = RATE.fullmatch(rate)
    assert match is not None
    return float(match[1]) / RATE_SECONDS[match[2]]
