"""What a listener's answers mean for each event, and which parts of a batch to call again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from .. import hooks
from ..conf import Settings
from ..exceptions import PayloadError, Unrecoverable
from ..listeners.outcomes import DONE, LOST, Decision, Done, Status
from ..listeners.registry import Listener
from .call import NotBegun, NotOurs
from .decide import decide, deferred_after_error, failed_together
from .lease import Lease

AT_ONCE = Decision(status=Status.NEW, delay=0.0, outcome="deferred")
# What an event dies of at once, even if only the answer to a shared call names it.
FATAL = (Unrecoverable, PayloadError)

# Failed calls in a row after which it may be an outage. One event that fails causes no two in a
# row: the half without it succeeds.
OUTAGE_AFTER = 8
FIRST_SPLIT = 3  # calls: the whole and its two halves

# An event, the answer to it, and the decision; None: it is to be repeated, uncounted.
Verdict = tuple[Lease, Any, Decision | None]


def own(answer: Any, lease: Lease, listener: Listener, settings: Settings) -> Decision:
    """Decide on the answer to one event, or on what a call of its own raised."""
    if answer is None or isinstance(answer, Done):
        return DONE
    if isinstance(answer, NotBegun):
        return deferred_after_error()
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
    """Decide on an exception of a call that the event shared with others.

    If some of them were lost, those that were not come back.
    """
    if isinstance(error, NotBegun):
        return deferred_after_error()
    if isinstance(error, NotOurs):
        return AT_ONCE
    policy = listener.retry or hooks.retry_policy()
    return failed_together(error, lease.attempts + 1, policy, settings.MAX_ATTEMPTS)


def of(
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
