"""Deliver several events to one batch listener: call it, find what fails, decide on each event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

from ..clocks import monotonic
from ..conf import current
from ..events import Event
from ..exceptions import BrokerUnavailable, ListenerTimeout, RetryAfter
from ..listeners.outcomes import DONE, LOST, Decision, Status
from ..listeners.registry import Listener
from ..signals import announce, event_decided, event_started
from ..sql.values import Pauses
from .answers import WrongAnswer
from .atomic_batch import owned, settle_together
from .batch_call import BatchCall
from .decide import deferred_after_error
from .deliver import Report, in_queue_of, routed
from .fallbacks import Fallback
from .halves import Halving
from .interceptors import Escaping
from .lease import Lease
from .member import Member, NotBegun, Verdict, unblocked
from .paused import NO_PAUSES
from .verdicts import Verdicts, for_breaker

# What a call raises for all of its events; it is not split.
FOR_ALL = (RetryAfter, BrokerUnavailable, ListenerTimeout, WrongAnswer, NotBegun)

WRITTEN = replace(DONE, written=True)
AT_ONCE = Decision(status=Status.NEW, delay=0.0, outcome="deferred")

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
        report: Report | None = None,
        escaping: Escaping = (),
    ) -> None:
        self.decided: Decided = []  # what is to be settled
        self.to_repeat: list[Lease] = []  # behind an event of the same key that is not done
        self.fallbacks: list[Fallback] = []  # to be called once the rest is settled
        self.gone: set[str] = set()  # ids of the events whose decisions were passed on
        self.lead, self._leases = leases[0], leases
        self.context: Context | None = None
        self._listener, self._alias, self._settings = listener, alias, current()
        self._verdicts = Verdicts(listener, self._settings)
        self._between, self._is_current, self._escaping = between, is_current, escaping
        self._pauses, self._report_to = pauses, report
        self._began_at = monotonic()
        self._by_key: dict[str, list[Member]] = {}
        self._whole = self._members(leases)
        self._halving = Halving(self._whole)
        self._begin(self._whole)

    def undecided(self) -> list[Lease]:
        """Return the events that are in none of the results, after the delivery was interrupted."""
        known = self.gone | {lease.id for lease, _ in self.decided}
        known |= {each.id for each in self.to_repeat}
        known |= {each.call.lease.id for each in self.fallbacks}
        return [each for each in self._leases if each.id not in known]

    # -- deliveries ------------------------------------------------------------------------------

    def run(self) -> None:
        """Call the listener until each event is decided.

        Raises ``CallAbandoned`` if a call returns after it was abandoned; see ``take_over``.
        """
        for part in self._parts():
            call = self._call(part)
            self._conclude(call, call.run(partial(self._commit, call)))
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
        call.report_if_late(seconds)
        for each in call.part:
            each.lease.duration += seconds / len(call.part)
        self._renew(call.part)  # the thread that hangs keeps its events
        self.lead.called_at, self.lead.timed = 0.0, None
        self._conclude(call, call.timeout_error("its thread was written off"))
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
        return BatchCall(
            self, self.lead, self._listener, part, self._settings, self._alias, self._escaping
        )

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
        event = lease.event
        event.set_listener(listener.title, self._alias)
        member = Member(lease, event, lease.attempts)
        if listener.payload_type is not None:
            try:
                event.convert_payload(listener.payload_type)
            except self._escaping:
                raise
            except BaseException as error:  # noqa: BLE001 - the class runs its own code
                self._record(member, self._verdicts.own(member, error))
                return None
        if lease.stream is not None:
            self._by_key.setdefault(lease.stream, []).append(member)
        return member

    def _event(self, lease: Lease, attempts: int) -> Event:
        event = lease.event.copy_for_listener(attempts)
        event.set_listener(self._listener.title, self._alias)
        return event

    def _renew(self, part: list[Member]) -> None:
        """Have the next call get new events: the listener may have changed the payloads."""
        for each in part:
            each.event = self._event(each.lease, each.attempts)
            if self._listener.payload_type is not None:  # it cannot fail: the payload fitted before
                each.event.convert_payload(self._listener.payload_type)

    def _begin(self, members: list[Member]) -> None:
        if event_started.receivers:
            for each in members:
                announce(
                    event_started, sender=self._alias, event=each.event, listener=self._listener
                )

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
        if all(len(each) == 1 for each in self._by_key.values()):
            return part
        kept, blocked = unblocked(part, self._by_key)
        for each in blocked:
            self._repeat(each)
        return kept

    def _repeat(self, member: Member) -> None:
        self.to_repeat.append(member.lease)
        member.decision = LOST  # for those behind it
        member.lease.drop_event()

    # -- decisions -------------------------------------------------------------------------------

    def _conclude(self, call: BatchCall, answer: list[Any] | BaseException | None) -> None:
        """Decide on the events of a call that has ended; halve it if it failed."""
        if call.lost:
            self._call_again(call.part)
            return
        is_shared = len(call.part) > 1
        if isinstance(answer, BaseException) and is_shared:
            is_split = not isinstance(answer, FOR_ALL)
            self._report(self._verdicts.own(call.part[0], answer))  # Unrecoverable does not count
            if is_split:
                self._renew(call.part)
                self._halving.note(call.part, answer)
            else:
                self._halving.note(call.part[:1], answer)  # one is not split
                self._fail_together(call.part, answer)
            return
        answers = [answer] if isinstance(answer, BaseException) else answer
        self._record_all(call.verdicts or self._verdicts.of(call.part, answers))
        decisions = [each.decision for each in call.part if each.decision is not LOST]
        self._report(for_breaker([each or LOST for each in decisions]))
        self._halving.note(call.part, answer if isinstance(answer, BaseException) else None)

    def _record_all(self, verdicts: list[Verdict]) -> None:
        for member, answer, decision in verdicts:
            if decision is None:
                self._repeat(member)
            elif self._verdicts.needs_fallback(answer, decision):
                member.decision = decision
                self.fallbacks.append(self._fallback(member, answer, decision))
            else:
                self._record(member, decision)

    def _record(self, member: Member, decision: Decision) -> None:
        """Note what was decided on an event, and on its row."""
        member.decision = decision
        lease = member.lease
        if decision is not DONE:
            lease.note_failure(
                decision,
                listener=self._listener.title,
                number=member.attempts + 1,
                seconds=lease.duration,
            )
        if event_decided.receivers:
            announce(
                event_decided,
                sender=self._alias,
                event=member.event,
                listener=self._listener,
                outcome=decision.outcome,
                duration=lease.duration,
            )
        self.decided.append((lease, in_queue_of(self._listener, decision, lease)))
        lease.drop_event()

    def _report(self, decision: Decision) -> None:
        if self._report_to is not None:
            self._report_to(self._listener, decision)

    def _fail_together(self, part: list[Member], error: BaseException) -> None:
        """Count a failure for each event, of each key for the first."""
        failed: set[str] = set()
        for each in part:
            if each.lease.stream in failed:
                self._repeat(each)
                continue
            self._record(each, self._verdicts.shared_failure(each, error))
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

    def _fallback(self, member: Member, error: BaseException, failed: Decision) -> Fallback:
        how = self._listener, self._settings, self._alias, self._between, self._escaping
        return Fallback.of(member, error, failed, *how)

    # -- atomic listeners ------------------------------------------------------------------------

    def _commit(self, call: BatchCall, answers: list[Any] | None) -> bool:
        """Settle the events in the listener's transaction; return whether all were ours."""
        verdicts = self._verdicts.of(call.part, answers)
        ends = [
            (member, decision)
            for member, answer, decision in verdicts
            if decision is not None and not self._verdicts.needs_fallback(answer, decision)
        ]
        seconds = (monotonic() - call.lease.called_at) / len(call.part)
        if not settle_together(
            self._listener, ends, alias=self._alias, settings=self._settings, seconds=seconds
        ):
            return False
        written = {
            id(member): WRITTEN if decision is DONE else replace(decision, written=True)
            for member, decision in ends
        }
        call.verdicts = [
            (each, answer, written.get(id(each), decision)) for each, answer, decision in verdicts
        ]
        return True

    def _call_again(self, part: list[Member]) -> None:
        """Drop the events that are not ours any more; call the others again, uncounted."""
        mine = owned([each.lease for each in part], alias=self._alias)
        rest = [each for each in part if each.lease.id in mine]
        if len(rest) == len(part):  # it cannot be told which
            for each in part:
                self._record(each, deferred_after_error())
            return
        for each in part:
            if each.lease.id not in mine:
                self._record(each, LOST)
        self._renew(rest)
        self._halving.again(rest)
