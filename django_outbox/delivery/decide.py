"""Turn what a listener returned or raised into decisions, without touching the database."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..exceptions import BrokerUnavailable, PayloadError, RetryAfter, Unrecoverable
from ..listeners import retry
from ..listeners.outcomes import DONE, LOST, Dead, Decision, Defer, Done, Failure, Status
from ..listeners.registry import Listener
from ..log import first_line, text_of
from .lease import Lease

logger = logging.getLogger("django_outbox")

ANSWERS = (Done, Defer, Dead, BaseException)  # of a batch listener to one event, besides None
ERROR_LENGTH = 4000  # characters of last_error
REASON_LENGTH = 200  # characters of why a broker cannot be reached
ALONE_DELAY = 0.2  # seconds until an event's own call after the last one that it shared
UNAVAILABLE_DELAY = 1.0  # seconds; the circuit breaker, which opens at once, is what makes it wait
ERROR_DELAY = 5.0  # seconds to the next delivery after an error that is not a listener's
NO_THREAD = "can't start new thread"  # the words of CPython
REFUSED_FOR = 3 * ERROR_DELAY  # seconds that a worker is not ready after it lacked a thread

AT_ONCE = Decision(status=Status.NEW, delay=0.0, outcome="deferred")
# On a delivery that failed outside its listener.
AFTER_ERROR = Decision(status=Status.NEW, delay=ERROR_DELAY, outcome="deferred")
# What an event dies of at once, even if only the answer to a shared call names it.
FATAL = (Unrecoverable, PayloadError)

# Failed calls in a row after which it may be an outage. One event that fails causes no two in a
# row: the half without it succeeds.
OUTAGE_AFTER = 8
FIRST_SPLIT = 3  # calls: the whole and its two halves

# An event, the answer to it, and the decision; None: it is to be repeated, uncounted.
Verdict = tuple[Lease, Any, Decision | None]


class NotBegun(Exception):
    """The process lacked what a call needs: its transaction could not begin, or a thread start."""


class NotOurs(Exception):
    """The lease of a call had ended when it was to be settled; its transaction is undone."""


def decide(
    answer: Any,
    *,
    attempts: int,
    policy: retry.RetryPolicy,
    max_attempts: int,
    age: float,
    defer_limit: float | None = None,
) -> Decision:
    """Return the decision on a listener's return value, or on the exception that it raised.

    ``attempts`` counts the executions before this one. ``age`` is the seconds since the event was
    first due. ``max_attempts`` applies to a policy without a limit of its own.
    """
    if isinstance(answer, BaseException):
        return failed(answer, attempts + 1, policy, max_attempts)
    if isinstance(answer, Dead):
        return dead(answer.reason or "the listener answered Dead", kind="Dead")
    if isinstance(answer, Defer):
        if defer_limit is not None and age > defer_limit:
            reason = f"deferred for {age:.0f} s; OUTBOX['DEFER_LIMIT'] is {defer_limit:g} s"
            more = f": {answer.reason}" if answer.reason else ""
            return dead(f"{reason}{more}", kind="DEFER_LIMIT")
        return Decision(
            status=Status.NEW,
            delay=float(answer.delay),  # type: ignore[arg-type]
            outcome="deferred",
            error=clean(answer.reason) or None,
            kind="Defer" if answer.reason else "",
        )
    return DONE


def failed(
    error: BaseException, executions: int, policy: retry.RetryPolicy, max_attempts: int
) -> Decision:
    """Decide on an exception; ``executions`` includes this one."""
    if isinstance(error, BrokerUnavailable):
        return Decision(
            status=Status.NEW,
            delay=UNAVAILABLE_DELAY,
            outcome="deferred",
            kind=name(error),
            unavailable=clean(first_line(error))[:REASON_LENGTH] or name(error),
        )
    text, kind = describe(error), name(error)
    if isinstance(error, (Unrecoverable, PayloadError)):
        return dead(text, kind=kind)
    delay = _delay(error, executions, policy, max_attempts)
    if delay is None:
        return dead(text, kind=kind, spent=1)
    return Decision(
        status=Status.RETRY, delay=delay, spent=1, error=text, kind=kind, outcome="retry"
    )


def recovered(answer: Any, *, failure: Failure, after: Decision) -> Decision:
    """Decide after a fallback: done, unless it failed too or returned ``Dead`` or ``Defer``."""
    if isinstance(answer, BaseException):
        text = describe(answer, room=ERROR_LENGTH // 2 - 30)
    elif isinstance(answer, Dead):
        text = answer.reason or "it answered Dead"
    elif isinstance(answer, Defer):
        text = "it answered Defer; expected None or Dead, because a fallback is called once"
    else:
        return replace(after, status=Status.DONE, outcome="done")
    first = describe(failure.exception, room=ERROR_LENGTH // 2)
    return replace(after, error=clean(f"{first.rstrip()}\n\nThe fallback: {text}"))


def dead(reason: str, *, kind: str, spent: int = 0) -> Decision:
    return Decision(status=Status.DEAD, spent=spent, error=clean(reason), kind=kind, outcome="dead")


def _delay(
    error: BaseException, executions: int, policy: retry.RetryPolicy, max_attempts: int
) -> float | None:
    """Return the seconds until the next execution; None if there is none."""
    try:
        if executions >= (policy.max_attempts or max_attempts):
            return None
        if isinstance(error, RetryAfter):
            return retry.bounded(error.delay)
        return retry.bounded(policy.delay(executions)) if policy.should_retry(error) else None
    except BaseException:
        logger.exception("retry policy failed; the default is used policy=%r", policy)
        return retry.Exponential().delay(executions) if executions < max_attempts else None


def describe(error: BaseException, *, room: int = ERROR_LENGTH) -> str:
    """Return class, message and end of the traceback, in at most ``room`` characters."""
    head = f"{name(error)}: {text_of(error)}"[: room // 2]
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - an error that cannot be printed must still be settled
        trace = ""
    rest = room - len(head) - 1
    return clean(f"{head}\n{trace[-rest:]}" if trace else head)


def name(error: BaseException) -> str:
    """Return the class name of an error, which unlike its message quotes no data."""
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def clean(text: str) -> str:
    """Strip what no database stores, NUL characters and lone surrogates, and truncate."""
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    return text[:ERROR_LENGTH]


class ThreadLimit:
    """Whether the process could start no thread lately: its container or user may have no more."""

    refused_at = -inf  # monotonic

    def refused(self, error: BaseException) -> bool:
        """Return whether an error says that no thread could be started; log the first of many."""
        if not isinstance(error, RuntimeError) or error.args != (NO_THREAD,):
            return False
        if self.unready_reason is None:
            logger.error("no thread could be started error=%s", first_line(error))
        self.refused_at = monotonic()
        return True

    @property
    def unready_reason(self) -> str | None:
        """Return a reason if a thread was refused lately."""
        is_recent = monotonic() - self.refused_at < REFUSED_FOR
        return f"no thread could be started: {NO_THREAD}" if is_recent else None


thread_limit = ThreadLimit()


class WrongAnswer(TypeError):
    """A batch listener's answer does not tell which events are done."""


