"""What follows a commit: the hot queue of this process is offered the events, or a bell rings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell, hooks
from ..conf import current
from ..events import Event
from ..signals import announce, event_dropped, event_queued, event_written


class _AfterCommit:
    """The one callback of a transaction, alias and savepoint level: hands over what it wrote."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.__qualname__ = type(self).__qualname__  # Django 5.2 logs a failed callback by it
        self.connection = connection
        self.events: list[Event] | None = []  # None once it ran
        self.others = False  # wrote something that is not offered

    def __call__(self) -> None:
        events, self.events = self.events, None
        alias = self.connection.alias
        queue = hooks.slot.queue(alias)
        if queue is None:
            doorbell.ring(self.connection)
            return
        for event in events or ():
            taken = queue.offer(event)
            self.others = self.others or not taken
            announce(event_queued if taken else event_dropped, sender=alias, event=event)
        if self.others:
            queue.look()


def hand_over(
    connection: BaseDatabaseWrapper, rows: Sequence[tuple[Event, str, str | None]]
) -> None:
    settings = current()
    if event_written.receivers:
        for event, _, _ in rows:
            announce(event_written, sender=connection.alias, event=event)
    if not settings.ENABLED or settings.MODE == "writer_only":
        return
    callback = _callback(connection)
    room = 0
    if hooks.slot.queue(connection.alias) is not None and callback.events is not None:
        room = max(settings.HOT_QUEUE_CAPACITY - len(callback.events), 0)
    hot = [row for row in rows if row[0].key is None and not row[0].is_delayed][:room]
    if hot and callback.events is not None:
        loads = hooks.serializer().loads
        callback.events += [event.written(text, loads) for event, text, _ in hot]
    callback.others = callback.others or len(hot) < len(rows)


def _callback(connection: BaseDatabaseWrapper) -> _AfterCommit:
    level = set(connection.savepoint_ids)
    for sids, function, *_ in islice(reversed(connection.run_on_commit), 20):
        if isinstance(function, _AfterCommit) and sids == level and function.events is not None:
            return function
    callback = _AfterCommit(connection)
    transaction.on_commit(callback, using=connection.alias, robust=True)
    return callback
