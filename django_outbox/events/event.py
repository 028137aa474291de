"""``Event``: the immutable value that a writer creates, or that a stored row is read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from datetime import datetime, timedelta
from types import GenericAlias, MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from ..exceptions import InvalidEvent, PayloadError
from . import arguments, validation
from .arguments import ABSENT
from .json_text import Loads, check, decode, decode_headers, fit
from .typed import Payload_co, declared
from .validation import GLOBAL, LENGTHS, NO_HEADERS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Generic[Payload_co]):
    """One event; immutable, validated when created, its payload decoded at first access.

    ``Event[OrderPlaced]`` annotates one whose ``payload`` is an ``OrderPlaced``.

    It has the fields that ``write`` takes as arguments. A stored or delivered event also has
    ``attempts``, ``seq``, ``created_at``, ``deliver_at``, ``first_due_at``, ``source`` (``"hot"``
    or ``"cold"``), ``listener`` (the title of the listener that is called with it) and
    ``database`` (the alias that it came from).

    It can be pickled and copied, and hashes by its id. ``dataclasses.replace`` of an event that is
    not stored yet keeps all other fields, the id too. Of a stored or delivered event it makes a
    new one to write, with its type, aggregate, tenant, payload, headers and key only.

    Raises ``InvalidEvent`` for values that the databases would not all store alike, and
    ``TypeError`` for an explicit ``None`` as a due time.

    Example::

        event = outbox.Event(event_type="order.placed", payload={"order": 7}, key="order 7")
        assert event.payload_as(dict[str, int]) == {"order": 7}
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # Generic's: no Event[X](...)
    event_type: str
    payload: Payload_co = None  # type: ignore[assignment]
    aggregate: InitVar[Any] = None  # a saved model instance: fills the two fields below
    aggregate_type: str = GLOBAL
    aggregate_id: str | None = None
    tenant_id: str | None = None
    # A factory, because Python 3.11 rejects a read-only mapping as a mutable default.
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    key: str | None = None  # the stream; None: unordered
    seq: int | None = None  # position in the stream, assigned by the database
    event_id: str = ""  # empty: a new ULID
    occurred_at: datetime = ABSENT  # type: ignore[assignment]  # absent: now
    available_at: datetime | None = ABSENT  # type: ignore[assignment]  # when it is (was) due
    deliver_after: InitVar[float | timedelta] = ABSENT
    unique_key: str | None = None
    coalesce: str | None = None  # of the pending deliveries with it, only the newest matters
    created_at: datetime | None = None  # by the database's clock
    deliver_at: datetime | None = None  # the later due time that the writer asked for
    first_due_at: datetime | None = None
    attempts: int = 0  # executions so far
    source: str = ""  # "hot" or "cold" once delivered
    listener: str = ""  # title of the listener that is called with it
    database: str = ""  # alias of the database that it was delivered from
    # The id and ``occurred_at`` generated here. Not None also means: validated before, a copy.
    _generated: tuple[str, datetime | None] | None = field(default=None, repr=False, compare=False)
    _delay: float | None = field(default=None, repr=False, compare=False)  # seconds
    # The payload given with its exact JSON text.
    _payload_and_text: tuple[Any, str] | None = field(default=None, repr=False, compare=False)
    _loads: Loads | None = field(default=None, repr=False, compare=False)
    _row: Sequence[Any] | None = field(default=None, repr=False, compare=False)
    _positions: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    # The stored event that dataclasses.replace copies this one from; a stored event's is itself.
    _origin: Event | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, aggregate: Any, deliver_after: Any) -> None:
        put = object.__setattr__.__get__(self)
        if self._origin is not None:
            _reset_stored_fields(put, self, self._origin)
        if type(self.event_type) is not str:
            if found := declared(type(self.event_type)):
                arguments.fill_declared(put, self, found, aggregate)
            put("event_type", validation.type_name(self.event_type, "event_type"))
        if self.aggregate_type is not GLOBAL:
            put("aggregate_type", validation.type_name(self.aggregate_type, "aggregate_type"))
        if aggregate is not None:
            arguments.fill_aggregate(put, self, aggregate)
        generated_id = arguments.fill_identity(put, self)
        for name, most in LENGTHS.items():
            if (value := getattr(self, name)) is not None and value is not GLOBAL:
                put(name, validation.exact_text(name, value, most=most))
        if self.headers is not NO_HEADERS:
            put("headers", validation.read_only_headers(self.headers))
        put("_generated", (generated_id, arguments.fill_times(put, self, deliver_after)))
        if self.key is not None:
            arguments.check_keyed(self)

    def __getattr__(self, name: str) -> Any:
        """Read a field from the row at its first access, and keep it."""
        if self._row is None or name not in _PUT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "_origin":
            return self  # not kept: the garbage collector would have to free the cycle
        position = self._positions.get(name)
        value: Any = _COLUMN_DEFAULTS.get(name) if position is None else self._row[position]
        if name in _READ:
            value = _READ[name](value)
        elif name == "payload":
            value = (self._loads or decode)(value)
        _PUT[name](self, value)
        return value

    def read_row(self, *, check_only: bool) -> None:
        """Read the row's headers and payload; raise ``PayloadError`` if they are damaged.

        JSON is only checked with ``check_only``: the payload is left to its first access.
        """
        if (row := self._row) is None:
            return
        headers, text = row[self._positions["headers"]], row[self._positions["payload"]]
        _put_headers(self, NO_HEADERS if headers is None else _headers(headers))
        if check_only and self._loads in (None, decode):
            check(text)
        else:
            _put_payload(self, (self._loads or decode)(text))

    def _column(self, name: str) -> Any:
        """Return the row's value of a column, or the default of a column that the row lacks."""
        position = self._positions.get(name)
        if position is None or self._row is None:
            return _COLUMN_DEFAULTS.get(name)
        return self._row[position]

    def __hash__(self) -> int:
        return hash(self.event_id)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy values only; JSON not decoded yet stays text, even if damaged."""
        if self._row is None:
            self.mark_written()  # if two copies are written, the second may clash
        return _restored, (_filled_fields(self), self._payload_text)

    def __str__(self) -> str:
        return validation.event_label(self)

    @property
    def _id_was_given(self) -> bool:
        """Return whether the caller gave the id, and so may have used it before."""
        return self._generated is None or self.event_id != self._generated[0]

    @property
    def _payload_text(self) -> str | None:
        """The payload's exact JSON: the row's, or the text given with this payload; else None."""
        if self._row is not None:
            return str(self._column("payload"))
        given = self._payload_and_text
        return given[1] if given and given[0] is self.payload else None

    @property
    def is_delayed(self) -> bool:
        """Return whether the writer asked for a later delivery."""
        return self.key is None and (self.deliver_at is not None or self._delay is not None)

    def payload_as(self, type_: type[T]) -> T:
        """Return the payload validated as ``type_``; raise ``PayloadError`` if it does not fit."""
        try:
            if self._row is None or self._loads in (None, decode):
                return fit(self.payload, type_)
            own: T = self._loads(self._column("payload"), type_)
            return own
        except PayloadError as error:
            what = f"The payload of {self} does not fit {error}"
            raise PayloadError(f"{what}. A new field needs a default; then replay.") from None

    def convert_payload(self, type_: type) -> None:
        """Convert a delivered event's payload to ``type_``; ``PayloadError`` if it does not fit."""
        _put_payload(self, self.payload_as(type_))

    @classmethod
    def from_json(cls, event_type: str, text: str, **fields: Any) -> Event:
        """Create an event from JSON text, which is stored unchanged.

        Raises ``InvalidEvent`` if the text is not JSON.
        """
        if not isinstance(text, str):
            raise InvalidEvent(f"from_json got {type(text).__name__}; expected JSON text as str.")
        try:
            value = decode(text)
        except PayloadError as error:
            raise InvalidEvent(f"from_json got no valid JSON: {error}") from error
        return cls(event_type=event_type, payload=value, _payload_and_text=(value, text), **fields)

    def mark_written(self) -> None:
        """Note that the id may be in the table, so that a second write of the event may clash."""
        _put_generated(self, ("", self._generated[1] if self._generated else None))

    def copy_with(self, **fields: Any) -> Event:
        """Return the event with other headers or another key and the same id, stored or not."""
        if self._row is None:
            return replace(self, **fields)
        event = copy(self)
        for name, value in fields.items():
            object.__setattr__(event, name, value)
        return event

    def set_listener(self, listener: str, database: str) -> None:
        """Set the listener and the database alias of a delivered event."""
        _put_listener(self, listener)
        _put_database(self, database)

    def as_delivered(self, text: str, loads: Loads) -> Event:
        """Return the event as its listeners will get it; ``text`` is its undecoded payload."""
        row = (*[getattr(self, name) for name in _ROW_FIELDS], text)
        return event_from_row(row, _ROW_POSITIONS, loads)


