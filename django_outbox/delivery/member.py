"""``Member``: one event of a batch, and what was decided on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..events import Event
from ..listeners.outcomes import Decision, Status
from .lease import Lease


@dataclass(slots=True, eq=False)
class Member:
    """One event of a batch."""

    lease: Lease
    event: Event
    attempts: int  # executions of this listener before
    decision: Decision | None = None  # of this listener; None: not decided yet

    @property
    def is_done(self) -> bool:
        return self.decision is not None and self.decision.status is Status.DONE


# An event, the answer to it, and the decision; None: it is to be repeated, uncounted.
Verdict = tuple[Member, Any, Decision | None]


class NotBegun(Exception):
    """The transaction of a call could not begin, so that the listener was not called."""


def unblocked(
    part: Sequence[Member], by_key: Mapping[str, Sequence[Member]]
) -> tuple[list[Member], list[Member]]:
    """Split a part into the events that no earlier one of their key holds up, and the others."""
    inside = {id(each) for each in part}
    kept, blocked = [], []
    for each in part:
        others = by_key.get(each.lease.stream or "", [])
        before = others[: others.index(each)] if others else []
        if all(id(one) in inside or one.is_done for one in before):
            kept.append(each)
        else:
            inside.discard(id(each))
            blocked.append(each)
    return kept, blocked
