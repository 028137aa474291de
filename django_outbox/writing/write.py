"""Write events: validate them, serialise them once, insert them in the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.db import DatabaseError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import hooks, transactions
from ..conf import current, is_test_run
from ..events import (
    ABSENT,
    GLOBAL,
    Event,
    aggregate_key,
    check_payload,
    check_text,
    declared,
    encode_headers,
    suggest_names,
)
from ..exceptions import DuplicateEvent, InvalidEvent
from ..listeners.queues import routes_of_new
from ..sql import dialect_of
from .on_commit import after_insert

if TYPE_CHECKING:
    from ..models import OutboxEvent

Row = tuple[Event, str, str | None]  # event, payload text, headers text
DUE_TIMES = ("available_at", "deliver_after")


@suggest_names
def write(
    event_type: Any,
    payload: Any = None,
    *,
    aggregate: Any = None,
    aggregate_type: Any = None,
    aggregate_id: str | None = None,
    tenant_id: str | None = None,
    headers: Any = None,
    key: Any = None,
    event_id: Any = None,
    occurred_at: datetime | None = None,
    available_at: datetime = ABSENT,  # type: ignore[assignment]
    deliver_after: float | timedelta = ABSENT,  # type: ignore[assignment]
    unique_key: str | None = None,
    on_duplicate: Literal["raise", "ignore"] = "raise",
    coalesce: Any = None,
    using: str | None = None,
) -> str | None:
    """Write one event in the current transaction; return its id, or None if a hook suppressed it.

    - ``event_type``: a str, an enum member, an instance of a class declared with ``@event``, which
      supplies payload, key and headers, or an ``Event``, which supplies all other fields.
    - ``payload``: any JSON-serializable value.
    - ``aggregate``: a saved model instance; fills the next two arguments.
    - ``aggregate_type``, ``aggregate_id``: default: ``GLOBAL`` and None.
    - ``tenant_id``: the tenant that the event is about.
    - ``headers``: a mapping of str to str.
    - ``key``: a str, int or UUID: the stream in which the event is delivered in order. It cannot be
      combined with a delay.
    - ``event_id``: your own id, up to 36 characters; default: a ULID.
    - ``occurred_at``: default: now.
    - ``available_at``: the event is not delivered before it.
    - ``deliver_after``: seconds or a timedelta that have to pass before the delivery.
    - ``unique_key``: rejects a second event with the same unique key.
    - ``on_duplicate``: ``"ignore"``: return the id of the existing event instead of raising.
    - ``coalesce``: a str, int or UUID: of the pending deliveries of each listener that have it,
      the newest runs when the first is due, and the others end. Not with a ``key``.
    - ``using``: the database alias; default: the one that the router chooses for ``OutboxEvent``.

    Raises ``NoActiveTransaction`` outside ``atomic()`` on that alias, and ``InvalidEvent`` (or its
    subclass ``PayloadTooLarge``) if the event cannot be stored; both before any SQL. Raises
    ``DuplicateEvent`` if the ``event_id`` or ``unique_key`` exists. The transaction stays usable
    after each of them. Raises ``TypeError`` for an explicit None as a due time.

    Example::

        with transaction.atomic():
            outbox.write("order.placed", {"order": 7}, deliver_after=timedelta(minutes=5))
    """
    if on_duplicate not in ("raise", "ignore"):
        raise ValueError(f"on_duplicate is {on_duplicate!r}; expected 'raise' or 'ignore'.")
    event = _event(
        event_type,
        {
            "payload": payload,
            "aggregate": aggregate,
            "aggregate_type": aggregate_type,
            "aggregate_id": aggregate_id,
            "tenant_id": tenant_id,
            "headers": headers,
            "key": key,
            "event_id": event_id,
            "occurred_at": occurred_at,
            "available_at": available_at,
            "deliver_after": deliver_after,
            "unique_key": unique_key,
            "coalesce": coalesce,
        },
    )
    ids = _write([event], using, on_duplicate)
    return ids[0] if ids else None


def write_many(events: Iterable[Any], *, using: str | None = None) -> list[str]:
    """Write events in the current transaction, all or none; return their ids in order.

    Pass ``Event`` instances, or instances of classes declared with ``@event``. Uses one INSERT (in
    parts of at most 4 MB) and one on-commit callback.

    Raises the same errors as ``write``.

    Example::

        teapots = outbox.Event(event_type="stock.counted", payload={"sku": "teapot"})
        kettles = outbox.Event(event_type="stock.counted", payload={"sku": "kettle"})
        with transaction.atomic():
            outbox.write_many([teapots, kettles])
    """
    return _write([_as_event(each) for each in events], using, "raise")


# Only the API is async: both run in Django's thread-sensitive thread. Open a transaction there.
awrite = sync_to_async(write)
awrite_many = sync_to_async(write_many)


def _write(events: list[Event], using: str | None, on_duplicate: str) -> list[str]:
    connection = connection_to(using)
    transactions.require(connection, "An event was written")
    rows = _rows(events)
    if not rows:
        return []
    transactions.require_charset(connection, chain.from_iterable(map(_texts, rows)))
    try:
        _insert(connection, rows)
    except DuplicateEvent:
        if on_duplicate == "raise":
            raise
        return [_existing_id(connection, rows[0][0])]
    except DatabaseError as error:
        transactions.raise_if_missing_table(connection, error)
        raise
    for event in events:
        event.mark_written()
    after_insert(connection, rows)
    return [event.event_id for event, _, _ in rows]


def connection_to(using: str | None) -> BaseDatabaseWrapper:
    return connections[router.db_for_write(model()) if using is None else using]


@cache
def model() -> type[OutboxEvent]:
    # Imported here, because users import write in their own models.py, while apps load.
    from ..models import OutboxEvent

    return OutboxEvent


def _event(event_type: Any, fields: Mapping[str, Any]) -> Event:
    """Create an event from the arguments that were given; for a due time, None counts as given."""
    given = {
        name: value
        for name, value in fields.items()
        if value is not ABSENT and (value is not None or name in DUE_TIMES)
    }
    if not isinstance(event_type, Event):
        return Event(event_type=event_type, **given)
    if given:
        raise InvalidEvent("write got an Event and further fields; expected them in the Event.")
    return event_type


def _as_event(given: Any) -> Event:
    if isinstance(given, Event):
        return given
    if declared(type(given)) is None:
        raise InvalidEvent(
            f"write_many got {given!r}; expected Event instances, or instances of classes declared "
            "with @event."
        )
    return Event(event_type=given)


def _rows(events: list[Event]) -> list[Row]:
    """Apply context providers and writer hooks, then serialise; runs before any SQL."""
    if context := hooks.context():
        events = [event.copy_with(headers={**context, **event.headers}) for event in events]
    writer_hooks = hooks.writer_hooks()
    if writer_hooks is not None:
        events = writer_hooks.run_before_write(events)
    if len(events) > 1 and len({event.event_id for event in events}) < len(events):
        raise DuplicateEvent(
            "Two events of one write have the same event_id; nothing was written. Expected ids "
            'that differ: dataclasses.replace(event, event_id="") gives a copy one of its own.'
        )
    return [_row(event) for event in events]


def _row(event: Event) -> Row:
    event = _with_stream_key(event)
    return event, *serialize(event)


def serialize(event: Event) -> tuple[str, str | None]:
    """Return payload and headers as stored; raise ``InvalidEvent`` if they cannot be."""
    text, serializer = event._payload_text, hooks.serializer()
    if text is None:
        text = serializer.dumps(event.payload)
    most = current().MAX_PAYLOAD_BYTES
    check_text(text, most=most)
    reads = django_settings.DEBUG or is_test_run()  # typed payloads are read back
    check_payload(event.event_type, event.payload, text, serializer.loads, is_compared=reads)
    return text, encode_headers(event.headers, most=most)


def _with_stream_key(event: Event) -> Event:
    """Set the key of an event without one in MODE "ordered", unless it is delayed or in a slot."""
    settings = current()
    if settings.MODE != "ordered" or event.key is not None or event.is_delayed:
        return event
    if event.coalesce is not None:
        return event
    if settings.ORDERING == "global":
        return event.copy_with(key=GLOBAL)
    return event.copy_with(key=aggregate_key(event.aggregate_type, event.aggregate_id))


def _texts(row: Row) -> Iterator[str]:
    """Yield the texts of an event that are stored."""
    event, *texts = row
    texts += [event.event_type, event.aggregate_type, event.event_id]
    texts += [event.aggregate_id, event.tenant_id, event.key, event.unique_key, event.coalesce]
    return filter(None, texts)


def _insert(connection: BaseDatabaseWrapper, rows: list[Row]) -> None:
    """Insert all or none; ``DuplicateEvent`` changes no stream and keeps the transaction usable."""
    clashing = [event for event, *_ in rows if event._id_was_given or event.unique_key is not None]
    first = rows[0][0]
    touches_more = len(rows) > 1 or first.key is not None or len(routes_of_new(first)) > 1
    undoable = (
        transaction.atomic(using=connection.alias) if clashing and touches_more else nullcontext()
    )
    with undoable:
        if not dialect_of(connection).insert(rows, may_clash=bool(clashing)):
            raise _duplicate_error(clashing)


def _existing_id(connection: BaseDatabaseWrapper, event: Event) -> str:
    rows = model().objects.using(connection.alias)
    found = rows.filter(pk=event.event_id).values_list("pk", flat=True).first()
    if found is None and event.unique_key is not None:
        found = rows.filter(unique_key=event.unique_key).values_list("pk", flat=True).first()
    if found is None:  # committed after the snapshot of a REPEATABLE READ transaction
        raise _duplicate_error([event])
    return str(found)


def _duplicate_error(events: list[Event]) -> DuplicateEvent:
    names = ", ".join(
        f"event_id {event.event_id!r}"
        if event.unique_key is None
        else f"unique_key {event.unique_key!r} (event_id {event.event_id!r})"
        for event in events[:5]
    )
    return DuplicateEvent(
        f"An event with the same identity is already stored; nothing was written. Given: {names}. "
        'Expected identities that are new, or on_duplicate="ignore".'
    )
