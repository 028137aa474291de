"""Statements that fail on purpose: as a database does, or as a lost answer looks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DataError, IntegrityError, InternalError, OperationalError, connections
from django.db.backends.signals import connection_created

Raised = Callable[[], Exception]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


# What drivers and Django raise for a value, and what none should raise.
ERRORS: dict[str, Raised] = {
    "OperationalError": lambda: OperationalError(1300, "Invalid utf8mb3 character string"),
    "DataError": lambda: DataError("value too long"),
    "IntegrityError": lambda: IntegrityError("violates a constraint"),
    "InternalError": lambda: InternalError("raised by a trigger"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("latin-1", "boom", 0, 1, "not in range"),
    "RuntimeError": lambda: RuntimeError("of the driver"),
    "unprintable": Unprintable,
}


class Fault:
    """Raises in those statements of this process that match a pattern and have a text."""

    def __init__(
        self,
        pattern: str,
        error: Raised,
        *,
        text: str = "",
        thread: str = "",
        times: float = float("inf"),
        after: bool = False,
    ) -> None:
        """``after``: raise once the statement has been executed; ``thread``: in one's name."""
        self._pattern = re.compile(pattern, re.DOTALL)
        self._error, self._text, self.left, self._after = error, text, times, after
        self._thread = thread
        self.count = 0  # statements that failed

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        hit = self.left > 0 and self._pattern.search(sql) and self._text in repr(params)
        hit = hit and self._thread in threading.current_thread().name
        if hit and not self._after:
            self._fail()
        result = execute(sql, params, many, context)
        if hit:
            self._fail()
        return result

    def _fail(self) -> None:
        self.left -= 1
        self.count += 1
        raise self._error()

    def stop(self) -> None:
        self.left = 0


@contextmanager
def failing(fault: Fault) -> Iterator[Fault]:
    """Make statements fail on every connection, the engine's included, during a block."""

    def add(*, connection: Any, **kwargs: Any) -> None:
        if fault not in connection.execute_wrappers:
            connection.execute_wrappers.append(fault)

    connection_created.connect(add)
    mine = connections["default"].execute_wrappers
    mine.append(fault)
    try:
        yield fault
    finally:
        connection_created.disconnect(add)
        mine.remove(fault)
