"""Fill the fields of a new event from its arguments: typed payload, aggregate, id and times.

Ids are ULIDs that only increase within a process.
"""

from __future__ import annotations

import difflib
import inspect
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
from ulid import ULID, base32

from ..exceptions import InvalidEvent
from . import validation
from .typed import Declaration
from .validation import GLOBAL

if TYPE_CHECKING:
    from .event import Event


F = TypeVar("F", bound=Callable[..., Any])
Put = Callable[[str, Any], None]  # sets a field of the event, which is frozen

ABSENT: Final = msgspec.UNSET  # an argument that was not given, as opposed to ``None``

OTHER_NAMES: Final = {  # by what other libraries call them
    **dict.fromkeys("delay countdown deliver_in run_in".split(), "deliver_after"),
    **dict.fromkeys("eta deliver_at run_at run_after send_at not_before".split(), "available_at"),
    **dict.fromkeys("idempotency_key deduplication_id job_id".split(), "unique_key"),
    **dict.fromkeys("partition_key ordering_key message_group_id".split(), "key"),
}


def suggest_names(function: F) -> F:
    """Return the function, whose ``TypeError`` for an unknown argument suggests a known one."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError:
            title = function.__qualname__.removesuffix(".__init__")
            known = inspect.signature(function).parameters
            by_name = [each for each in known if known[each].kind is inspect.Parameter.KEYWORD_ONLY]
            if len(args) > len(known) - len(by_name):
                text = f"{title}() takes arguments such as {by_name[0]}= and {by_name[1]}= by name."
                raise TypeError(text) from None
            for name in named.keys() - known:
                near = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1)
                if near and (right := OTHER_NAMES.get(near[0], near[0])) in known:
                    raise TypeError(
                        f"{title}() got an unexpected argument {name!r}. Did you mean {right!r}?"
                    ) from None
            raise

    return cast("F", call)


def fill_declared(put: Put, event: Event, declaration: Declaration, aggregate: Any) -> None:
    """Fill the fields that the payload's class declares and the caller did not give."""
    if event.payload is not None:
        raise InvalidEvent(
            "payload= was given together with an instance of "
            f"{type(event.event_type).__qualname__}, which is the payload; expected one of them."
        )
    put("payload", event.event_type)
    fields = declaration.fields(event.payload)
    if event.key is not None:
        fields.pop("key", None)
    if "headers" in fields:
        fields["headers"] = {**fields["headers"], **validation.read_only_headers(event.headers)}
    if (aggregate, event.aggregate_type, event.aggregate_id) != (None, GLOBAL, None):
        fields.pop("aggregate_type", None)
        fields.pop("aggregate_id", None)
    for name, value in fields.items():
        put(name, value)


def fill_aggregate(put: Put, event: Event, instance: Any) -> None:
    if event.aggregate_type != GLOBAL or event.aggregate_id is not None:
        raise InvalidEvent(
            "aggregate= was given together with aggregate_type or aggregate_id; expected one form."
        )
    kind, pk = validation.aggregate(instance)
    put("aggregate_type", kind)
    put("aggregate_id", pk)


def fill_identity(put: Put, event: Event) -> str:
    """Fill the id; take id, key and slot as text; return the id that was generated, or ""."""
    generated = (event._generated or ("",))[0]
    if event.event_id in ("", None):
        put("event_id", generated := new_id())
    elif event.event_id is not generated:
        put("event_id", validation.identity(event.event_id))
    for name in ("key", "coalesce"):
        if (value := getattr(event, name)) is not None:
            put(name, validation.identity(value))
    return generated


def check_keyed(event: Event) -> None:
    """Refuse what an event with a key cannot have."""
    other = None if event.coalesce is None else f"coalesce {event.coalesce!r}"
    if event.deliver_at is not None or event._delay is not None:
        other = "a delay"
    if other:
        raise InvalidEvent(
            f"key {event.key!r} was given together with {other}; a stream delivers each of its "
            "events, in the order of their writes. Leave one of them out."
        )


def fill_times(put: Put, event: Event, deliver_after: Any) -> datetime | None:
    """Check and fill the times; return ``occurred_at`` if it was not given."""
    occurred: Any = event.occurred_at
    due: Any = event.available_at
    if deliver_after is None or (due is None and event._generated is None):
        raise TypeError("None is not a due time; omit the argument to deliver at once.")
    if event.deliver_at is not None and event._generated is None:
        raise InvalidEvent(
            f"deliver_at is {event.deliver_at!r}; the outbox fills it in. Expected available_at."
        )
    due = ABSENT if due is None else due
    if due is not ABSENT and deliver_after is not ABSENT:
        raise InvalidEvent("available_at and deliver_after were both given; expected one of them.")
    generated = event._generated[1] if event._generated is not None else None
    if occurred is ABSENT or occurred is None:
        generated = occurred = datetime.now(timezone.utc)
    given = occurred is not generated
    occurred = validation.instant("occurred_at", occurred) if given else generated
    if due is not ABSENT:
        due = validation.instant("available_at", due)
        put("_delay", None)
        if given and due < occurred:
            raise InvalidEvent(f"available_at {due} lies before occurred_at {occurred}.")
    elif deliver_after is not ABSENT:
        delay = validation.delay(deliver_after)
        if given:
            due = validation.add_delay(occurred, delay)
        else:
            put("_delay", delay.total_seconds())
    put("occurred_at", occurred)
    put("available_at", None if due is ABSENT else due)
    put("deliver_at", event.available_at)
    return generated


class _IdGenerator:
    """A generator of ids that increase across threads, and even if the clock is set back."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Reset, because a forked child must not continue from its parent's last id."""
        self._lock = threading.Lock()
        self._millis = 0  # of the last id; never decreases
        self._random = 0  # the lower 80 bits of the last id

    def __call__(self) -> str:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._millis:
                self._millis, self._random = now, int.from_bytes(os.urandom(10), "big") >> 1
            else:
                self._random += 1
            value = (self._millis << 80) + self._random
        return base32.encode(value.to_bytes(16, "big"))


new_id = _IdGenerator()


def least_id(at: datetime) -> str:
    """Return the smallest id of an event created at this instant; before 1970 counts as 1970."""
    millis = max(int(at.timestamp() * 1000), 0)
    return str(ULID.from_bytes((millis << 80).to_bytes(16, "big")))