def checked(answer: Any, count: int) -> list[Any] | None:
    """Return the answers to ``count`` events, None if all are done; or raise ``WrongAnswer``."""
    if answer is None:
        return None
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes, bytearray)):
        raise WrongAnswer(
            f"A batch listener answered {type(answer).__name__}; expected None, or a list with one "
            "answer for each event."
        )
    if len(answer) != count:
        raise WrongAnswer(
            f"A batch listener answered {len(answer)} values to {count} events; expected None, or "
            "one answer for each event in their order."
        )
    return [
        each if each is None or isinstance(each, ANSWERS) else _unknown(each) for each in answer
    ]


def _unknown(answer: Any) -> TypeError:
    return TypeError(
        f"A batch listener answered {type(answer).__name__} for this event; expected None, Done, "
        "Defer, Dead or an exception instance."
    )


def own(answer: Any, lease: Lease, listener: Listener, settings: Settings) -> Decision:
    """Decide on the answer to one event, or on what a call of its own raised."""
    if answer is None or isinstance(answer, Done):
        return DONE
    if isinstance(answer, NotBegun):
        return AFTER_ERROR
    if isinstance(answer, NotOurs):
        return LOST
    limit = settings.DEFER_LIMIT
    return decide(
        answer,
        attempts=lease.attempts,
        policy=listener.retry or hooks.retry_policy(),
        max_attempts=settings.MAX_ATTEMPTS,
        age=0.0 if limit is None else lease.age,
        defer_limit=limit,
    )


