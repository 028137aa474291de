"""Effects: what a verb cannot do itself. It yields one, and goes on with its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..models import OutboxOperation
from ..sql import dialect_of
from ..sql.halving import answers

T = TypeVar("T")
Kind = OutboxOperation.Kind


class Wait(NamedTuple):
    """Nothing happens for so many seconds; with 0, others may go first."""

    seconds: float


Statement = Callable[[BaseDatabaseWrapper], Any]
Steps = Generator[Statement | Wait, Any, T]  # a verb or a loop's step in progress


def ask(name: str, *args: Any, **given: Any) -> Statement:
    """Return a statement of the database's dialect."""
    return lambda connection: getattr(dialect_of(connection), name)(*args, **given)


def noted(change: Statement, kind: str, about: str) -> Statement:
    """Return the change, which in its transaction adds to the log of operations, if it is made."""

    def make(connection: BaseDatabaseWrapper) -> Any:
        with transaction.atomic(using=connection.alias):
            if made := change(connection):
                OutboxOperation.objects.using(connection.alias).note(kind, about)
        return made

    return make


def act(call: Callable[[], T]) -> Steps[T]:
    """Call what makes no statement of ours."""
    return (yield lambda _: call())  # type: ignore[no-any-return]


def in_turn(*parts: Steps[Any]) -> Steps[None]:
    """Take all parts although some raise; then raise the first error.

    If the database does not answer any more, do that at once.
    """
    first: Exception | None = None
    for part in parts:
        try:
            yield from part
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
            if not (yield answers):
                break
    if first is not None:
        raise first


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
