"""Validate values that every database must store alike; each rule raises ``InvalidEvent``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from enum import Enum
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from django.conf import settings as django_settings
from django.utils import timezone as django_timezone
from django.utils.dateparse import parse_datetime

from ..exceptions import InvalidEvent, seconds

GLOBAL: Final = "__GLOBAL__"  # the aggregate type of events that belong to no aggregate
MAX_DELIVER_AFTER = timedelta(days=36_525)  # later due times overflow some database's calendar
LENGTHS: Mapping[str, int] = {  # most characters in each column
    "event_id": 36,
    "event_type": 128,
    "aggregate_type": 64,
    "aggregate_id": 128,
    "tenant_id": 64,
    "key": 255,
    "unique_key": 255,
    "coalesce": 255,
}
LANE_LENGTH = 64  # characters
# In the place of a lane: events whose listeners are not known yet. No lane begins with it.
UNROUTED_LANE = "?"
SLOT_PREFIX = 14  # characters before the name in a slot: the mark, a digest and a colon
STREAM_LENGTH = 320  # a lane, a colon and a key
ULID_LENGTH: Final = 26  # characters of an id of ours
ROW_ID_LENGTH = 49  # an event id, a dot and the digest of a listener
RECEIVED_LENGTHS: Mapping[str, int] = {"source": 128, "message_id": 255}  # in the inbox
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def exact_text(name: str, given: Any, *, most: int) -> str:
    """Return text that every database stores unchanged; refuse text that some change or reject."""
    if _is_usual(given, most):
        return given  # type: ignore[no-any-return]
    if not isinstance(given, str):
        raise InvalidEvent(f"{name} is {given!r}; expected a str.")
    value = plain_str(given)
    if not value.strip():
        raise InvalidEvent(f"{name} is {value!r}; expected a text that is not blank.")
    if len(value) > most:
        raise InvalidEvent(
            f"{name} has {len(value)} characters; at most {most} fit. It begins {value[:40]!r}."
        )
    if "\0" in value or value[-1] == " " or not _is_unicode(value):
        raise InvalidEvent(
            f"{name} is {value!r}; expected valid Unicode without NUL characters and without "
            "trailing spaces, which databases reject or ignore."
        )
    return value


def _is_usual(given: Any, most: int) -> bool:
    """Return whether it is plain text that passes every test, as nearly all does."""
    return (
        type(given) is str
        and given[-1:] not in ("", " ")
        and len(given) <= most
        and given.isascii()
        and given.isprintable()
    )


def identity(value: Any) -> Any:
    """Return an int or UUID as text, others unchanged; so is a bool, which is refused later."""
    return str(value) if isinstance(value, (int, UUID)) and not isinstance(value, bool) else value


def spellings(event_id: str) -> list[str]:
    """Return the ids that may be meant, in order: two if it is as long as a ULID, else one.

    A person may give a ULID in lower case.
    """
    ulid, dot, listener = event_id.partition(".")
    upper = f"{ulid.upper()}{dot}{listener}"
    return [event_id, upper] if len(ulid) == ULID_LENGTH else [event_id]


def aggregate_label(aggregate_type: str, aggregate_id: str | None) -> str:
    """Return an aggregate as people read it: ``shop.Order 7``; empty if there is none."""
    kind = "" if aggregate_type == GLOBAL else aggregate_type
    return f"{kind} {aggregate_id or ''}".strip()


def event_label(event: Any) -> str:
    """Return type, id and aggregate of an event or a row: ``order.placed 01K… (shop.Order 7)``."""
    about = aggregate_label(event.aggregate_type, event.aggregate_id)
    return f"{event.event_type} {event.event_id}" + (f" ({about})" if about else "")


def aggregate_key(aggregate_type: str, aggregate_id: str | None) -> str:
    """Return the stream of an aggregate: ``type:id``, or ``type`` alone for events without an id.

    A colon in the type is escaped, so that no two aggregates share a stream.
    """
    kind = aggregate_type.replace("\\", "\\\\").replace(":", "\\:")
    return kind if aggregate_id is None else f"{kind}:{aggregate_id}"


def stream_of(lane: str, key: str) -> str:
    """Return the stream of a key in a lane, whose name has no colon."""
    return f"{lane}:{key}"


def slot_of(digest: str, coalesce: str) -> str:
    """Return the slot of a listener's rows with this ``coalesce=``; "": it is not known yet."""
    return f"{UNROUTED_LANE}{digest:~<12}:{coalesce}"


