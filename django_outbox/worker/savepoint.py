"""A savepoint around each delivery that ``drain()`` makes in its caller's transaction."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper


class Savepoint:
    """A savepoint around a listener; rolled back if the listener broke the transaction."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._sid: str | None = None

    def __enter__(self) -> Savepoint:
        connection = self._connection
        if connection.in_atomic_block:
            self._depth = len(connection.atomic_blocks)
            self._names = len(connection.savepoint_ids)
            connection.errors_occurred = False
            self._sid = connection.savepoint() or ""
        return self

    def __exit__(self, *raised: object) -> None:
        connection, sid = self._connection, self._sid
        if sid is None:
            return
        leaked = len(connection.atomic_blocks) > self._depth
        del connection.atomic_blocks[self._depth :], connection.savepoint_ids[self._names :]
        if leaked or connection.needs_rollback or connection.errors_occurred:
            connection.needs_rollback = False
            connection.savepoint_rollback(sid)
        else:
            connection.savepoint_commit(sid)

    def renew(self) -> None:
        """End the savepoint and begin another, so that two listeners do not affect each other."""
        self.__exit__()
        self.__enter__()
