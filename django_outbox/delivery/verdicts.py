"""``Verdicts``: what a batch listener's answers mean for each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import hooks
from ..conf import Settings
from ..exceptions import PayloadError, Unrecoverable
from ..listeners.outcomes import DONE, LOST, Decision, Done, Status
from ..listeners.registry import Listener
from .decide import decide, deferred_after_error, failed_together
from .member import Member, NotBegun, Verdict

# What an event dies of at once, even if only the answer to a shared call names it.
FATAL = (Unrecoverable, PayloadError)


class Verdicts:
    """Decides by a listener's retry policy, without writing anything."""

    def __init__(self, listener: Listener, settings: Settings) -> None:
        self._listener, self._settings = listener, settings

    def of(self, part: list[Member], answers: list[Any] | None) -> list[Verdict]:
        """Decide on each event by its answer, without writing anything."""
        if answers is None:
            return [(each, None, DONE) for each in part]
        found: list[Verdict] = []
        stopped: set[str] = set()
        for member, answer in zip(part, answers, strict=True):
            stream = member.lease.stream
            if stream in stopped:
                found.append((member, answer, None))
                continue
            if len(part) == 1 or not isinstance(answer, BaseException) or isinstance(answer, FATAL):
                decision = self.own(member, answer)
            else:
                decision = self.shared_failure(member, answer)
            if stream is not None and decision.status is not Status.DONE:
                stopped.add(stream)
            found.append((member, answer, decision))
        return found

    def own(self, member: Member, answer: Any) -> Decision:
        """Decide on the answer to one event, or on what a call of its own raised."""
        if answer is None or isinstance(answer, Done):
            return DONE
        if isinstance(answer, NotBegun):
            return deferred_after_error()
        limit = self._settings.DEFER_LIMIT
        return decide(
            answer,
            attempts=member.attempts,
            policy=self._listener.retry or hooks.retry_policy(),
            max_attempts=self._settings.MAX_ATTEMPTS,
            age=0.0 if limit is None else member.lease.age,
            defer_limit=limit,
        )

    def shared_failure(self, member: Member, error: BaseException) -> Decision:
        """Decide on an exception of a call that the event shared with others."""
        if isinstance(error, NotBegun):
            return deferred_after_error()
        policy = self._listener.retry or hooks.retry_policy()
        return failed_together(error, member.attempts + 1, policy, self._settings.MAX_ATTEMPTS)

    def needs_fallback(self, answer: Any, decision: Decision) -> bool:
        """Return whether a listener has failed for good with an exception, and has a fallback."""
        is_final = decision.status is Status.DEAD and isinstance(answer, BaseException)
        return is_final and self._listener.fallback is not None


def for_breaker(decisions: Sequence[Decision]) -> Decision:
    """Return the decision on a call that its queue's circuit breaker counts.

    A call has failed if all its events have, and has not reached anything if one says so.
    """
    for each in decisions:
        if each.unavailable:
            return each
    return next((each for each in decisions if not each.spent), next(iter(decisions), LOST))