def shared(error: BaseException, lease: Lease, listener: Listener, settings: Settings) -> Decision:
    """Decide on an exception of a call that the event shared with others: it never dies of it.

    Its last execution is its own, so it comes back even after what no policy repeats. If some of
    the others were lost, it comes back at once.
    """
    if isinstance(error, NotBegun):
        return AFTER_ERROR
    if isinstance(error, NotOurs):
        return AT_ONCE
    policy = listener.retry or hooks.retry_policy()
    decision = failed(error, lease.attempts + 1, policy, settings.MAX_ATTEMPTS)
    if decision.status is not Status.DEAD:
        return decision
    delay = retry.bounded(error.delay) if isinstance(error, RetryAfter) else ALONE_DELAY
    return replace(decision, status=Status.RETRY, delay=delay, spent=1, outcome="retry")


def verdicts(
    part: list[Lease], answers: list[Any] | None, listener: Listener, settings: Settings
) -> list[Verdict]:
    """Decide on each event of a call by its answer."""
    if answers is None:
        return [(each, None, DONE) for each in part]
    found: list[Verdict] = []
    stopped: set[str] = set()
    for lease, answer in zip(part, answers, strict=True):
        if lease.stream in stopped:
            found.append((lease, answer, None))
            continue
        if len(part) == 1 or not isinstance(answer, BaseException) or isinstance(answer, FATAL):
            decision = own(answer, lease, listener, settings)
        else:
            decision = shared(answer, lease, listener, settings)
        if lease.stream is not None and decision.status is not Status.DONE:
            stopped.add(lease.stream)
        found.append((lease, answer, decision))
    return found


def needs_fallback(listener: Listener, answer: Any, decision: Decision) -> bool:
    """Return whether a listener has failed for good with an exception, and has a fallback."""
    is_final = decision.status is Status.DEAD and isinstance(answer, BaseException)
    return is_final and listener.fallback is not None


def for_breaker(decisions: Sequence[Decision]) -> Decision:
    """Return the decision on a call that its queue's circuit breaker counts.

    A call has failed if all its events have, and has not reached anything if one says so.
    """
    for each in decisions:
        if each.unavailable:
            return each
    return next((each for each in decisions if not each.spent), next(iter(decisions), LOST))


class Halving:
    """Iterates over the parts to call, the whole first; ``note`` tells it how each call ended.

    It goes breadth first, so that a half without a fault ends a row of failures soon. It stops if
    both halves of the whole fail with the same type of exception, or after ``OUTAGE_AFTER``
    failures in a row. Single events are not split.
    """

    def __init__(self, whole: list[Any]) -> None:
        self._queue: deque[tuple[list[Any], BaseException | None]] = deque([(whole, None)])
        self._errors: list[type[BaseException] | None] = []  # of the parts so far
        self._failures = 0  # in a row

    def __iter__(self) -> Iterator[list[Any]]:
        while not self.is_over:
            self._errors.append(None)
            yield self._queue.popleft()[0]

    @property
    def is_over(self) -> bool:
        """Return whether nothing is to be called any more."""
        return not self._queue or self._is_outage

    def note(self, part: list[Any], error: BaseException | None) -> None:
        """Note how the call of the last part ended, if there was one; an error halves it."""
        self._errors[-1] = None if error is None else type(error)
        self._failures = 0 if error is None else self._failures + 1
        if error is not None and len(part) > 1:
            middle = (len(part) + 1) // 2
            self._queue += [(part[:middle], error), (part[middle:], error)]

    def rest(self) -> list[tuple[list[Any], BaseException | None]]:
        """Return the parts that are not called again, each with the error of a call with it."""
        return [*self._queue]

    @property
    def _is_outage(self) -> bool:
        if self._failures >= OUTAGE_AFTER:
            return True
        if len(self._errors) != FIRST_SPLIT:
            return False
        _, first, second = self._errors
        return first is not None and first is second
