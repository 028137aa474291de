"""One event from taken to decided: decode, route, call, answer, decide."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from asgiref.sync import async_to_sync

from . import hooks, registry, retry
from .conf import Settings, current
from .dialects.fields import from_database
from .events import NO_HEADERS, Event, decode_headers, leased
from .exceptions import PayloadError, RetryAfter, Unrecoverable, UnroutableEvent
from .outcomes import DONE, Dead, Decision, Defer, Status
from .registry import Listener
from .signals import announce, event_started

logger = logging.getLogger("django_outbox")

ERROR_LENGTH = 4000  # characters of last_error


@dataclass(slots=True, kw_only=True)
class Lease:
    """One claimed event and what this process knows of its hold on it."""

    event: Event
    due_at: datetime  # when it was due, for the lag
    now: datetime  # the database's clock at the claim
    rescued: bool  # taken over from a lost worker
    rescues: int  # that one included
    progress: str | None
    fault: PayloadError | None  # why the row cannot be decoded
    deadline: float  # monotonic; nothing is started later without a renewal. Owner: Held
    started_at: float = 0.0  # monotonic; 0: not started. Owner: the thread that took it
    duration: float = 0.0  # seconds in listeners


def take(
    row: Sequence[Any],
    columns: tuple[str, ...],
    *,
    deadline: float,
    me: str,
    hot: Event | None = None,
) -> Lease:
    """Make a lease of a claimed row; a hot event brings its payload along."""
    found = dict(zip(columns, row, strict=False))
    was = row[-2]
    due_at, now = from_database(row[-3]), from_database(row[-1])
    assert due_at is not None and now is not None
    rescues, progress = found.pop("rescues"), found.pop("progress")
    for name in ("occurred_at", "created_at", "deliver_at", "first_due_at"):
        found[name] = from_database(found[name])
    fault = None
    if hot is None:
        text = found.pop("headers")
        found["_text"] = found.pop("payload")
        try:
            found["headers"] = decode_headers(text)
        except PayloadError as error:
            found["headers"], fault = NO_HEADERS, error
    else:
        for name in ("event_type", "aggregate_type", "aggregate_id", "tenant_id", "headers",
                     "unique_key", "_text"):  # fmt: skip
            found[name] = getattr(hot, name)
    found["available_at"] = due_at
    found["source"] = "cold" if hot is None else "hot"
    return Lease(
        event=leased(found, hooks.serializer().loads),
        due_at=due_at,
        now=now,
        rescued=was is not None and was != me,
        rescues=rescues,
        progress=progress,
        fault=fault,
        deadline=deadline,
    )


def deliver(
    lease: Lease, *, alias: str, escaping: tuple[type[BaseException], ...] = ()
) -> Decision:
    """Call the event's listeners and decide; whatever they raise is an answer, or ``escaping``."""
    settings = current()
    try:
        if lease.fault is not None:
            raise lease.fault
        _ = lease.event.payload  # decoded here, so that damaged text is dead and not retried
    except PayloadError as error:
        return Decision(status=Status.DEAD, error=describe(error), outcome="dead")
    listeners = registry.route(lease.event.aggregate_type, lease.event.event_type)
    if not listeners:
        return unroutable(lease.event, settings, now=lease.now)
    started = time.monotonic()
    decisions = [
        _run(lease, listener, settings, alias=alias, escaping=escaping) for listener in listeners
    ]
    lease.duration = time.monotonic() - started
    return decisions[0]


def _run(
    lease: Lease,
    listener: Listener,
    settings: Settings,
    *,
    alias: str,
    escaping: tuple[type[BaseException], ...],
) -> Decision:
    event = lease.event
    announce(event_started, sender=alias, event=event, listener=listener)
    answer: Any
    try:
        answer = async_to_sync(listener.call)(event) if listener.is_async else listener.call(event)
    except escaping:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: no listener ends the worker
        answer = error
    return decide(
        answer,
        attempts=event.attempts,
        policy=listener.retry or hooks.retry_policy(),
        max_attempts=settings.MAX_ATTEMPTS,
        age=(lease.now - event.first_due_at).total_seconds() if event.first_due_at else 0.0,
        defer_limit=settings.DEFER_LIMIT,
    )


