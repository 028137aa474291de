"""Write many rows although the database refuses some: halve them until the others are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from . import dialect_of
from .values import Ending

T = TypeVar("T")


class Part(NamedTuple):
    """Rows that were written together, or a row that was refused."""

    rows: list[Any]
    is_written: bool
    result: Any = None  # what ``write`` returned
    error: Exception | None = None  # why the row was refused, or written as shortened


def in_halves(
    connection: BaseDatabaseWrapper,
    rows: list[T],
    write: Callable[[list[T]], Any],
    *,
    shorter: Sequence[Callable[[T], T]] = (),
    accepts: bool = False,
) -> Iterator[Part]:
    """Write rows; ``write`` gets some of them and undoes what it cannot finish.

    A row that is refused alone is tried again as each of ``shorter`` returns it. Rows that are
    written or refused are yielded and removed from ``rows``. If two are refused and none has been
    written, the others are not tried: the database may refuse everything now, unless it is known
    that it ``accepts`` such statements.

    Raises an error that says nothing about the rows: the statement has waited for a lock in vain,
    another transaction was first, or the database takes no writes, on a new connection either.
    """
    parts, refused = [[*rows]] * bool(rows), 0
    while parts and (accepts or refused < 2):
        part = parts.pop()
        written = _try(connection, write, part)
        if not written.is_written and len(part) > 1:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
            continue
        for shorten in shorter:
            if not written.is_written:
                again = _try(connection, write, [shorten(part[0])])
                written = Part(part, again.is_written, again.result, again.error or written.error)
        accepts = accepts or written.is_written
        refused += not written.is_written
        rows[:] = without(rows, part)
        yield written


def _try(
    connection: BaseDatabaseWrapper,
    write: Callable[[list[Any]], Any],
    rows: list[Any],
    *,
    is_first: bool = True,
) -> Part:
    session = connection.connection
    try:
        return Part(rows, True, write(rows))
    except Exception as error:  # for a value, drivers raise all kinds
        dialect = dialect_of(connection)
        says_nothing = dialect.is_lock_wait(error) or dialect.is_conflict(error)
        if says_nothing or not answers(connection):
            raise
        if is_first and connection.connection is not session:  # it may be all that was wrong
            return _try(connection, write, rows, is_first=False)
        return Part(rows, False, error=error)


def settle_within(
    connection: BaseDatabaseWrapper, endings: Sequence[Ending], **options: Any
) -> int:
    """Settle in the open transaction; return how many rows were ours, as read.

    What the database refuses is stored shortened, so that the listener's changes are not undone.
    """

    def write(some: list[Ending]) -> int:
        with transaction.atomic(using=connection.alias):
            return dialect_of(connection).settle_all(endings=some, **options)

    if all(each.decision.error is None for each in endings):
        return dialect_of(connection).settle_all(endings=endings, **options)
    count = 0
    for part in in_halves(connection, [*endings], write, shorter=[_shortened]):
        if not part.is_written and part.error is not None:
            raise part.error
        count += part.result
    return count


def _shortened(each: Ending) -> Ending:
    return each._replace(decision=each.decision.shortened())


def answers(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database takes writes, on a new connection if the present one is broken.

    One that has become read-only refuses every row, and says nothing about any of them.
    """
    try:
        if connection.connection is None or not connection.is_usable():
            if connection.in_atomic_block:
                return False
            connection.close()
            connection.ensure_connection()
        dialect_of(connection).settle_done(me="", ids=[""])
        return True
    except Exception:  # noqa: BLE001 - whatever keeps it from writing
        return False


def without(rows: list[T], some: list[T]) -> list[T]:
    """Return the rows that are not among ``some``, which are the same objects."""
    if len(some) == len(rows):
        return []
    gone = {id(each) for each in some}
    return [each for each in rows if id(each) not in gone]
