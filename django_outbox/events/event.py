"""``Event``: the immutable value that a writer creates, or that a stored row is read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, TypeVar

from ..exceptions import InvalidEvent, PayloadError
from . import arguments, validation
from .arguments import ABSENT
from .ids import new_id
from .json_text import decode, decode_headers, fit
from .typed import declared
from .validation import GLOBAL, LENGTHS, NO_HEADERS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; immutable, validated when created, its payload decoded at first access.

    It can be pickled and copied, and hashes by its id. ``dataclasses.replace`` of an event that is
    not stored yet keeps all other fields, the id too. Of a stored or delivered event it makes a
    new one to write: type, aggregate, tenant, payload, headers and key carry over; the id,
    ``unique_key``, ``seq``, all times and the fields that the delivery filled in do not.

    Raises ``InvalidEvent`` for values that the databases would not all store alike, and
    ``TypeError`` for an explicit ``None`` as a due time.
    """

    event_type: str
    payload: Any = None
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
    created_at: datetime | None = None  # by the database's clock
    deliver_at: datetime | None = None  # the later due time that the writer asked for
    first_due_at: datetime | None = None
    attempts: int = 0  # executions so far
    source: str = ""  # "hot" or "cold" once delivered
    listener: str = ""  # title of the listener that is called with it
    database: str = ""  # alias of the database that it was delivered from
    # The id and ``occurred_at`` generated here. Not None also means: validated before, a copy.
    _made: tuple[str, datetime | None] | None = field(default=None, repr=False, compare=False)
    _delay: float | None = field(default=None, repr=False, compare=False)  # seconds
    _exact: tuple[Any, str] | None = field(default=None, repr=False, compare=False)  # payload, JSON
    _loads: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    _row: Sequence[Any] | None = field(default=None, repr=False, compare=False)
    _places: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    # The stored event that dataclasses.replace copies this one from; a stored event's is itself.
    _origin: Event | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, aggregate: Any, deliver_after: Any) -> None:
        put = object.__setattr__.__get__(self)
        if self._origin is not None:
            _begin_anew(put, self, self._origin)
        if type(self.event_type) is not str and (found := declared(type(self.event_type))):
            arguments.fill_declared(put, self, found, aggregate)
        put("event_type", validation.type_name(self.event_type, "event_type"))
        if self.aggregate_type is not GLOBAL:
            put("aggregate_type", validation.type_name(self.aggregate_type, "aggregate_type"))
        if aggregate is not None:
            arguments.fill_aggregate(put, self, aggregate)
        made_id = (self._made or ("",))[0]
        if self.event_id in ("", None):
            put("event_id", made_id := new_id())
        put("event_id", validation.identity(self.event_id))
        put("key", validation.stream_key(self.key))
        for name, most in LENGTHS.items():
            if (value := getattr(self, name)) is not None:
                put(name, validation.exact_text(name, value, most=most))
        put("headers", validation.read_only_headers(self.headers))
        put("_made", (made_id, arguments.fill_times(put, self, deliver_after)))
        if self.key is not None and (self.deliver_at is not None or self._delay is not None):
            raise InvalidEvent(
                f"key {self.key!r} was given together with a delay; a stream delivers its events "
                "in the order of their writes. Leave one of them out."
            )

    def __getattr__(self, name: str) -> Any:
        """Read a field from the row at its first access, and keep it."""
        if self._row is None or name not in _SLOTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "_origin":
            return self  # not kept: the garbage collector would have to free the cycle
        value = self._stored(name)
        if name == "payload":
            value = (self._loads or decode)(value)
        elif name == "headers":
            value = _headers(value)
        elif name in INSTANTS:
            value = validation.stored_instant(value)
        object.__setattr__(self, name, value)
        return value

    def read(self) -> None:
        """Decode the row's headers and payload; raise ``PayloadError`` if they are damaged."""
        if self._row is not None:
            _put_headers(self, _headers(self._stored("headers")))
            _put_payload(self, (self._loads or decode)(self._stored("payload")))

    def _stored(self, name: str) -> Any:
        """Return the row's value of a column, or the default of a column that the row lacks."""
        place = self._places.get(name)
        return _EMPTY.get(name) if place is None or self._row is None else self._row[place]

    def __hash__(self) -> int:
        return hash(self.event_id)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy values only; JSON not decoded yet stays text, even if damaged."""
        fields = _filled(self)
        if self._row is None:
            self.stored()  # if two copies are written, the second may clash
            return _restored, ({**fields, "_made": self._made}, None, self._text)
        row = {name: _plain(self._stored(name)) for name in _KEPT if name not in fields}
        return _restored, (fields, row, self._text)

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id} ({self.aggregate_type} {self.aggregate_id})"

    @property
    def _own_id(self) -> bool:
        """Return whether the caller gave the id, and so may have used it before."""
        return self._made is None or self.event_id != self._made[0]

    @property
    def _text(self) -> str | None:
        """The payload's exact JSON: the row's, or the text given with this payload; else None."""
        if self._row is not None:
            return str(self._stored("payload"))
        return self._exact[1] if self._exact and self._exact[0] is self.payload else None

    @property
    def is_delayed(self) -> bool:
        """Return whether the writer asked for a later delivery."""
        return self.key is None and (self.deliver_at is not None or self._delay is not None)

    def payload_as(self, type_: type[T]) -> T:
        """Return the payload validated as ``type_``; raise ``PayloadError`` if it does not fit."""
        try:
            if self._row is None or self._loads in (None, decode):
                return fit(self.payload, type_)
            own: T = self._loads(self._stored("payload"), type_)
            return own
        except PayloadError as error:
            raise PayloadError(f"The payload of {self} does not fit {error}") from None

    def take_as(self, type_: type) -> None:
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
        return cls(event_type=event_type, payload=value, _exact=(value, text), **fields)

    def stored(self) -> None:
        """Note that the id may be in the table, so that a second write of the event may clash."""
        _put_made(self, ("", self._made[1] if self._made else None))

    def amended(self, **fields: Any) -> Event:
        """Return the event with other headers or another key and the same id, stored or not."""
        if self._row is None:
            return replace(self, **fields)
        event = copy(self)
        for name, value in fields.items():
            object.__setattr__(event, name, value)
        return event

    def called(self, listener: str, database: str) -> None:
        """Set the listener and the database alias of a delivered event."""
        _put_listener(self, listener)
        _put_database(self, database)

    def apart(self, attempts: int) -> Event:
        """Return a copy of a delivered event, its payload too, for one of several listeners."""
        assert self._row is not None
        event = leased(self._row, self._places, self._loads or decode)
        _put_attempts(event, attempts)
        return event

    def written(self, text: str, loads: Callable[..., Any]) -> Event:
        """Return the event as its listeners will get it; ``text`` is its undecoded payload."""
        return leased((*[getattr(self, name) for name in _KEPT], text), _WRITTEN, loads)


for _name in ("aggregate", "deliver_after"):  # only arguments, not attributes
    delattr(Event, _name)
    del Event.__dataclass_fields__[_name]  # dataclasses.replace would read them

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at", "available_at")
_OF_DELIVERY = ("payload", "listener", "database")
_KEPT = tuple(name for name in Event.__slots__ if name[0] != "_" and name not in _OF_DELIVERY)
_WRITTEN = {name: place for place, name in enumerate((*_KEPT, "payload"))}
_SLOTS = frozenset(Event.__slots__)
_BEGINS = {  # fields that a copy of a stored event resets, and their values
    "seq": None, "event_id": "", "occurred_at": ABSENT, "available_at": ABSENT, "unique_key": None,
    "created_at": None, "deliver_at": None, "first_due_at": None, "attempts": 0, "source": "",
    "listener": "", "database": "", "_made": None, "_delay": None, "_exact": None, "_loads": None,
}  # fmt: skip
_NO_ROW: Mapping[str, Any] = {"_row": None, "_places": {}, "_origin": None}
_READERS = {
    name: getattr(Event, name).__get__
    for name in Event.__slots__
    if name not in (*_NO_ROW, "_exact")
}
_EMPTY = {
    "aggregate_type": GLOBAL, "attempts": 0, "source": "cold", "listener": "", "database": "",
    "_made": ("", None),
}  # fmt: skip


def leased(row: Sequence[Any], places: Mapping[str, int], loads: Callable[..., Any]) -> Event:
    """Create an event from a stored row without validation; fields are read at first access.

    ``places`` maps columns to positions in the row. Listeners use few of the fields; reading all
    of them cost as much as the rest of a delivery.
    """
    event: Event = _new(Event)
    _put_row(event, row)
    _put_places(event, places)
    _put_loads(event, loads)
    return event


def _begin_anew(put: Callable[[str, Any], None], event: Event, origin: Event) -> None:
    """Reset the fields that do not carry over from a stored event, unless they were changed."""
    for name, value in _BEGINS.items():
        if getattr(event, name) is getattr(origin, name):
            put(name, value)
    for name, value in _NO_ROW.items():
        put(name, value)


def _filled(event: Event) -> dict[str, Any]:
    """Return the fields that have a value, without the driver's row and references to it."""
    found = {}
    for name, read in _READERS.items():
        with suppress(AttributeError):
            found[name] = _plain(read(event))
    return found


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, MappingProxyType) else value  # cannot be pickled


