"""After an INSERT: call the writer hooks, and hand the events over once the transaction commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from .. import doorbell, hooks
from ..conf import Settings, current
from ..events import Event
from ..hooks import WriterHooks
from ..signals import announce, event_dropped, event_queued, event_written
from .hot_queue import hot_queues

Rows = Sequence[tuple[Event, str, str | None]]  # event, payload text, headers text


def follow(connection: BaseDatabaseWrapper, rows: Rows) -> None:
    """Announce inserted events, and register what runs at the commit or the rollback."""
    if event_written.receivers:
        for event, _, _ in rows:
            announce(event_written, sender=connection.alias, event=event)
    settings, told = current(), hooks.writer_hooks()
    if told is not None:
        loads = hooks.serializer().loads
        written = [event.written(text, loads) for event, text, _ in rows]
        told.tell("after_write", written)
        _callback(connection, told).written += written
    if settings.ENABLED and settings.MODE != "writer_only":
        _hand_over(_callback(connection, told), rows, settings)


def _hand_over(callback: _AfterCommit, rows: Rows, settings: Settings) -> None:
    room = 0
    if hot_queues.of(callback.connection.alias) is not None:
        room = max(settings.HOT_QUEUE_CAPACITY - len(callback.offers), 0)
    hot = [row for row in rows if row[0].key is None and not row[0].is_delayed][:room]
    if hot:
        loads = hooks.serializer().loads
        callback.offers += [event.written(text, loads) for event, text, _ in hot]
    callback.others += len(rows) - len(hot)


class _Fate:
    """Whether a transaction has committed; shared by all its callbacks."""

    committed = False


class _AfterCommit:
    """The on-commit callback of a transaction: one per alias and savepoint level.

    Django has no hook for a rollback, but drops the callback when its savepoint, transaction or
    connection is lost. CPython then frees it at once, and ``__del__`` reports the rollback.
    """

    def __init__(
        self, connection: BaseDatabaseWrapper, told: WriterHooks | None, fate: _Fate
    ) -> None:
        self.__qualname__ = type(self).__qualname__  # Django 5.2 logs it if the callback fails
        self.connection = connection
        self.told = told
        self.fate = fate
        self.ran = False
        self.written: list[Event] = []  # passed to the hooks
        self.offers: list[Event] = []
        self.others = 0  # number of rows not offered to the hot queue

    def __call__(self) -> None:
        self.ran = self.fate.committed = True
        written, self.written = self.written, []
        try:
            if self.offers or self.others:
                self._hand_over()
        finally:
            if self.told is not None and written:
                self.told.tell("after_commit", written)

    def _hand_over(self) -> None:
        (offers, others), (self.offers, self.others) = (self.offers, self.others), ([], 0)
        alias = self.connection.alias
        queue = hot_queues.of(alias)
        if queue is None:
            doorbell.ring(self.connection)
            return
        for event in offers:
            taken = queue.offer(event)
            others += not taken
            announce(event_queued if taken else event_dropped, sender=alias, event=event)
        if others:
            queue.poll()

    def __del__(self) -> None:
        if self.told is None or not self.written or self.fate.committed:
            return
        with _refusing(self.connection.alias):
            self.told.tell("after_rollback", self.written)


class _Head:
    """Wraps another app's callback that runs before ours: notes the commit, in case it fails."""

    def __init__(self, function: Callable[[], Any], fate: _Fate) -> None:
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        self.function = function
        self.fate = fate

    def __call__(self) -> None:
        self.fate.committed = True
        self.function()


def _callback(connection: BaseDatabaseWrapper, told: WriterHooks | None) -> _AfterCommit:
    level = set(connection.savepoint_ids)
    for sids, function, *_ in islice(reversed(connection.run_on_commit), 20):
        if isinstance(function, _AfterCommit) and sids == level and not function.ran:
            return function
    fate = _Fate() if told is None or "after_rollback" not in told else _fate(connection)
    callback = _AfterCommit(connection, told, fate)
    transaction.on_commit(callback, using=connection.alias, robust=True)
    return callback


def _fate(connection: BaseDatabaseWrapper) -> _Fate:
    """Return the ``_Fate`` of the first waiting callback, which learns of the commit first.

    If another app registered it, wrap it in place: an entry before it would shift those that a
    running ``captureOnCommitCallbacks`` counts. Django cannot drop it without dropping ours:
    those of its savepoints that are still open enclose ours too.
    """
    waiting: list[Any] = connection.run_on_commit
    outermost = connection.atomic_blocks[0]
    if not waiting or getattr(outermost, "_from_testcase", False):  # a TestCase's, never commits
        return _Fate()
    sids, function, robust = waiting[0]
    if not isinstance(function, (_AfterCommit, _Head)):
        function = _Head(function, _Fate())
        waiting[0] = (sids, function, robust)
    return _Fate() if function.fate.committed else function.fate


@contextmanager
def _refusing(alias: str) -> Iterator[None]:
    """Refuse queries and ``atomic()`` blocks on an alias where Django is rolling back."""

    def refuse() -> None:
        raise TransactionManagementError(
            f"A query on {alias!r} inside after_rollback, in the midst of Django's own rollback. "
            "Expected none: note what you need, and ask the database afterwards."
        )

    # The current thread's connection: the garbage collector may run this in any thread.
    connection = connections[alias]
    connection.ensure_connection = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.ensure_connection
