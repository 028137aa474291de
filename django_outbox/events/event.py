"""The frozen value itself: made and checked by a writer, or made of a stored row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, Final, TypeVar

from ..exceptions import InvalidEvent, PayloadError
from . import rules
from .ids import new_id
from .rules import GLOBAL, LENGTHS, NO_HEADERS
from .text import decode, decode_headers, fit
from .typed import Declaration, declared

T = TypeVar("T")


class _Absent(Enum):
    """Tells an argument that was not given from an explicit ``None``."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; immutable, checked when it is made, its payload decoded at first sight.

    Raises ``InvalidEvent`` for values that no database could store alike, and ``TypeError`` for an
    explicit ``None`` as a due time.
    """

    event_type: str
    payload: Any = None
    aggregate: InitVar[Any] = None  # a saved model instance: fills the two fields below
    aggregate_type: str = GLOBAL
    aggregate_id: str | None = None
    tenant_id: str | None = None
    # A factory, for Python 3.11 takes a read-only mapping for a mutable default.
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    key: str | None = None  # the stream; None: no order
    seq: int | None = None  # place in the stream, given by the database
    event_id: str = ""  # empty: a new ULID
    occurred_at: datetime = ABSENT  # type: ignore[assignment]  # absent: now
    available_at: datetime | None = ABSENT  # type: ignore[assignment]  # when it is (was) due
    deliver_after: InitVar[float | timedelta] = ABSENT
    unique_key: str | None = None
    created_at: datetime | None = None  # database clock
    deliver_at: datetime | None = None  # the delay the writer asked for
    first_due_at: datetime | None = None
    attempts: int = 0  # executions so far
    source: str = ""  # "hot" or "cold" once delivered
    listener: str = ""  # who is called with it, as its progress names it
    database: str = ""  # the alias that it was delivered from
    # The id and the time that were not given but made here; set also says: checked before, a copy.
    _made: tuple[str, datetime | None] | None = field(default=None, repr=False, compare=False)
    _delay: float | None = field(default=None, repr=False, compare=False)  # seconds
    _exact: tuple[Any, str] | None = field(default=None, repr=False, compare=False)  # and its JSON
    _loads: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    _row: Sequence[Any] | None = field(default=None, repr=False, compare=False)
    _places: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self, aggregate: Any, deliver_after: Any) -> None:
        put = object.__setattr__.__get__(self)
        if type(self.event_type) is not str and (found := declared(type(self.event_type))):
            _fill_declared(put, self, found, aggregate)
        put("event_type", rules.type_name(self.event_type, "event_type"))
        if self.aggregate_type is not GLOBAL:
            put("aggregate_type", rules.type_name(self.aggregate_type, "aggregate_type"))
        if aggregate is not None:
            _fill_aggregate(put, self, aggregate)
        made_id = (self._made or ("",))[0]
        if self.event_id in ("", None):
            put("event_id", made_id := new_id())
        put("event_id", rules.identity(self.event_id))
        put("key", rules.stream_key(self.key))
        for name, most in LENGTHS.items():
            if (value := getattr(self, name)) is not None:
                put(name, rules.exact_text(name, value, most=most))
        put("headers", rules.read_only_headers(self.headers))
        put("_row", None)  # a copy of a stored event is none
        put("_made", (made_id, _fill_times(put, self, deliver_after)))
        if self.key is not None and (self.deliver_at is not None or self._delay is not None):
            raise InvalidEvent(
                f"key {self.key!r} was given together with a delay; a stream delivers its events "
                "in the order of their writes. Leave one of them out."
            )

    def __getattr__(self, name: str) -> Any:
        """Fill a slot that a row left empty, at the first look at it."""
        if self._row is None or name not in _SLOTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self._stored(name)
        if name == "payload":
            value = (self._loads or decode)(value)
        elif name == "headers":
            value = _headers(value)
        elif name in INSTANTS:
            value = rules.stored_instant(value)
        object.__setattr__(self, name, value)
        return value

    def read(self) -> None:
        """Decode what a row has as JSON; ``PayloadError`` if it is damaged."""
        if self._row is not None:
            _put_headers(self, _headers(self._stored("headers")))
            _put_payload(self, (self._loads or decode)(self._stored("payload")))

    def _stored(self, name: str) -> Any:
        """What the row has in a column, or what stands for a column that it lacks."""
        place = self._places.get(name)
        return _EMPTY.get(name) if place is None or self._row is None else self._row[place]

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id} ({self.aggregate_type} {self.aggregate_id})"

    @property
    def _own_id(self) -> bool:
        """Say whether the id is the caller's, who may have used it before."""
        return self._made is None or self.event_id != self._made[0]

    @property
    def _text(self) -> str | None:
        """The payload's exact JSON: of the row, or as long as it is the payload it came with."""
        if self._row is not None:
            return str(self._stored("payload"))
        return self._exact[1] if self._exact and self._exact[0] is self.payload else None

    @property
    def is_delayed(self) -> bool:
        """Say whether the writer asked for a later delivery."""
        return self.key is None and (self.deliver_at is not None or self._delay is not None)

    def payload_as(self, type_: type[T]) -> T:
        """Return the payload as an instance of ``type_``, validated; ``PayloadError`` if unfit."""
        try:
            if self._row is None or self._loads in (None, decode):
                return fit(self.payload, type_)
            own: T = self._loads(self._stored("payload"), type_)
            return own
        except PayloadError as error:
            raise PayloadError(f"The payload of {self} does not fit {error}") from None

    def take_as(self, type_: type) -> None:
        """Make the payload of a delivered event an instance of ``type_``; ``PayloadError``."""
        _put_payload(self, self.payload_as(type_))

    @classmethod
    def from_json(cls, event_type: str, text: str, **fields: Any) -> Event:
        """Make an event of ready JSON text, which is stored exactly as it is.

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
        """Note that its id may be in the table: of two writes of one event the second may clash."""
        _put_made(self, ("", self._made[1] if self._made else None))

    def called(self, listener: str, database: str) -> None:
        """Note whom a delivered event is for."""
        _put_listener(self, listener)
        _put_database(self, database)

    def apart(self, attempts: int) -> Event:
        """Return a delivered event as one of several listeners gets it: its payload is its own."""
        assert self._row is not None
        event = leased(self._row, self._places, self._loads or decode)
        _put_attempts(event, attempts)
        return event

    def written(self, text: str, loads: Callable[..., Any]) -> Event:
        """Return the event as its listeners will see it: payload from ``text``, undecoded."""
        return leased((*[getattr(self, name) for name in _KEPT], text), _WRITTEN, loads)


for _name in ("aggregate", "deliver_after"):  # arguments; an event has no such attributes
    delattr(Event, _name)
    del Event.__dataclass_fields__[_name]  # dataclasses.replace would ask the event for them

INSTANTS = ("occurred_at", "created_at", "deliver_at", "first_due_at", "available_at")
_OF_DELIVERY = ("payload", "listener", "database")
_KEPT = tuple(name for name in Event.__slots__ if name[0] != "_" and name not in _OF_DELIVERY)
_WRITTEN = {name: place for place, name in enumerate((*_KEPT, "payload"))}
_SLOTS = frozenset(Event.__slots__)
_EMPTY = {
    "aggregate_type": GLOBAL, "attempts": 0, "source": "cold", "listener": "", "database": "",
    "_made": ("", None),
}  # fmt: skip


def leased(row: Sequence[Any], places: Mapping[str, int], loads: Callable[..., Any]) -> Event:
    """Make an event of a stored row, unchecked; each field is read when it is first looked at.

    ``places`` tells where the row has the columns. A listener looks at a few of the fields; reading
    them all cost as much as the rest of a delivery.
    """
    event: Event = _new(Event)
    _put_row(event, row)
    _put_places(event, places)
    _put_loads(event, loads)
    return event


def _headers(stored: Any) -> Mapping[str, str]:
    return decode_headers(stored) if isinstance(stored, str) else stored or NO_HEADERS


# Past the dataclass, which is frozen, and twice as fast as object.__setattr__.
_new = object.__new__
_put_row, _put_places, _put_loads, _put_payload, _put_headers = (
    getattr(Event, name).__set__ for name in ("_row", "_places", "_loads", "payload", "headers")
)
_put_listener, _put_database, _put_attempts, _put_made = (
    getattr(Event, name).__set__ for name in ("listener", "database", "attempts", "_made")
)


def _fill_declared(
    put: Callable[[str, Any], None], event: Event, declaration: Declaration, aggregate: Any
) -> None:
    """Fill what a typed payload says of itself, and the caller did not say."""
    if event.payload is not None:
        raise InvalidEvent(
            f"payload= was given beside an instance of {type(event.event_type).__qualname__}, "
            "which is the payload; expected one of them."
        )
    put("payload", event.event_type)
    fields = declaration.fields(event.payload)
    if event.key is not None:
        fields.pop("key", None)
    if "headers" in fields:
        fields["headers"] = {**fields["headers"], **rules.read_only_headers(event.headers)}
    if (aggregate, event.aggregate_type, event.aggregate_id) != (None, GLOBAL, None):
        fields.pop("aggregate_type", None)
        fields.pop("aggregate_id", None)
    for name, value in fields.items():
        put(name, value)


def _fill_aggregate(put: Callable[[str, Any], None], event: Event, instance: Any) -> None:
    if event.aggregate_type != GLOBAL or event.aggregate_id is not None:
        raise InvalidEvent(
            "aggregate= was given together with aggregate_type or aggregate_id; expected one form."
        )
    kind, pk = rules.aggregate(instance)
    put("aggregate_type", kind)
    put("aggregate_id", pk)


def _fill_times(
    put: Callable[[str, Any], None], event: Event, deliver_after: Any
) -> datetime | None:
    """Check and fill the times; return ``occurred_at`` if it was not given."""
    occurred: Any = event.occurred_at
    due: Any = event.available_at
    if deliver_after is None or (due is None and event._made is None):
        raise TypeError("An explicit None is no due time; leave the argument out for 'at once'.")
    due = ABSENT if due is None else due
    if due is not ABSENT and deliver_after is not ABSENT:
        raise InvalidEvent("available_at and deliver_after were both given; expected one of them.")
    made = event._made[1] if event._made is not None else None
    if occurred is ABSENT or occurred is None:
        made = occurred = datetime.now(timezone.utc)
    given = occurred is not made
    occurred = rules.instant("occurred_at", occurred) if given else made
    if due is not ABSENT:
        due = rules.instant("available_at", due)
        put("_delay", None)
        if given and due < occurred:
            raise InvalidEvent(f"available_at {due} lies before occurred_at {occurred}.")
    elif deliver_after is not ABSENT:
        delay = rules.delay(deliver_after)
        if given:
            due = rules.later(occurred, delay)
        else:
            put("_delay", delay.total_seconds())
    put("occurred_at", occurred)
    put("available_at", None if due is ABSENT else due)
    put("deliver_at", event.available_at)
    return made