def decide(
    answer: Any,
    *,
    attempts: int,
    policy: retry.RetryPolicy,
    max_attempts: int,
    age: float,
    defer_limit: float | None = None,
) -> Decision:
    """Turn a listener's answer, or the exception it raised, into one decision. Pure.

    ``attempts`` counts the executions before this one; ``age`` is the seconds since the event was
    first due; a policy without a limit of its own gets ``max_attempts``.
    """
    if isinstance(answer, BaseException):
        return _failed(answer, attempts + 1, policy, policy.max_attempts or max_attempts)
    if isinstance(answer, Dead):
        return Decision(status=Status.DEAD, error=clean(answer.reason or "Dead"), outcome="dead")
    if isinstance(answer, Defer):
        if defer_limit is not None and age > defer_limit:
            reason = f"deferred for {age:.0f} s; OUTBOX['DEFER_LIMIT'] allows {defer_limit:g}"
            return Decision(status=Status.DEAD, error=reason, outcome="dead")
        return Decision(status=Status.NEW, delay=float(answer.delay), outcome="deferred")  # type: ignore[arg-type]
    return DONE


def _failed(
    error: BaseException, executions: int, policy: retry.RetryPolicy, limit: int
) -> Decision:
    text = describe(error)
    if isinstance(error, (Unrecoverable, PayloadError)):
        return Decision(status=Status.DEAD, error=text, outcome="dead")
    delay = _delay(error, executions, policy) if executions < limit else None
    if delay is None:
        return Decision(status=Status.DEAD, spent=1, error=text, outcome="dead")
    return Decision(status=Status.RETRY, delay=delay, spent=1, error=text, outcome="retry")


def _delay(error: BaseException, executions: int, policy: retry.RetryPolicy) -> float | None:
    """Return the seconds to the next execution, None if there is to be none."""
    if isinstance(error, RetryAfter):
        return retry.bounded(error.delay)
    try:
        return retry.bounded(policy.delay(executions)) if policy.should_retry(error) else None
    except Exception:
        logger.exception("retry policy failed policy=%r; the default is used", policy)
        return retry.Exponential().delay(executions)


def unroutable(event: Event, settings: Settings, *, now: datetime) -> Decision:
    """Decide on an event that nobody listens to.

    Within the grace it is deferred: in a rolling deploy only a newer process may know its type.
    """
    if settings.UNROUTABLE == "ignore":
        return DONE
    error = UnroutableEvent(
        f"No listener for event type {event.event_type!r} of aggregate type "
        f"{event.aggregate_type!r}. Registered nearby: {registry.nearby(event.event_type)}. "
        f"Expected a listener in a module named {settings.LISTENER_MODULE!r} of an installed app."
    )
    age = (now - event.first_due_at).total_seconds() if event.first_due_at else 0.0
    if settings.UNROUTABLE == "dead" and age >= settings.UNROUTABLE_GRACE:
        return Decision(status=Status.DEAD, error=clean(str(error)), outcome="dead")
    if settings.UNROUTABLE == "retry":
        return _failed(error, event.attempts + 1, hooks.retry_policy(), settings.MAX_ATTEMPTS)
    wait = min(max(settings.UNROUTABLE_GRACE - age, 0.1), settings.UNROUTABLE_GRACE / 20 + 1)
    return Decision(status=Status.NEW, delay=wait, error=clean(str(error)), outcome="deferred")


def lost(rescues: int) -> Decision:
    """Decide on an event whose workers were lost again and again: it is not run any more."""
    return Decision(status=Status.DEAD, error=f"lost {rescues} workers", outcome="dead")


def describe(error: BaseException) -> str:
    """Return class, message and the end of the traceback in what a column holds."""
    head = f"{type(error).__module__}.{type(error).__qualname__}: {_message(error)}"
    head = head.removeprefix("builtins.")[: ERROR_LENGTH // 2]
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - what cannot be printed must be settled all the same
        trace = ""
    room = ERROR_LENGTH - len(head) - 1
    return clean(f"{head}\n{trace[-room:]}" if trace else head)


def clean(text: str) -> str:
    """Strip what no database stores: NUL characters and lone surrogates."""
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    return text[:ERROR_LENGTH]


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return "(its message could not be read)"
