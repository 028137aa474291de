"""Queries a database that may never answer, with a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import TypeVar

from django.db import connections

from ..sql import is_in_memory

T = TypeVar("T")


def call_with_timeout(seconds: float, query: Callable[[str], T], alias: str) -> T:
    """Return the result of ``query(alias)``; raises ``TimeoutError`` after ``seconds``.

    With any driver, a connect to a host that does not answer blocks for minutes. So another thread
    calls ``query`` on its own connection, and is abandoned after the timeout. If the database is in
    memory, or a transaction is open, this thread calls ``query`` itself, without a timeout.
    """
    connection = connections[alias]
    if connection.in_atomic_block or is_in_memory(connection):
        return query(alias)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(query(alias))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)
        finally:
            connections.close_all()

    threading.Thread(target=run, name="outbox-question", daemon=True).start()
    try:
        return result.result(seconds)
    except TooLate as error:
        if result.done():
            raise  # the database's own error
        raise TimeoutError(f"no answer within {seconds:g} s") from error
