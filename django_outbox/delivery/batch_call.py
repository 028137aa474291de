"""``BatchCall``: one call of a batch listener, plain, awaited, or in one transaction."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import hooks
from ..conf import Settings
from ..events import Event, delivering
from ..listeners.registry import Listener
from ..signals import announce, batch_called
from .answers import checked
from .interceptors import intercept
from .invocation import Invocation
from .lease import Lease
from .verdicts import Member, Verdict

if TYPE_CHECKING:
    from .batch import Batch


@dataclass(slots=True)
class BatchCall(Invocation):
    """One call with some events of a batch."""

    batch: Batch
    lease: Lease  # the batch's first: its clock, its timeout
    listener: Listener
    part: list[Member]
    settings: Settings
    alias: str
    committed: list[Verdict] | None = None

    @property
    def event(self) -> Event:  # type: ignore[override]
        """The first event, for what is said about the call."""
        return self.part[0].event

    def intercept(self) -> ExitStack | None:
        """Enter the interceptors that take a whole batch; None if there are none."""
        found = hooks.batch_interceptors()
        return intercept(self._events, found) if found else None

    def checked(self, answer: Any) -> list[Any] | None:
        """Return one answer for each event, or None; raise ``WrongAnswer`` for anything else."""
        return checked(answer, len(self.part))

    def run(self) -> list[Any] | BaseException | None:
        """Call the listener; return its answers, None if all are done, or its exception."""
        answer: list[Any] | BaseException | None
        answer, seconds = self.call_timed(self.listener.call, self._begin())
        self._count(seconds)
        return answer

    async def arun(self) -> list[Any] | BaseException | None:
        """Await the listener; return its answers, None if all are done, or its exception."""
        before = self.lease.duration
        answer: list[Any] | BaseException | None
        answer = await self.acall(self.listener.call, self._begin())
        seconds, self.lease.duration = self.lease.duration - before, before
        self._count(seconds)
        return answer

    def commit(self, answer: Any) -> bool:
        self.committed = self.batch.commit(self, answer)
        return self.committed is not None

    def _begin(self) -> list[Event]:
        events = self._events
        delivering.set((*events,))
        return events

    @property
    def _events(self) -> list[Event]:
        return [each.event for each in self.part]

    def _count(self, seconds: float) -> None:
        """Count a call's duration: an equal share for each event."""
        share = seconds / len(self.part)
        for each in self.part:
            each.lease.duration += share
        announce(
            batch_called,
            sender=self.alias,
            listener=self.listener,
            size=len(self.part),
            duration=seconds,
        )
