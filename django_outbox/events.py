"""``Event``: what is written and what listeners see, with every rule that needs no database."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from json import JSONEncoder
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from django.conf import settings as django_settings
from django.utils import timezone as django_timezone
from django.utils.functional import Promise
from ulid import ULID

from .exceptions import InvalidEvent, PayloadError, PayloadTooLarge

T = TypeVar("T")

GLOBAL: Final = "__GLOBAL__"  # the aggregate type of events that belong to no aggregate
MAX_NESTING = 100
MAX_DELAY = timedelta(days=36_525)  # further due times overflow some database's calendar
LENGTHS: Mapping[str, int] = {
    "event_id": 36,
    "event_type": 128,
    "aggregate_type": 64,
    "aggregate_id": 128,
    "tenant_id": 64,
    "key": 255,
    "unique_key": 255,
}
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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
    headers: Mapping[str, str] = NO_HEADERS
    key: str | None = None  # the stream; None: no order
    seq: int | None = None  # place in the stream, given by the database
    event_id: str = ""  # empty: a new ULID
    occurred_at: datetime = ABSENT  # type: ignore[assignment]  # absent: now
    available_at: datetime | None = ABSENT  # type: ignore[assignment]  # when it is (was) due
    deliver_after: InitVar[float | timedelta] = ABSENT  # type: ignore[assignment]
    unique_key: str | None = None
    created_at: datetime | None = None  # database clock
    deliver_at: datetime | None = None  # the delay the writer asked for
    first_due_at: datetime | None = None
    attempts: int = 0  # executions so far
    source: str = ""  # "hot" or "cold" once delivered
    _own_id: bool = field(default=False, repr=False, compare=False)  # the caller's event_id
    _delay: float | None = field(default=None, repr=False, compare=False)  # seconds
    _text: str | None = field(default=None, repr=False, compare=False)  # the payload's exact JSON
    _loads: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, aggregate: Any, deliver_after: Any) -> None:
        put = object.__setattr__.__get__(self)
        put("event_type", type_name(self.event_type, "event_type"))
        put("aggregate_type", type_name(self.aggregate_type, "aggregate_type"))
        if aggregate is not None:
            _fill_aggregate(put, self, aggregate)
        put("_own_id", self.event_id not in ("", None))
        put("event_id", _identity(self.event_id))
        put("key", _key(self.key))
        for column in LENGTHS:
            check_column(column, getattr(self, column))
        put("headers", _headers(self.headers))
        _fill_times(put, self, deliver_after)

    def __getattr__(self, name: str) -> Any:
        """Fill the one slot that rows leave empty: the payload, decoded at first sight."""
        if name != "payload" or self._text is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = (self._loads or decode)(self._text)
        object.__setattr__(self, "payload", value)
        return value

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id} ({self.aggregate_type} {self.aggregate_id})"

    @property
    def is_delayed(self) -> bool:
        """Say whether the writer asked for a later delivery."""
        return self.key is None and (self.deliver_at is not None or self._delay is not None)

    def payload_as(self, type_: type[T]) -> T:
        """Return the payload as an instance of ``type_``, validated; ``PayloadError`` if unfit."""
        try:
            return msgspec.convert(self.payload, type_, strict=False)
        except msgspec.ValidationError as error:
            raise PayloadError(
                f"The payload of {self} does not fit {type_.__qualname__}: {error}"
            ) from error

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
        return cls(event_type=event_type, payload=value, _text=text, **fields)

    def written(self, text: str, loads: Callable[[str], Any]) -> Event:
        """Return the event as its listeners will see it: payload from ``text``, undecoded."""
        return leased({**{name: getattr(self, name) for name in _KEPT}, "_text": text}, loads)


_KEPT = tuple(name for name in Event.__slots__ if name not in ("payload", "_text", "_loads"))
_SLOTS: Mapping[str, Callable[[Event, Any], None]] = {
    name: getattr(Event, name).__set__ for name in Event.__slots__
}
_EMPTY = {
    "aggregate_type": GLOBAL,
    "headers": NO_HEADERS,
    **dict.fromkeys(
        "aggregate_id tenant_id key seq unique_key created_at deliver_at first_due_at "
        "available_at occurred_at _delay".split()
    ),
    "attempts": 0,
    "source": "",
    "_own_id": False,
}


def leased(row: Mapping[str, Any], loads: Callable[[str], Any]) -> Event:
    """Make an event of a stored row without checking it again; the payload stays undecoded."""
    event = object.__new__(Event)
    for name, value in {**_EMPTY, **row, "_loads": loads}.items():
        _SLOTS[name](event, value)
    return event


def encode(payload: Any) -> str:
    """Return the payload as JSON text; ``InvalidEvent`` for what JSON or a database cannot hold.

    The encoder of the standard library finds NaN and Infinity by itself; msgspec would write null.
    """
    try:
        text = _encoder.encode(payload)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidEvent(
            f"The payload cannot be written as JSON: {error}. Expected JSON values, dates, UUIDs, "
            "Decimals, enums or dataclasses of these."
        ) from error
    except RecursionError:
        raise _too_deep() from None
    return text


def decode(text: str) -> Any:
    """Return the value of a JSON text; ``PayloadError`` if it is damaged."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise PayloadError(f"The stored JSON cannot be decoded: {error}") from error


