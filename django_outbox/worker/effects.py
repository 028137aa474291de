"""Effects: what a verb cannot do itself. It yields one, and goes on with its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from ..sql import dialect_of

T = TypeVar("T")


class Wait(NamedTuple):
    """Nothing happens for so many seconds; with 0, others may go first."""

    seconds: float


Statement = Callable[[BaseDatabaseWrapper], Any]
Steps = Generator[Statement | Wait, Any, T]  # a verb or a loop's step in progress


def ask(name: str, *args: Any, **given: Any) -> Statement:
    """Return a statement of the database's dialect."""
    return lambda connection: getattr(dialect_of(connection), name)(*args, **given)


def perform(connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
    """Make the steps of a verb, on a connection; return its result."""
    try:
        effect = next(steps)
        while True:
            try:
                answer = _make(connection, effect)
            except BaseException as error:  # noqa: BLE001 - the verb decides
                effect = steps.throw(error)
            else:
                effect = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _make(connection: BaseDatabaseWrapper, effect: Statement | Wait) -> Any:
    return time.sleep(effect.seconds) if isinstance(effect, Wait) else effect(connection)
