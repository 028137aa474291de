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
SILENT: Final = 5.0  # seconds without a report after which a process counts as dead, at least

Look = Callable[[], "Health"]


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

    def of(self, name: str) -> Health:
        """Return the same health with ``name`` in front of each reason."""
        return Health(
            dead=tuple(f"{name}: {each}" for each in self.dead),
            unready=tuple(f"{name}: {each}" for each in self.unready),
        )


class Part(Protocol):
    """A part of a worker that has threads of its own."""

    def start(self) -> None:
        """Start the threads."""

    def fault(self, longest: float) -> str | None:
        """Return why only a new process helps, or None; a step may last ``longest`` seconds."""


class DatabasePart(Protocol):
    """A part of a worker that asks the database again and again."""

    def trouble(self, longest: float) -> str | None:
        """Return why it makes no progress, or None; a step may last ``longest`` seconds."""


def of_parts(
    parts: Iterable[Part], with_database: Iterable[DatabasePart], *, hangs: float, late: float
) -> Health:
    """Return the health of a worker's threads, without a database query.

    A step longer than ``hangs`` seconds makes the worker dead; longer than ``late``, unready.
    """
    return Health(
        dead=tuple(filter(None, (each.fault(hangs) for each in parts))),
        unready=tuple(filter(None, (each.trouble(late) for each in with_database))),
    )


def together(parts: Iterable[Health]) -> Health:
    """Return the health of a whole, with the reasons of all its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )


class Shown(Protocol):
    """Something that shows or reports the health of a process."""

    @property
    def tick(self) -> float:
        """Return the seconds that may pass between two calls of ``show``."""

    def show(self, look: Look) -> None:
        """Call ``look`` and show its result, if it is time."""


class Report:
    """A pipe by which a process reports its health to its supervisor; the latest report counts.

    Neither end ever blocks: a report that does not fit is dropped, because another one follows.
    """

    tick = 0.5  # seconds between two calls of ``show``

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._tell_at = 0.0  # monotonic
        self._rest = b""  # the part of a report that has been read so far

    def keep_writer(self) -> None:
        """Keep only the writing end; for the process that reports."""
        os.close(self._read_end)

    def keep_reader(self) -> None:
        """Keep only the reading end; for the supervisor."""
        os.close(self._write_end)

    def show(self, look: Look) -> None:
        """Report the health, about once a second."""
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + REPORT_INTERVAL
        with suppress(OSError):  # full, or the supervisor is gone
            os.write(self._write_end, json.dumps(asdict(look())).encode()[:4000] + b"\n")

    def hear(self) -> Health | None:
        """Return the latest report; None if there was none since the last call."""
        text = self._rest
        with suppress(BlockingIOError):
            while part := os.read(self._read_end, 65_536):
                text += part
        *words, self._rest = text.split(b"\n")
        for word in reversed(words):
            with suppress(ValueError):  # too long, and therefore cut
                found = json.loads(word)
                return Health(dead=tuple(found["dead"]), unready=tuple(found["unready"]))
        return None

    def forget(self) -> None:
        os.close(self._read_end)
