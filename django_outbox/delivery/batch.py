"""Deliver several events to one batch listener: call it, find what fails, decide on each event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

from ..clocks import monotonic
from ..conf import current
from ..exceptions import BrokerUnavailable, ListenerTimeout, RetryAfter
from ..listeners.outcomes import LOST, Decision
from ..listeners.registry import Listener
from ..sql.values import NO_PAUSES, Pauses
from . import verdicts
from .answers import WrongAnswer
from .batch_call import BatchCall
from .call import Call, Report, announce_decided, announce_start, prepare, report_nothing
from .deliver import routed
from .halves import Halving
from .invocation import NotBegun, NotOurs, settle_together
from .lease import Lease
from .verdicts import AT_ONCE, Member, Verdict

# What a call raises for all of its events; it is not split.
FOR_ALL = (RetryAfter, BrokerUnavailable, ListenerTimeout, WrongAnswer, NotBegun, NotOurs)

Decided = list[tuple[Lease, Decision]]


class Batch:
    """The delivery of some events to one batch listener."""

    def __init__(
        self,
        listener: Listener,
        leases: list[Lease],
        *,
        alias: str,
        between: Callable[[Lease], Any],
        is_current: Callable[[Lease], bool],
        pauses: Pauses = NO_PAUSES,
        report: Report = report_nothing,
    ) -> None:
        self.decided: Decided = []  # what is to be settled
        self.to_repeat: list[Lease] = []  # behind an event of the same key that is not done
        self.fallbacks: list[Call] = []  # to be called once the rest is settled
        self.gone: set[str] = set()  # ids of the events whose decisions were passed on
        self.lead, self._leases = leases[0], leases
        self.context: Context | None = None
        self._listener, self._alias, self._settings = listener, alias, current()
        self._rules = listener, self._settings  # by which it is decided
        self._between, self._is_current = between, is_current
        self._pauses, self._report = pauses, report
        self._began_at = monotonic()
        self._whole = self._members(leases)
        self._halving = Halving(self._whole)
        for each in self._whole:
            announce_start(each.event, listener, alias)

    def undecided(self) -> list[Lease]:
        """Return the events that are in none of the results, after the delivery was interrupted."""
        known = self.gone | {lease.id for lease, _ in self.decided}
        known |= {each.id for each in self.to_repeat}
        known |= {each.lease.id for each in self.fallbacks}
        return [each for each in self._leases if each.id not in known]

    # -- deliveries ------------------------------------------------------------------------------

    def run(self) -> None:
        """Call the listener until each event is decided.

        Raises ``CallAbandoned`` if a call returns after it was abandoned; see ``take_over``.
        """
        for part in self._parts():
            call = self._call(part)
            self._conclude(call, call.run())
            if self._halving.is_over or not self._between(self.lead):
                break
        self._end()

    async def arun(self) -> None:
        """Await the listener until each event is decided."""
        for part in self._parts():
            call = self._call(part)
            self._conclude(call, await call.arun())
            if self._halving.is_over or not await self._between(self.lead):
                break
        self._end()

    def take_over(self, call: BatchCall, seconds: float, between: Callable[[Lease], Any]) -> None:
        """Go on in place of a thread that hangs in ``call``, abandoned after ``seconds``."""
        self._between = between
        error = call.end_abandoned(seconds, [each.lease for each in call.part])
        self._renew(call.part)  # the thread that hangs keeps its events
        self._conclude(call, error)
        if self._halving.is_over or not between(self.lead):
            self._end()
        else:
            self.run()

    def _parts(self) -> Iterator[list[Member]]:
        for part in self._halving if self._whole else ():
            ours = part if part is self._whole else self._without_lost(part)
            if ready := self._without_blocked(ours):
                yield ready

    def _call(self, part: list[Member]) -> BatchCall:
        return BatchCall(self, self.lead, self._listener, part, self._settings, self._alias)

    # -- the events ------------------------------------------------------------------------------

    def _members(self, leases: list[Lease]) -> list[Member]:
        """Return the events to be called; one that is not holds up those behind it in its key."""
        found: list[Member] = []
        held_up: set[str] = set()  # streams
        for lease in leases:
            if lease.stream in held_up:
                self.to_repeat.append(lease)
            elif (member := self._member(lease)) is not None:
                found.append(member)
            elif lease.stream is not None:
                held_up.add(lease.stream)
        return found

    def _member(self, lease: Lease) -> Member | None:
        """Return an event of the batch; None if it was decided without a call."""
        listener = self._listener
        found = routed(lease, self._settings, self._pauses, self._alias, check_only=True)
        if isinstance(found, Decision):
            self.decided.append((lease, found))
            return None
        lease.waited = lease.waited or self._began_at - lease.claimed_at
        error = prepare(lease, listener, self._alias)
        member = Member(lease, lease.event)
        if error is not None:
            self._record(member, verdicts.own(error, lease, *self._rules))
            return None
        return member

    def _renew(self, part: list[Member]) -> None:
        """Have the next call get new events: the listener may have changed the payloads."""
        for each in part:
            each.lease.drop_event()
            prepare(each.lease, self._listener, self._alias)  # cannot fail: it fitted before
            each.event = each.lease.event

    def _without_lost(self, part: list[Member]) -> list[Member]:
        """Return the events of a part whose leases have not ended since the call before."""
        kept = []
        for each in part:
            if self._is_current(each.lease):
                kept.append(each)
            else:  # another worker may run it by now
                self._record(each, AT_ONCE)
        return kept

    def _without_blocked(self, part: list[Member]) -> list[Member]:
        """Return the events of a part that no earlier one of their key holds up."""
        inside, kept = {id(each) for each in part}, []
        held_up: set[str] = set()  # streams
        for each in self._whole:
            stream = each.lease.stream
            if id(each) not in inside:
                if stream is not None and not each.is_done:
                    held_up.add(stream)
            elif stream in held_up:
                self._repeat(each)
            else:
                kept.append(each)
        return kept

    def _repeat(self, member: Member) -> None:
        self.to_repeat.append(member.lease)
        member.decision = LOST  # for those behind it
        member.lease.drop_event()

    # -- decisions -------------------------------------------------------------------------------

    def _conclude(self, call: BatchCall, answer: list[Any] | BaseException | None) -> None:
        """Decide on the events of a call that has ended; halve it if it failed."""
        is_shared = len(call.part) > 1
        if isinstance(answer, BaseException) and is_shared:
            is_split = not isinstance(answer, FOR_ALL)
            # Unrecoverable does not count.
            self._report(self._listener, verdicts.own(answer, call.part[0].lease, *self._rules))
            if is_split:
                self._renew(call.part)
                self._halving.note(call.part, answer)
            else:
                self._halving.note(call.part[:1], answer)  # one is not split
                self._fail_together(call.part, answer)
            return
        answers = [answer] if isinstance(answer, BaseException) else answer
        self._record_all(call.committed or verdicts.of(call.part, answers, *self._rules))
        decisions = [each.decision for each in call.part if each.decision is not LOST]
        self._report(self._listener, verdicts.for_breaker([each or LOST for each in decisions]))
        self._halving.note(call.part, answer if isinstance(answer, BaseException) else None)

    def _record_all(self, found: list[Verdict]) -> None:
        for member, answer, decision in found:
            if decision is None:
                self._repeat(member)
            elif verdicts.needs_fallback(self._listener, answer, decision):
                member.decision = decision
                how = self._listener, member.event, self._settings, self._alias, self._between
                call = Call(member.lease, *how, context=copy_context())
                call.fail(answer, decision)
                self.fallbacks.append(call)
            else:
                self._record(member, decision)

    def _record(self, member: Member, decision: Decision) -> None:
        """Note what was decided on an event, and on its row."""
        member.decision = decision
        lease = member.lease
        announce_decided(lease, member.event, self._listener, self._alias, decision)
        self.decided.append((lease, decision))
        lease.drop_event()

    def _fail_together(self, part: list[Member], error: BaseException) -> None:
        """Count a failure for each event, of each key for the first."""
        failed: set[str] = set()
        for each in part:
            if each.lease.stream in failed:
                self._repeat(each)
                continue
            self._record(each, verdicts.shared(error, each.lease, *self._rules))
            if each.lease.stream is not None:
                failed.add(each.lease.stream)

    def _end(self) -> None:
        """Decide on what is not called again: in an outage it has failed, else it comes back."""
        is_outage = self._halving.is_over
        for part, error in self._halving.rest():
            kept = self._without_blocked(part)
            if is_outage and error is not None:
                self._fail_together(kept, error)
            else:  # the worker stops, or has lost its lease
                for each in kept:
                    self._record(each, AT_ONCE)

    # -- atomic listeners ------------------------------------------------------------------------

    def commit(self, call: BatchCall, answers: list[Any] | None) -> list[Verdict] | None:
        """Settle a call's events in its transaction; return None unless all were ours."""
        seconds = (monotonic() - call.lease.called_at) / len(call.part)
        found, ends = list[Verdict](), Decided()
        for member, answer, decision in verdicts.of(call.part, answers, *self._rules):
            if decision and not verdicts.needs_fallback(self._listener, answer, decision):
                member.lease.note_failure(decision, listener=self._listener.title, seconds=seconds)
                ends.append((member.lease, decision))
                found.append((member, answer, replace(decision, written=True)))
            else:
                found.append((member, answer, decision))
        ours = settle_together(ends, alias=self._alias, settings=self._settings)
        return found if ours else None
