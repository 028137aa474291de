"""A question to a database that may never answer, asked for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import TypeVar

from django.db import connections

from .. import dialects

T = TypeVar("T")


def within(seconds: float, ask: Callable[[str], T], alias: str) -> T:
    """Return the answer of ``ask(alias)``; ``TimeoutError`` if there is none in time.

    A host that does not answer holds a connect for minutes, whatever the driver; so another thread
    asks, with a connection of its own, and is left behind. Where only this thread has the database,
    in memory or inside a transaction, it asks itself.
    """
    connection = connections[alias]
    if connection.in_atomic_block or dialects.is_in_memory(connection):
        return ask(alias)
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask(alias))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)
        finally:
            connections.close_all()

    threading.Thread(target=run, name="outbox-question", daemon=True).start()
    try:
        return answer.result(seconds)
    except TooLate as error:
        if answer.done():
            raise  # the database's own
        raise TimeoutError(f"no answer within {seconds:g} s") from error
