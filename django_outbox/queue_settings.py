"""The settings of queues: reads and checks ``OUTBOX["QUEUES"]``, one dict for each queue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_QUEUE: Final = "default"  # of listeners without a queue; the column's default, too
MAX_QUEUES: Final = 16  # "default" included; each is a branch of the statement that polls
MAX_QUEUE_NAME: Final = 64  # characters
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)/([smh])")
PARKED: Final = "paused:"  # start of the queues in which what is paused waits; no NAME has a colon
PARKED_END: Final = "paused;"  # behind all of them
MAX_RATE: Final = 1e6  # its number
RATE_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


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


def queues_fault(value: Any) -> str | None:
    """Return what was expected of ``OUTBOX["QUEUES"]``; None if the value is valid."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "a dict with the settings of each queue by its name, or None"
    for name, own in value.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"names of 1 to 64 letters, digits, '_', '.' or '-', but not {name!r}"
        if not isinstance(own, Mapping):
            return f"a dict of settings for the queue {name!r}, but not {own!r}"
        for key, setting in own.items():
            if expected := _setting_fault(key, setting):
                return f"for the queue {name!r} {expected}"
    return None


def _setting_fault(key: Any, value: Any) -> str | None:
    if key in ("WORKERS", "ASYNC_CONCURRENCY") and not _is_count(value):
        return f"a whole number of at least 1 as {key}, but not {value!r}"
    if key == "ASYNC_CONNECTIONS" and value is not None and not _is_count(value):
        return f"a whole number of at least 1 as {key}, or None, but not {value!r}"
    if key == "RATE" and value is not None and not is_rate(value):
        return f'a RATE such as "50/s", "100/m" or "10/h", or None, but not {value!r}'
    if key == "BREAKER":
        return _breaker_fault(value)
    known = ("WORKERS", "ASYNC_CONCURRENCY", "ASYNC_CONNECTIONS", "RATE", "BREAKER")
    return None if key in known else f"only {', '.join(known)}, but not {key!r}"


def _breaker_fault(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return f'a BREAKER such as {{"failures": 5, "within": 60, "pause": 30}}, not {value!r}'
    for key, setting in value.items():
        if key == "failures":
            if not _is_count(setting):
                return f"a whole number of at least 1 as a breaker's failures, but not {setting!r}"
        elif key not in ("within", "pause"):
            return f"only failures, within and pause for a BREAKER, but not {key!r}"
        elif isinstance(setting, bool) or not isinstance(setting, (int, float)) or setting <= 0:
            return f"seconds above zero as a breaker's {key}, but not {setting!r}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
