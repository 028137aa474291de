"""After an INSERT: call the writer hooks, and hand the events over once the transaction commits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Protocol
from weakref import WeakSet

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from .. import doorbell, hooks
from ..conf import Settings, current
from ..events import Event
from ..listeners.queues import routes_of_new
from ..signals import announce, event_dropped, event_queued, event_written

Rows = Sequence[tuple[Event, str, str | None]]  # event, payload text, headers text


class HotQueue(Protocol):
    """The interface of a worker to the writers in its process."""

    def serves(self, queue: str) -> bool:
        """Return whether the worker delivers events of this queue."""

    def offer(self, event: Event) -> bool:
        """Accept the event and return True, or return False; never block, never raise."""

    def poll(self) -> None:
        """Have the claimer poll the table, where an event is due now or later."""


class HotQueues:
    """The hot queues of this process's workers, by database alias; empty after a fork."""

    start_worker: Callable[[str], None] | None = None  # set by EMBEDDED; takes an alias

    def __init__(self) -> None:
        self.by_alias: dict[str, HotQueue] = {}
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def of(self, alias: str) -> HotQueue | None:
        """Return the hot queue of this process; with EMBEDDED the first call starts its worker."""
        if self.start_worker is not None and alias not in self._started:
            with self._lock:
                first = alias not in self._started
                self._started.add(alias)
            if first and alias not in self.by_alias:
                self.start_worker(alias)
        return self.by_alias.get(alias)

    def _reset(self) -> None:
        self.by_alias.clear()
        self._started: set[str] = set()
        self._lock = threading.Lock()


hot_queues = HotQueues()


def after_insert(connection: BaseDatabaseWrapper, rows: Rows) -> None:
    """Announce inserted events, and register what runs at the commit or the rollback."""
    if event_written.receivers:
        for event, _, _ in rows:
            announce(event_written, sender=connection.alias, event=event)
    settings, writer_hooks = current(), hooks.writer_hooks()
    if writer_hooks is not None:
        loads = hooks.serializer().loads
        written = [event.as_delivered(text, loads) for event, text, _ in rows]
        writer_hooks.run("after_write", written)
        _callback(connection).written += written
    if settings.ENABLED and settings.MODE != "writer_only":
        _add_rows(_callback(connection), rows, settings)


def wake_after_commit(connection: BaseDatabaseWrapper) -> None:
    """Have workers look for what is due once the transaction commits."""
    settings = current()
    if settings.ENABLED and settings.MODE != "writer_only":
        _callback(connection).not_offered += 1


def _add_rows(callback: _AfterCommit, rows: Rows, settings: Settings) -> None:
    room = 0
    if hot_queues.of(callback.connection.alias) is not None:
        room = max(settings.HOT_QUEUE_CAPACITY - len(callback.offers), 0)
        callback.queues |= {each.queue for row in rows for each in routes_of_new(row[0])}
    # What waits for its time, stream or slot is claimed from the table.
    hot = [row for row in rows if row[0].key is None and not row[0].is_delayed]
    hot = [row for row in hot if row[0].coalesce is None][:room]
    if hot:
        loads = hooks.serializer().loads
        callback.offers += [event.as_delivered(text, loads) for event, text, _ in hot]
    callback.not_offered += len(rows) - len(hot)


class _TransactionState:
    """Whether a transaction has committed, and our callbacks in it; shared by all of them."""

    def __init__(self) -> None:
        self.committed = False
        self.callbacks: WeakSet[_AfterCommit] = WeakSet()


class _AfterCommit:
    """The on-commit callback of a transaction: one per alias and savepoint level.

    Django has no hook for a rollback, but drops the callback when its savepoint, transaction or
    connection is lost. CPython then frees it at once, and ``__del__`` reports the rollback.
    """

    def __init__(self, connection: BaseDatabaseWrapper, state: _TransactionState) -> None:
        self.__qualname__ = type(self).__qualname__  # Django 5.2 logs it if the callback fails
        self.connection = connection
        self.writer_hooks = hooks.writer_hooks()
        self.state = state
        state.callbacks.add(self)
        self.ran = False
        self.written: list[Event] = []  # passed to the hooks
        self.offers: list[Event] = []
        self.not_offered = 0  # number of rows not offered to the hot queue
        self.queues: set[str] = set()  # in which its rows wait

    def __call__(self) -> None:
        self.ran = self.state.committed = True
        written, self.written = self.written, []
        try:
            if self.offers or self.not_offered:
                self._hand_over()
        finally:
            if self.writer_hooks is not None and written:
                self.writer_hooks.run("after_commit", written)

    def _hand_over(self) -> None:
        offers, not_offered, queues = self.offers, self.not_offered, self.queues
        self.offers, self.not_offered, self.queues = [], 0, set()
        alias = self.connection.alias
        queue = hot_queues.of(alias)
        if queue is None:
            doorbell.ring(self.connection)
            return
        for event in offers:
            taken = queue.offer(event)
            not_offered += not taken
            announce(event_queued if taken else event_dropped, sender=alias, event=event)
        if not_offered:
            queue.poll()
        if not all(map(queue.serves, queues)):  # other workers have to deliver some
            doorbell.ring(self.connection)

    def __del__(self) -> None:
        if self.writer_hooks is None or not self.written or self.state.committed:
            return
        with _refuse_queries(self.connection.alias):
            self.writer_hooks.run("after_rollback", self.written)


class _CommitObserver:
    """Wraps another app's callback that runs before ours: notes the commit.

    If it raises, Django drops those behind it, so ours are called at once.
    """

    def __init__(self, function: Callable[[], Any], state: _TransactionState) -> None:
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        self.function = function
        self.state = state

    def __call__(self) -> None:
        self.state.committed = True
        try:
            self.function()
        except BaseException:
            for each in [*self.state.callbacks]:
                with suppress(Exception):
                    each()
            raise


def _callback(connection: BaseDatabaseWrapper) -> _AfterCommit:
    level = set(connection.savepoint_ids)
    for sids, function, *_ in islice(reversed(connection.run_on_commit), 20):
        if isinstance(function, _AfterCommit) and sids == level and not function.ran:
            return function
    callback = _AfterCommit(connection, _shared_state(connection))
    transaction.on_commit(callback, using=connection.alias, robust=True)
    return callback


def _shared_state(connection: BaseDatabaseWrapper) -> _TransactionState:
    """Return the state of the transaction; wrap those callbacks of other apps that precede ours.

    They are wrapped in place: an entry before them would shift those that a running
    ``captureOnCommitCallbacks`` counts. Django cannot drop the first without dropping ours: those
    of its savepoints that are still open enclose ours too.
    """
    waiting: list[Any] = connection.run_on_commit
    state = _TransactionState()
    if getattr(connection.atomic_blocks[0], "_from_testcase", False):  # never commits
        return state
    ours = (_AfterCommit, _CommitObserver)
    if waiting and isinstance(waiting[0][1], ours) and not waiting[0][1].state.committed:
        state = waiting[0][1].state
    for place in reversed(range(len(waiting))):
        sids, function, robust = waiting[place]
        if isinstance(function, ours):  # those before it are wrapped
            break
        waiting[place] = (sids, _CommitObserver(function, state), robust)
    return state


@contextmanager
def _refuse_queries(alias: str) -> Iterator[None]:
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