for _name in ("aggregate", "deliver_after"):  # only arguments, not attributes
    delattr(Event, _name)
    del Event.__dataclass_fields__[_name]  # dataclasses.replace would read them

# Set at the start of each call, never reset: a delivery runs in a context of its own.
delivering: ContextVar[Event | tuple[Event, ...] | None] = ContextVar("delivering", default=None)


def current_event() -> Event | tuple[Event, ...] | None:
    """Return the event that a listener is being called with; None outside a delivery.

    A batch listener's call has a tuple of its events. It works at any depth below listeners,
    fallbacks and interceptors, but not in threads that they start themselves.

    Example::

        def send_letter(address):
            event = outbox.current_event()
            print(address, event and event.event_id)
    """
    return delivering.get()


Event.__init__ = arguments.suggest_names(Event.__init__)  # type: ignore[method-assign]

_OF_DELIVERY = ("payload", "listener", "database")
_ROW_FIELDS = tuple(name for name in Event.__slots__ if name[0] != "_" and name not in _OF_DELIVERY)
_ROW_POSITIONS = {name: position for position, name in enumerate((*_ROW_FIELDS, "payload"))}
_RESET_VALUES = {  # fields that a copy of a stored event resets, and their defaults
    name: Event.__dataclass_fields__[name].default
    for name in (
        "seq event_id occurred_at available_at unique_key coalesce created_at deliver_at "
        "first_due_at attempts source listener database _generated _delay _payload_and_text _loads"
    ).split()
}
_NO_ROW: Mapping[str, Any] = {"_row": None, "_positions": {}, "_origin": None}
_FIELD_GETTERS = {
    name: getattr(Event, name).__get__ for name in Event.__slots__ if name != "_payload_and_text"
}
_COLUMN_DEFAULTS = {
    "aggregate_type": GLOBAL,
    "attempts": 0,
    "source": "cold",
    "listener": "",
    "database": "",
    "_generated": ("", None),
}


