"""Effects: what a verb cannot do itself. It yields a statement, and goes on with its answer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

T = TypeVar("T")

Statement = Callable[[BaseDatabaseWrapper], Any]
Steps = Generator[Statement, Any, T]  # a verb in progress


def perform(connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
    """Make the steps of a verb, on a connection; return its result."""
    try:
        statement = next(steps)
        while True:
            try:
                answer = statement(connection)
            except BaseException as error:  # noqa: BLE001 - the verb decides
                statement = steps.throw(error)
            else:
                statement = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
