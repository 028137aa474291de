"""Cancel or reschedule what no worker has taken yet."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from ..events import ABSENT, LENGTHS, delay, exact_text, identity, instant, suggest_names
from ..exceptions import InvalidEvent
from .on_commit import wake_after_commit
from .write import connection_to, model

if TYPE_CHECKING:
    from ..models import OutboxOperation, OutboxQuerySet

logger = logging.getLogger("django_outbox")


def cancel(*, event_id: Any = None, unique_key: str | None = None, using: str | None = None) -> int:
    """Delete the deliveries of an event that no worker has taken yet; return how many.

    Name the event by its id or its unique key, which is free again then. What a worker has leased,
    or what has ended, stays. It belongs to the current transaction, if there is one.

    Raises ``InvalidEvent`` unless one of the two is given.

    Example::

        outbox.cancel(unique_key="reminder:17")
    """
    rows, operation = _named("cancel", event_id, unique_key, using)
    if count := rows.cancel(by=operation):
        logger.info("deliveries cancelled count=%d event=%s", count, event_id or unique_key)
    return count


@suggest_names
def reschedule(
    *,
    event_id: Any = None,
    unique_key: str | None = None,
    available_at: datetime = ABSENT,  # type: ignore[assignment]
    deliver_after: float | timedelta = ABSENT,  # type: ignore[assignment]
    using: str | None = None,
) -> int:
    """Give the deliveries of an event that no worker has taken yet a due time; return how many.

    Name the event as for ``cancel``, the time as for ``write``. What is behind an event with a key
    waits with it.

    Raises ``InvalidEvent`` unless one of the two names and one of the two times is given.

    Example::

        outbox.reschedule(unique_key="reminder:17", deliver_after=3600)
    """
    rows, operation = _named("reschedule", event_id, unique_key, using)
    due = _due(available_at, deliver_after)
    with transaction.atomic(using=rows.db):
        if count := rows.reschedule(due, by=operation):
            wake_after_commit(connections[rows.db])
    return count


def _named(
    verb: str, event_id: Any, unique_key: str | None, using: str | None
) -> tuple[OutboxQuerySet, OutboxOperation]:
    """Return the rows of an event that is named by its id or its unique key, and the log's row."""
    from ..models.operation import acting

    given = {"event_id": identity(event_id), "unique_key": unique_key}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise InvalidEvent(f"{verb} got {given or 'no name'}; expected event_id or unique_key.")
    for name, value in given.items():
        exact_text(name, value, most=LENGTHS[name])
    rows = model().objects.using(connection_to(using).alias)
    if unique_key is not None:
        event_id = rows.filter(**given).values_list("event_id", flat=True).first()
    rows = rows.none() if event_id is None else rows.of_event(identity(event_id))
    return rows, acting(verb, "", ", ".join(f"{name}: {each}" for name, each in given.items()))


def _due(available_at: Any, deliver_after: Any) -> datetime | timedelta:
    if available_at is None or deliver_after is None:
        raise TypeError("None is not a due time; expected available_at or deliver_after.")
    if (available_at is ABSENT) == (deliver_after is ABSENT):
        raise InvalidEvent("Expected either available_at or deliver_after.")
    if deliver_after is not ABSENT:
        return delay(deliver_after)
    return instant("available_at", available_at)