def decode_headers(text: str | None) -> Mapping[str, str]:
    """Return stored headers; NULL, empty and JSON ``null`` are no headers."""
    if not text or text == "null":
        return NO_HEADERS
    try:
        return MappingProxyType(msgspec.json.decode(text, type=dict[str, str]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PayloadError(f"The stored headers cannot be decoded: {error}") from error


def check_text(text: str, *, most: int) -> None:
    """Refuse payload text that is too large, nested too deep, or not UTF-8."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(
            f"The payload holds a lone surrogate ({error.reason}), which no database stores. "
            "Expected valid Unicode text."
        ) from None
    if size > most:
        raise PayloadTooLarge(
            f"The payload has {size} bytes; at most {most} are allowed. Store the large part "
            'elsewhere and send its address, or raise OUTBOX["MAX_PAYLOAD_BYTES"].'
        )
    if text.count("[") + text.count("{") > MAX_NESTING and _nesting(text) > MAX_NESTING:
        raise _too_deep()


def check_column(column: str, value: str | None) -> None:
    """Refuse what some database would change or reject in this column."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidEvent(f"{column} is {value!r}; expected a str.")
    if not value.strip():
        raise InvalidEvent(f"{column} is {value!r}; expected a text that is not blank.")
    if len(value) > LENGTHS[column]:
        raise InvalidEvent(
            f"{column} has {len(value)} characters; at most {LENGTHS[column]} fit. "
            f"It begins {value[:40]!r}."
        )
    if "\0" in value or value[-1] == " " or not _is_unicode(value):
        raise InvalidEvent(
            f"{column} is {value!r}; expected valid Unicode without NUL characters and without "
            "trailing spaces, which databases reject or ignore."
        )


def as_utc(value: datetime) -> datetime:
    """Return an aware UTC datetime; a naive one is read as Django reads naive datetimes."""
    if django_timezone.is_naive(value):
        if django_settings.USE_TZ:
            warnings.warn(
                f"The outbox received a naive datetime ({value}) while time zone support is "
                "active.",
                RuntimeWarning,
                stacklevel=2,
            )
        value = django_timezone.make_aware(value, django_timezone.get_default_timezone())
    return value.astimezone(timezone.utc)


class _Ids:
    """New ULIDs that only rise within this process, over threads and clock steps alike."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Start anew: a child must not go on counting from its parent's last id."""
        self._lock = threading.Lock()
        self._at = 0  # milliseconds, never backwards
        self._low = 0  # the 80 random bits

    def __call__(self) -> str:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._at:
                self._at, self._low = now, int.from_bytes(os.urandom(10), "big") >> 1
            else:
                self._low += 1
            value = (self._at << 80) + self._low
        return str(ULID.from_bytes(value.to_bytes(16, "big")))


new_id = _Ids()


def _default(value: Any) -> Any:
    if isinstance(value, Promise):  # a lazily translated text
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview, set, frozenset)):
        raise TypeError(f"{type(value).__name__} has no place in JSON")
    return msgspec.to_builtins(value, builtin_types=(bytes, bytearray))


