"""How a process is, by what its threads show of themselves: the database is not asked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Protocol

TELL_EVERY: Final = 1.0  # seconds
SILENT: Final = 5.0  # seconds without a word after which a process is thought dead, at least

Look = Callable[[], "Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Why a process should be restarted, and why it delivers nothing just now; empty: all well."""

    dead: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        return not self.dead

    @property
    def is_ready(self) -> bool:
        return not (self.dead or self.unready)

    def of(self, name: str) -> Health:
        """The same, each reason with the name of who gave it."""
        return Health(
            dead=tuple(f"{name}: {each}" for each in self.dead),
            unready=tuple(f"{name}: {each}" for each in self.unready),
        )


def together(parts: Iterable[Health]) -> Health:
    """Return the health of a whole: it is as well as the worst of its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )


class Shown(Protocol):
    """Who is told how a process is."""

    @property
    def tick(self) -> float:
        """Seconds that may pass between two looks."""

    def show(self, look: Look) -> None:
        """Take a look now, if it is time."""


class Report:
    """A pipe by which a process tells its supervisor how it is; the latest word counts.

    Neither end ever waits: what does not fit is dropped, for another word follows.
    """

    tick = 0.5  # seconds between two looks of who has this to tell

    def __init__(self) -> None:
        self._ear, self._mouth = os.pipe()
        for end in (self._ear, self._mouth):
            os.set_blocking(end, False)
        self._tell_at = 0.0  # monotonic
        self._rest = b""  # of a word that was not heard whole

    def keep_mouth(self) -> None:
        """Be the end of the process that tells."""
        os.close(self._ear)

    def keep_ear(self) -> None:
        """Be the end of the supervisor."""
        os.close(self._mouth)

    def show(self, look: Look) -> None:
        """Tell how it is, about once a second."""
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + TELL_EVERY
        with suppress(OSError):  # full, or nobody is left to hear it
            os.write(self._mouth, json.dumps(asdict(look())).encode()[:4000] + b"\n")

    def hear(self) -> Health | None:
        """Return the latest word; None if there was none since the last time."""
        text = self._rest
        with suppress(BlockingIOError):
            while part := os.read(self._ear, 65_536):
                text += part
        *words, self._rest = text.split(b"\n")
        for word in reversed(words):
            with suppress(ValueError):  # too long to be told whole
                found = json.loads(word)
                return Health(dead=tuple(found["dead"]), unready=tuple(found["unready"]))
        return None

    def forget(self) -> None:
        os.close(self._ear)