def event_from_row(
    row: Sequence[Any], positions: Mapping[str, int], loads: Loads, listener: str | None = None
) -> Event:
    """Create an event from a stored row without validation; fields are read at first access.

    ``positions`` maps columns to positions in the row. Listeners use few of the fields; reading all
    of them cost as much as the rest of a delivery.
    """
    event: Event = _new(Event)
    _put_row(event, row)
    _put_positions(event, positions)
    _put_loads(event, loads)
    if listener is not None:
        _put_listener(event, listener)
    return event


def _reset_stored_fields(put: Callable[[str, Any], None], event: Event, origin: Event) -> None:
    """Reset the fields that do not carry over from a stored event, unless they were changed."""
    for name, value in _RESET_VALUES.items():
        if getattr(event, name) is getattr(origin, name):
            put(name, value)
    for name, value in _NO_ROW.items():
        put(name, value)


def _filled_fields(event: Event) -> dict[str, Any]:
    """Return the fields that have a value."""
    found = {}
    for name, read in _FIELD_GETTERS.items():
        with suppress(AttributeError):
            found[name] = _picklable(read(event))
    if found["_row"] is not None:
        found["_row"] = [_picklable(value) for value in found["_row"]]
    return found


def _picklable(value: Any) -> Any:
    return dict(value) if isinstance(value, MappingProxyType) else value  # cannot be pickled


def _restored(fields: dict[str, Any], text: str | None) -> Event:
    """Recreate an event from what ``__reduce__`` kept."""
    event: Event = _new(Event)
    if fields["_row"] is None:
        fields["_payload_and_text"] = None if text is None else (fields["payload"], text)
    for name, value in fields.items():
        _PUT[name](event, _headers(value) if name == "headers" else value)
    return event


def _headers(stored: Any) -> Mapping[str, str]:
    if isinstance(stored, str):
        return decode_headers(stored)
    return MappingProxyType(stored) if isinstance(stored, dict) else stored or NO_HEADERS


_INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at", "available_at")
_READ = {**dict.fromkeys(_INSTANTS, validation.stored_instant), "headers": _headers}
# Set fields although the dataclass is frozen, twice as fast as object.__setattr__.
_new = object.__new__
_PUT = {name: getattr(Event, name).__set__ for name in Event.__slots__}
_put_row, _put_positions, _put_loads, _put_payload, _put_headers = (
    _PUT[name] for name in ("_row", "_positions", "_loads", "payload", "headers")
)
_put_listener, _put_database = _PUT["listener"], _PUT["database"]
_put_generated = _PUT["_generated"]