def _restored(fields: dict[str, Any], row: dict[str, Any] | None, text: str | None) -> Event:
    """Recreate an event from what ``__reduce__`` kept: a stored one if ``row`` is given."""
    for headers in (fields, row or {}):
        if isinstance(headers.get("headers"), dict):
            headers["headers"] = validation.read_only_headers(headers["headers"])
    if row is not None:
        row["payload"] = text
        event = leased([*row.values()], {name: n for n, name in enumerate(row)}, fields["_loads"])
    else:
        event = _new(Event)
        fields |= {**_NO_ROW, "_exact": None if text is None else (fields["payload"], text)}
    put = object.__setattr__.__get__(event)
    for name, value in fields.items():
        put(name, value)
    return event


def _headers(stored: Any) -> Mapping[str, str]:
    return decode_headers(stored) if isinstance(stored, str) else stored or NO_HEADERS


# Set fields although the dataclass is frozen, twice as fast as object.__setattr__.
_new = object.__new__
_put_row, _put_places, _put_loads, _put_payload, _put_headers = (
    getattr(Event, name).__set__ for name in ("_row", "_places", "_loads", "payload", "headers")
)
_put_listener, _put_database, _put_attempts, _put_made = (
    getattr(Event, name).__set__ for name in ("listener", "database", "attempts", "_made")
)
