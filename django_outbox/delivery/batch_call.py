"""``BatchCall``: one call of a batch listener, plain, awaited, or in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import InterfaceError, OperationalError, connections

from .. import hooks
from ..clocks import monotonic
from ..conf import Settings
from ..events import Event
from ..listeners.registry import Listener
from ..signals import announce, batch_called
from ..sql import dialect_of
from .answers import checked
from .interceptors import Escaping, intercept
from .invocation import Invocation, Rollback
from .lease import Lease
from .member import Member, NotBegun, Verdict
from .timeouts import CallAbandoned, TimedCall, report_timeout

if TYPE_CHECKING:
    from .batch import Batch

logger = logging.getLogger("django_outbox")


@dataclass(slots=True)
class BatchCall(Invocation):
    """One call with some events of a batch."""

    batch: Batch
    lease: Lease  # the batch's first: its clock, its timeout
    listener: Listener
    part: list[Member]
    settings: Settings
    alias: str
    escaping: Escaping = ()
    # What an atomic listener's transaction has committed.
    verdicts: list[Verdict] | None = None
    lost: bool = False  # fewer rows were settled than there are events; all is rolled back

    def intercept(self) -> ExitStack | None:
        """Enter the interceptors that take a whole batch; None if there are none."""
        found = hooks.batch_interceptors()
        return intercept(self._events, found, self.escaping) if found else None

    def checked(self, answer: Any) -> list[Any] | None:
        """Return one answer for each event, or None; raise ``WrongAnswer`` for anything else."""
        return checked(answer, len(self.part))

    def report_if_late(self, seconds: float) -> None:
        """Report a call that took ``seconds`` if that is more than its timeout."""
        if self.timeout is not None and seconds >= self.timeout:
            report_timeout(self.part[0].event, self.listener, self.alias, seconds)

    def run(self, commit: Callable[[list[Any] | None], bool]) -> list[Any] | BaseException | None:
        """Call the listener; return its answers, None if all are done, or its exception.

        For an atomic listener, ``commit`` settles the events in its transaction, and returns
        whether all of them were still ours.
        Raises ``CallAbandoned`` if the call was abandoned before.
        """
        lease, timeout = self.lease, self.timeout
        timed: TimedCall | None = None
        started = lease.called_at = monotonic()
        if timeout is not None:
            timed = lease.timed = TimedCall(self, started, timeout)
        if self.listener.atomic:
            answer = self._in_transaction(timed, commit)
        else:
            answer = self._call_once(timed)
        lease.called_at = 0.0
        if timed is not None:
            lease.timed = None
            if timed.timed_out:
                self.report_if_late(timed.seconds)
        self._count(monotonic() - started)
        return answer

    async def arun(self) -> list[Any] | BaseException | None:
        """Await the listener; return its answers, None if all are done, or its exception."""
        before = self.lease.duration
        answer: list[Any] | BaseException | None
        answer = await self.acall(self.listener.call, self._events)
        seconds, self.lease.duration = self.lease.duration - before, before
        self._count(seconds)
        return answer

    @property
    def _events(self) -> list[Event]:
        return [each.event for each in self.part]

    def _call_once(self, timed: TimedCall | None) -> list[Any] | BaseException | None:
        answer: list[Any] | BaseException | None
        answer = self.call_intercepted(timed, self.listener.call, (self._events,))
        return answer

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

    def _in_transaction(
        self, timed: TimedCall | None, commit: Callable[[list[Any] | None], bool]
    ) -> list[Any] | BaseException | None:
        """Commit the ends of the events with the listener's changes; errors undo both."""
        connection, has_begun = connections[self.alias], False
        answer: list[Any] | BaseException | None = None
        try:
            with dialect_of(connection).read_committed(connection):
                has_begun = True
                answer = self._call_once(timed)
                if isinstance(answer, BaseException):
                    raise Rollback
                if not commit(answer):
                    self.lost = True
                    raise Rollback
        except Rollback:
            return answer
        except Exception as error:
            self.verdicts = None  # they were not committed
            if timed is not None and not (timed.has_returned or timed.mark_returned()):
                raise CallAbandoned from error  # the rollback failed
            if not has_begun and isinstance(error, (OperationalError, InterfaceError)):
                logger.warning(
                    "transaction could not begin event_id=%s listener=%r error=%s",
                    self.part[0].event.event_id,
                    self.listener.title,
                    error,
                )
                not_begun = NotBegun()
                not_begun.__cause__ = error
                return not_begun
            return error
        return answer
