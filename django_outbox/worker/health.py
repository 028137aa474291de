"""The health of a worker process, as its threads report it: the database is not queried."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Protocol

REPORT_INTERVAL: Final = 1.0  # seconds between two reports to the supervisor
# Seconds without a report after which a process counts as dead, if leases are not longer.
SILENCE_LIMIT: Final = 5.0

GetHealth = Callable[[], "Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The reasons why a process is dead or unready; without any it is well."""

    dead: tuple[str, ...] = ()  # why it should be restarted
    unready: tuple[str, ...] = ()  # why it delivers nothing now

    @property
    def is_live(self) -> bool:
        return not self.dead

    @property
    def is_ready(self) -> bool:
        return not (self.dead or self.unready)

    def prefixed(self, name: str) -> Health:
        """Return the same health with ``name`` in front of each reason."""
        return Health(
            dead=tuple(f"{name}: {each}" for each in self.dead),
            unready=tuple(f"{name}: {each}" for each in self.unready),
        )


class Part(Protocol):
    """A part of a worker that has threads of its own."""

    def dead_reason(self, longest: float) -> str | None:
        """Return why only a new process helps, or None; a step may last ``longest`` seconds."""


class StartedPart(Part, Protocol):
    """A part whose threads start with the worker."""

    def start(self) -> None:
        """Start the threads."""


class DeliveringPart(Protocol):
    """A part of a worker without whose progress no event is delivered."""

    def unready_reason(self, longest: float) -> str | None:
        """Return why it makes no progress, or None; a step may last ``longest`` seconds."""


def health_of_parts(
    parts: Iterable[Part],
    delivering: Iterable[DeliveringPart],
    *,
    dead_after: float,
    unready_after: float,
) -> Health:
    """Return the health of a worker's threads, without a database query.

    A step longer than ``dead_after`` seconds makes the worker dead; one longer than
    ``unready_after`` seconds makes it unready.
    """
    return Health(
        dead=tuple(filter(None, (each.dead_reason(dead_after) for each in parts))),
        unready=tuple(filter(None, (each.unready_reason(unready_after) for each in delivering))),
    )


def combine(parts: Iterable[Health]) -> Health:
    """Return the health of a whole, with the reasons of all its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )


class HealthOutput(Protocol):
    """Makes the health of a process visible outside it."""

    @property
    def interval(self) -> float:
        """Return the seconds that may pass between two calls of ``publish``."""

    def publish(self, get_health: GetHealth) -> None:
        """Call ``get_health`` and publish its result, if it is time."""


class HealthPipe:
    """A pipe by which a process reports its health to its supervisor; the latest report counts.

    Neither end ever blocks: a report that does not fit is dropped, because another one follows.
    """

    interval = 0.5  # seconds between two calls of ``publish``

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._next_at = 0.0  # monotonic
        self._partial = b""  # the part of a report that has been read so far

    def keep_writer(self) -> None:
        """Keep only the writing end; for the process that reports."""
        os.close(self._read_end)

    def keep_reader(self) -> None:
        """Keep only the reading end; for the supervisor."""
        os.close(self._write_end)

    def publish(self, get_health: GetHealth) -> None:
        """Report the health, about once a second."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + REPORT_INTERVAL
        with suppress(OSError):  # full, or the supervisor is gone
            os.write(self._write_end, json.dumps(asdict(get_health())).encode()[:4000] + b"\n")

    def read_latest(self) -> Health | None:
        """Return the latest report; None if there was none since the last call."""
        text = self._partial
        with suppress(BlockingIOError):
            while part := os.read(self._read_end, 65_536):
                text += part
        *lines, self._partial = text.split(b"\n")
        for line in reversed(lines):
            with suppress(ValueError):  # too long, and therefore cut
                found = json.loads(line)
                return Health(dead=tuple(found["dead"]), unready=tuple(found["unready"]))
        return None

    def close_reader(self) -> None:
        os.close(self._read_end)