_encoder = JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_default)


def _too_deep() -> InvalidEvent:
    return InvalidEvent(f"The payload is nested deeper than {MAX_NESTING} levels. Flatten it.")


def _nesting(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(value: Any, column: str) -> str:
    """Return a type name: a str, or an enum member's value if that is a str, else its name."""
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    if not isinstance(value, str):
        raise InvalidEvent(f"{column} is {value!r}; expected a str or an enum member.")
    return str(value)


def _identity(value: Any) -> str:
    return new_id() if value in ("", None) else str(value) if _castable(value) else value


def _key(value: Any) -> Any:
    return str(value) if _castable(value) else value


def _castable(value: Any) -> bool:
    """Ints and UUIDs stand for their text; a bool is a mistake."""
    return not isinstance(value, bool) and type(value).__name__ in ("int", "UUID", "SafeString")


def _fill_aggregate(put: Callable[[str, Any], None], event: Event, instance: Any) -> None:
    if event.aggregate_type != GLOBAL or event.aggregate_id is not None:
        raise InvalidEvent(
            "aggregate= was given together with aggregate_type or aggregate_id; expected one form."
        )
    meta, pk = getattr(instance, "_meta", None), getattr(instance, "pk", None)
    if meta is None or isinstance(instance, type):
        raise InvalidEvent(f"aggregate is {instance!r}; expected a model instance.")
    if pk is None:
        raise InvalidEvent(
            f"aggregate is an unsaved {meta.label}, which has no primary key yet. Save it first."
        )
    put("aggregate_type", meta.label)
    put("aggregate_id", str(pk))


def _headers(value: Any) -> Mapping[str, str]:
    if value is None or not value:
        return NO_HEADERS
    if not isinstance(value, Mapping):
        raise InvalidEvent(f"headers is {value!r}; expected a mapping of str to str.")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidEvent(f"The header {name!r}: {text!r} is not str: str. Convert both.")
        if not _is_unicode(name) or not _is_unicode(text):
            raise InvalidEvent(f"The header {name!r} holds a lone surrogate.")
    return MappingProxyType(dict(value))


def _fill_times(put: Callable[[str, Any], None], event: Event, deliver_after: Any) -> None:
    occurred, due = event.occurred_at, event.available_at
    given = occurred is not ABSENT and occurred is not None
    put("occurred_at", _time("occurred_at", occurred) if given else _now())
    if due is None or deliver_after is None:
        raise TypeError("An explicit None is no due time; leave the argument out for 'at once'.")
    if due is not ABSENT and deliver_after is not ABSENT:
        raise InvalidEvent("available_at and deliver_after were both given; expected one of them.")
    if due is not ABSENT:
        due = _time("available_at", due)
        if given and due < event.occurred_at:
            raise InvalidEvent(f"available_at {due} lies before occurred_at {event.occurred_at}.")
    elif deliver_after is not ABSENT:
        delay = _delay(deliver_after)
        put("_delay", None if given else delay.total_seconds())
        due = event.occurred_at + delay if given else ABSENT
    put("available_at", None if due is ABSENT else due)
    put("deliver_at", event.available_at)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _time(column: str, value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidEvent(f"{column} is {value!r}; expected a datetime.")
    try:
        value = as_utc(value)
    except (OverflowError, ValueError) as error:
        raise InvalidEvent(f"{column} is {value!r}, which has no UTC equivalent: {error}") from None
    if not 1971 <= value.year <= 9998:
        raise InvalidEvent(f"{column} is {value}; expected a year from 1971 to 9998.")
    return value


def _delay(value: Any) -> timedelta:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            value = timedelta(seconds=value)
        except (OverflowError, ValueError):
            value = None
    if not isinstance(value, timedelta):
        raise InvalidEvent("deliver_after is no finite duration; expected seconds or a timedelta.")
    if not timedelta(0) < value <= MAX_DELAY:
        raise InvalidEvent(f"deliver_after is {value}; expected more than zero, at most 100 years.")
    return value
