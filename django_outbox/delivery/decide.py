"""From an answer or an exception to one decision; pure."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from .. import retry
from ..exceptions import PayloadError, RetryAfter, Unrecoverable
from ..outcomes import DONE, Dead, Decision, Defer, Status

logger = logging.getLogger("django_outbox")

ERROR_LENGTH = 4000  # characters of last_error


def decide(
    answer: Any,
    *,
    attempts: int,
    policy: retry.RetryPolicy,
    max_attempts: int,
    age: float,
    defer_limit: float | None = None,
) -> Decision:
    """Turn a listener's answer, or the exception it raised, into one decision.

    ``attempts`` counts the executions before this one; ``age`` is the seconds since the event was
    first due; a policy without a limit of its own gets ``max_attempts``.
    """
    if isinstance(answer, BaseException):
        return failed(answer, attempts + 1, policy, policy.max_attempts or max_attempts)
    if isinstance(answer, Dead):
        return dead(answer.reason or "the listener answered Dead")
    if isinstance(answer, Defer):
        if defer_limit is not None and age > defer_limit:
            return dead(f"deferred for {age:.0f} s; OUTBOX['DEFER_LIMIT'] is {defer_limit:g} s")
        return Decision(status=Status.NEW, delay=float(answer.delay), outcome="deferred")  # type: ignore[arg-type]
    return DONE


def failed(
    error: BaseException, executions: int, policy: retry.RetryPolicy, limit: int
) -> Decision:
    """Decide on an exception after that many executions, this one included."""
    text = describe(error)
    if isinstance(error, (Unrecoverable, PayloadError)):
        return dead(text)
    delay = _delay(error, executions, policy) if executions < limit else None
    if delay is None:
        return dead(text, spent=1)
    return Decision(status=Status.RETRY, delay=delay, spent=1, error=text, outcome="retry")


def dead(reason: str, *, spent: int = 0) -> Decision:
    return Decision(status=Status.DEAD, spent=spent, error=clean(reason), outcome="dead")


def _delay(error: BaseException, executions: int, policy: retry.RetryPolicy) -> float | None:
    """Return the seconds to the next execution, None if there is to be none."""
    if isinstance(error, RetryAfter):
        return retry.bounded(error.delay)
    try:
        return retry.bounded(policy.delay(executions)) if policy.should_retry(error) else None
    except BaseException:
        logger.exception("retry policy failed policy=%r; the default is used", policy)
        return retry.Exponential().delay(executions)


def describe(error: BaseException) -> str:
    """Return class, message and the end of the traceback in what the column holds."""
    head = f"{type(error).__module__}.{type(error).__qualname__}: {_message(error)}"
    head = head.removeprefix("builtins.")[: ERROR_LENGTH // 2]
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - what cannot be printed must be settled all the same
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
    except BaseException:  # noqa: BLE001 - as above
        return "(its message could not be read)"
