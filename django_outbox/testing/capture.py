"""Capture written events, assert on them, or make an event for a listener under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, overload

from django.db import router

from .. import hooks
from ..events import Event, declared, event_from_row, type_text
from ..events.validation import aggregate as aggregate_of
from ..models import OutboxEvent
from ..signals import event_settled, event_written
from ..writing.write import serialize

COLUMNS = tuple(
    each.name
    for each in OutboxEvent._meta.local_fields
    if each.name in Event.__slots__ and each.name != "listener"  # an event is for all of them
)
POSITIONS = {name: position for position, name in enumerate(COLUMNS)}


class Written(Sequence[Event]):
    """The events written during a capture, in order, as their listeners see them.

    Each access queries the table. Events that were rolled back, also to a savepoint, are left out.
    ``capture_events`` and the pytest fixture ``outbox_events`` yield it.

    Example::

        def types(events: Written) -> list[str]:
            return [event.event_type for event in events]
    """

    def __init__(self, using: str | None) -> None:
        self._using = using
        self._ids: dict[str, str] = {}  # event id: alias; in order
        self._settled: dict[str, Event] = {}  # events whose rows may already be deleted

    def _on_written(self, *, sender: str, event: Event, **kwargs: Any) -> None:
        if self._using in (None, sender):
            self._ids[event.event_id] = sender

    def _on_settled(self, *, event: Event, **kwargs: Any) -> None:
        if event.event_id in self._ids:
            self._settled[event.event_id] = event

    @property
    def _events(self) -> list[Event]:
        written, found = dict(self._ids), dict(self._settled)  # copies: other threads may write
        for alias in {*written.values()}:
            ids = [event_id for event_id, at in written.items() if at == alias]
            found.update((event.event_id, event) for event in _stored(alias, pk__in=ids))
        return [found[event_id] for event_id in written if event_id in found]

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Written: {[str(event) for event in self]}>"


@contextmanager
def capture_events(using: str | None = None) -> Iterator[Written]:
    """Capture the events that are written within the block, in any thread of this process.

    ``using`` is a database alias; default: all of them.

    Example::

        def test_an_order_is_written():
            with capture_events() as events:
                with transaction.atomic():
                    outbox.write("order.placed", {"order": 7})
            assert [event.payload for event in events] == [{"order": 7}]
    """
    written = Written(using)
    event_written.connect(written._on_written)
    event_settled.connect(written._on_settled)
    try:
        yield written
    finally:
        event_written.disconnect(written._on_written)
        event_settled.disconnect(written._on_settled)


def assert_event_written(
    event_type: Any,
    *,
    among: Sequence[Event] | None = None,
    using: str | None = None,
    **fields: Any,
) -> Event:
    """Return the first event of that type with those fields, or fail and list what was written.

    ``fields`` are attributes of ``Event``, and ``aggregate``, a model instance. Values may be given
    as they were written or as a listener sees them. ``among`` are captured events; default: the
    whole table of the alias ``using``. ``event_type`` may be a class declared with ``@event``.

    Raises ``AssertionError`` if no event matches, and ``TypeError`` for an unknown field.

    Example::

        def test_the_order_is_delayed():
            with transaction.atomic():
                outbox.write("order.placed", {"order": 7}, deliver_after=60)
            event = assert_event_written("order.placed", payload={"order": 7})
            assert event.is_delayed
    """
    expected = _expected_columns(fields)
    declaration = declared(event_type)
    name = declaration.event_type if declaration else type_text(event_type, "event_type")
    events = list(_stored(using or router.db_for_write(OutboxEvent)) if among is None else among)
    for event in events:
        if event.event_type == name and not _differing_fields(event, expected):
            return event
    with_fields = " with " + ", ".join(f"{key}={value!r}" for key, value in fields.items())
    raise AssertionError(
        f"No event {name!r}{with_fields if fields else ''} was written. "
        + (f"Written were {len(events)}:" if events else "Nothing was written.")
        + "".join(f"\n  {_describe(event, name, expected)}" for event in events[:20])
        + ("\n  …" if len(events) > 20 else "")
    )


def _expected_columns(fields: dict[str, Any]) -> dict[str, Any]:
    known = {name for name in Event.__slots__ if name[0] != "_"} | {"aggregate", "is_delayed"}
    if unknown := sorted(fields.keys() - known):
        raise TypeError(f"An event has no {unknown}. Its fields are {sorted(known)}.")
    if "aggregate" not in fields:
        return fields
    kind, pk = aggregate_of(fields["aggregate"])
    others = {name: value for name, value in fields.items() if name != "aggregate"}
    return {**others, "aggregate_type": kind, "aggregate_id": pk}


def _differing_fields(event: Event, expected: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if not _is_equal(getattr(event, name), value)]


def _is_equal(found: Any, given: Any) -> bool:
    if found == given:
        return True
    try:  # dates, Decimals and the like have become text
        return bool(found == hooks.serializer().loads(hooks.serializer().dumps(given)))
    except (TypeError, ValueError):
        return False


def _describe(event: Event, name: str, expected: dict[str, Any]) -> str:
    differing = _differing_fields(event, expected) if event.event_type == name else []
    shown = ["payload", *[each for each in differing if each != "payload"]]
    values = ", ".join(f"{each}={_printable(getattr(event, each))!r}" for each in shown)
    return f"{event}: {values}" + (f" (differs in {', '.join(differing)})" if differing else "")


def _printable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _stored(alias: str, **conditions: Any) -> list[Event]:
    """Return the stored events, each once, however many listeners it has."""
    loads = hooks.serializer().loads
    rows = OutboxEvent.objects.using(alias).filter(**conditions).order_by("created_at", "pk")
    events: dict[str, Event] = {}
    for row in rows.values_list(*COLUMNS):
        event = event_from_row(row, POSITIONS, loads)
        events.setdefault(event.event_id, event)
    return [*events.values()]


def make_event(event_type: Any, payload: Any = None, **fields: Any) -> Event:
    """Return an event as a listener receives it, without a database.

    ``fields`` are those of ``Event``. ``event_type`` may be an instance of a class declared with
    ``@event``; the payload is then such an instance, too.

    Raises ``InvalidEvent`` if the event could not be written.

    Example::

        def test_the_listener():
            event = make_event("order.placed", {"order": 7}, attempts=2)
            assert (event.payload["order"], event.attempts) == (7, 2)
    """
    event = Event(event_type=event_type, payload=payload, **fields)
    text, _ = serialize(event)
    due = event.available_at or event.occurred_at + timedelta(seconds=event._delay or 0)
    row = {
        **{name: getattr(event, name) for name in COLUMNS},
        "payload": text,
        "created_at": event.created_at or event.occurred_at,
        "first_due_at": event.first_due_at or due,
        "available_at": due,
        "deliver_at": due if event.is_delayed else None,
        "source": event.source or "cold",
    }
    positions, kind = {name: position for position, name in enumerate(row)}, type(event.payload)
    loads = hooks.serializer().loads
    if declared(kind) is not None:
        loads = partial(_load_as, loads, kind)
    return event_from_row([*row.values()], positions, loads)


def _load_as(loads: Callable[..., Any], kind: type, text: str, type_: type | None = None) -> Any:
    return loads(text, type_ or kind)