def is_slot(stream: str | None) -> bool:
    """Return whether the rows with this ``stream`` are in a slot: due by themselves, not in order.

    A row that waits there for its listeners is due by itself as well, but has a key.
    """
    return stream is not None and stream[0] == UNROUTED_LANE and stream[1] != ":"


def unrouted(stream: str) -> str:
    """Return where the events of a stream's key wait whose listeners are not known yet."""
    _, key = split_stream(stream)
    return stream_of(UNROUTED_LANE, key)


def split_stream(stream: str) -> tuple[str, str]:
    """Return lane and key of a stream."""
    lane, _, key = stream.partition(":")
    return lane, key


def type_name(value: Any, name: str) -> str:
    """Return a type name: a str, or an enum member's value if that is a str, else its name."""
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} is {value!r}; expected a str or an enum member.")
    return plain_str(value)


def type_text(value: Any, column: str) -> str:
    """Return the name of an event or aggregate type as its column takes it."""
    return exact_text(column, type_name(value, column), most=LENGTHS[column])


def plain_str(value: str) -> str:
    """Return a plain ``str``: drivers and msgspec accept no SafeString and no str enum member."""
    return str.__str__(value)


def aggregate(instance: Any) -> tuple[str, str]:
    """Return the aggregate type and id of a saved model instance."""
    meta, pk = getattr(instance, "_meta", None), getattr(instance, "pk", None)
    if meta is None or isinstance(instance, type):
        raise InvalidEvent(f"aggregate is {instance!r}; expected a model instance.")
    if pk is None or (isinstance(pk, tuple) and None in pk) or instance._state.adding:
        raise InvalidEvent(
            f"aggregate is a {meta.label} that is not in the database: not saved yet, or deleted "
            "already. Save it first, or give aggregate_type and aggregate_id."
        )
    return meta.label, str(pk)


def read_only_headers(value: Any) -> Mapping[str, str]:
    if value is None or value is NO_HEADERS:
        return NO_HEADERS
    if not isinstance(value, Mapping):
        raise InvalidEvent(f"headers is {value!r}; expected a mapping of str to str.")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidEvent(f"The header {name!r}: {text!r} is not str: str. Convert both.")
        if not _is_unicode(name) or not _is_unicode(text):
            raise InvalidEvent(f"The header {name!r} holds a lone surrogate.")
    return MappingProxyType({plain_str(k): plain_str(v) for k, v in value.items()})


def instant(name: str, given: Any) -> datetime:
    """Return a datetime as aware UTC, within every database's calendar."""
    if not isinstance(given, datetime):
        raise InvalidEvent(f"{name} is {given!r}; expected a datetime.")
    try:
        value = as_utc(given)
    except (OverflowError, ValueError) as error:
        raise InvalidEvent(f"{name} is {given!r}, which has no UTC equivalent: {error}") from None
    if not 1971 <= value.year <= 9998:
        raise InvalidEvent(f"{name} is {value}; expected a year from 1971 to 9998.")
    return value


def delay(value: Any) -> timedelta:
    """Return ``deliver_after`` (seconds or a timedelta) as a timedelta."""
    try:
        found = timedelta(seconds=seconds(value, of="deliver_after"))
    except ValueError:
        found = timedelta(0)
    if not timedelta(0) < found <= MAX_DELIVER_AFTER:
        raise InvalidEvent(
            f"deliver_after is {value!r}; expected seconds or a timedelta, more than zero and at "
            "most 100 years."
        )
    return found


def add_delay(start: datetime, delay: timedelta) -> datetime:
    """Return the due time of a delay that counts from ``occurred_at``."""
    try:
        return instant("occurred_at + deliver_after", start + delay)
    except OverflowError:
        raise InvalidEvent(f"deliver_after {delay} leads from {start} past year 9999.") from None


def stored_instant(stored: Any) -> datetime | None:
    """Return an instant from a database, naive or as text, as an aware UTC datetime."""
    value: datetime | None = parse_datetime(stored) if isinstance(stored, str) else stored
    if value is None or value.tzinfo is timezone.utc:
        return value
    if value.tzinfo is None:
        return value.replace(tzinfo=timezone.utc)
    return value.astimezone(timezone.utc)


def as_utc(value: datetime) -> datetime:
    """Return an aware UTC datetime; like Django, read a naive one in the default time zone."""
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


def _is_unicode(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
