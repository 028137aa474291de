"""Read-only views of the table, workers and listeners for operators, at a bounded cost.

They may be asked with a timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any, TypeVar

from django.db import connections

from ..sql import is_in_memory

T = TypeVar("T")

_hung: dict[str, Future[Any]] = {}  # by alias: the last question that was not answered in time


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread, which may be abandoned; return its future result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def call_with_timeout(seconds: float, query: Callable[[str], T], alias: str) -> T:
    """Return the result of ``query(alias)``; raises ``TimeoutError`` after ``seconds``.

    With any driver, a connect to a host that does not answer blocks for minutes. So another thread
    calls ``query`` on its own connection, and is abandoned after the timeout; until it ends, none
    is started for the alias. If the database is in memory, or a transaction is open, this thread
    calls ``query`` itself, without a timeout.
    """
    connection = connections[alias]
    if connection.in_atomic_block or is_in_memory(connection):
        return query(alias)
    if alias in _hung and not _hung[alias].done():
        raise TimeoutError("no answer to an earlier query")

    def run() -> T:
        try:
            return query(alias)
        finally:
            connections.close_all()

    result = in_thread("outbox-question", run)
    try:
        return result.result(seconds)
    except TooLate as error:
        if result.done():
            raise  # the database's own error
        _hung[alias] = result
        raise TimeoutError(f"no answer within {seconds:g} s") from error
