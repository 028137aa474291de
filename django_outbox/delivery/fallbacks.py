"""Call the fallbacks of events that failed for good in a batch, one by one."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, NamedTuple

from ..listeners.outcomes import Decision, Failure
from .call import Call
from .decide import describe
from .member import Member


class Fallback(NamedTuple):
    """An event whose listener has failed for good; its fallback is to be called."""

    call: Call
    failure: Failure
    failed: Decision

    @classmethod
    def of(cls, member: Member, error: BaseException, failed: Decision, *call: Any) -> Fallback:
        """Return the fallback after the decision ``failed``; ``call``: as ``Call`` takes it."""
        listener, settings, alias, between, escaping = call
        made = Call(
            member.lease,
            listener,
            member.event,
            member.attempts,
            settings,
            alias,
            between,
            escaping,
            context=copy_context(),
        )
        failure = Failure(
            listener=listener.title,
            attempts=member.attempts + 1,
            exception=error,
            text=describe(error),
        )
        return cls(made, failure, failed)


def call_fallback(fallback: Fallback) -> Decision:
    """Call a fallback; return the decision on the row.

    Raises ``CallAbandoned`` if it returns after it was abandoned; see ``deliver.finish``.
    """
    call = fallback.call
    assert call.context is not None
    return _after_fallback(call, call.context.run(call.fall_back, *fallback[1:]))


async def acall_fallback(fallback: Fallback) -> Decision:
    """Await a fallback; return the decision on the row."""
    return _after_fallback(fallback.call, await fallback.call.afall_back(*fallback[1:]))


def _after_fallback(call: Call, decision: Decision) -> Decision:
    call.lease.drop_event()
    return decision
