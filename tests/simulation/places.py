"""Places where a worker touches the world: statements, log lines, signals, the doorbell.

In a history of the kind "faulty places", some of them raise: once, a few times, or until all faults
are over. What is raised is what drivers raise, and what none should. In every second one, the
database refuses the errors of listeners for ever.
"""

from __future__ import annotations

import logging
import math
import random
import re
import sqlite3
from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from django_outbox import signals

FAILS = 0.15  # the part of all places
TIMES = (1, 3, math.inf)
UNSTORABLE = "planned \N{SNOWMAN}"
LIST = re.compile(r"\?(, ?\?)+")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


ERRORS: dict[str, Callable[[], Exception]] = {
    "operational": lambda: sqlite3.OperationalError("the server failed"),
    "data": lambda: sqlite3.DataError("value too long"),
    "integrity": lambda: sqlite3.IntegrityError("violates a constraint"),
    "unicode": lambda: UnicodeEncodeError("latin-1", "boom", 0, 1, "not in range"),
    "runtime": lambda: RuntimeError("of the driver"),
    "unprintable": Unprintable,
}


class Places(logging.Handler):
    """The places of one history; each decides, when it is first touched, whether it fails."""

    def __init__(self, seed: int, is_faulty: Callable[[], bool]) -> None:
        super().__init__(logging.DEBUG)
        self._chance, self._is_faulty = random.Random(f"places {seed}"), is_faulty
        self._faults: dict[tuple[Any, ...], tuple[float, str]] = {}  # times left, and what
        self._receivers: list[Any] = []  # kept alive: a signal holds none

    def error(self, *place: Any) -> Exception | None:
        """Return what this touch of a place raises."""
        if place not in self._faults:
            fails = self._chance.random() < FAILS
            times = self._chance.choice(TIMES) if fails else 0
            self._faults[place] = (times, self._chance.choice([*ERRORS]))
        left, name = self._faults[place]
        if not left or not self._is_faulty():
            return None
        self._faults[place] = (left - 1, name)
        return ERRORS[name]()

    def touch(self, *place: Any) -> None:
        if error := self.error(*place):
            raise error

    def statement(self, sql: str, params: Any) -> Exception | None:
        if UNSTORABLE in repr(params):
            return ERRORS["unicode"]()
        return self.error("statement", LIST.sub("?", sql))

    def handle(self, record: logging.LogRecord) -> bool:  # type: ignore[override]
        self.touch("log", record.pathname, record.lineno)
        return True

    def install(self) -> None:
        """Listen to the package's log and signals."""
        logging.disable(logging.NOTSET)
        logging.raiseExceptions = False  # the guard reports on standard error
        logging.getLogger().addHandler(self)
        logging.getLogger("django_outbox").setLevel(logging.DEBUG)
        for name, signal in vars(signals).items():
            if isinstance(signal, Signal):
                self._receive(name, signal)

    def _receive(self, name: str, signal: Signal) -> None:
        def receiver(**facts: Any) -> None:
            self.touch("signal", name)

        self._receivers.append(receiver)
        signal.connect(receiver)
