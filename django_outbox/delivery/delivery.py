"""``Delivery``: one listener and some events, from their route to the decisions on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from django.db import connections

from ..clocks import monotonic
from ..conf import current
from ..exceptions import BrokerUnavailable, ListenerTimeout, RetryAfter
from ..listeners.outcomes import DONE, LOST, Decision, Failure, Status
from ..listeners.registry import Listener
from ..signals import announce, batch_called, event_decided, event_started
from ..sql.halving import settle_within
from ..sql.values import NO_PAUSES, Ending, LeaseKind, Pauses
from . import decide
from .call import Call
from .decide import AT_ONCE, Halving, Verdict, describe, name
from .drivers import PASS_ON, Steps, Tidy
from .lease import Lease
from .route import prepare, routed

logger = logging.getLogger("django_outbox")

# What a call raises for all of its events; it is not split.
FOR_ALL = (
    *(RetryAfter, BrokerUnavailable, ListenerTimeout),
    *(decide.WrongAnswer, decide.NotBegun, decide.NotOurs),
)

Decided = list[tuple[Lease, Decision]]
Report = Callable[[Listener, Decision], None]


class Delivery:
    """Delivers events to their listener, each until it is decided.

    All are of one listener; there are several only if it takes batches. When the listener has
    failed for good with an event, its fallback is called, after the rest has been passed on.
    """

    def __init__(
        self,
        leases: list[Lease],
        alias: str,
        is_current: Callable[[Lease], bool],
        pauses: Pauses = NO_PAUSES,
        report: Report | None = None,
    ) -> None:
        """``report`` gets the decision on each call of the listener, for the queue's breaker."""
        self.alias, self.lead, self._is_shared = alias, leases[0], len(leases) > 1
        # For the thread that makes it: a language, a time zone or any other context variable that a
        # listener sets is gone afterwards.
        self.context = copy_context()
        self.decided: Decided = []  # to be settled
        self.to_repeat: list[Lease] = []  # behind an event of the same key that is not done
        # Neither decided nor to be repeated, by id.
        self.left = {self.lead.id: self.lead}
        if self._is_shared:
            self.left = {each.id: each for each in leases}
        # Events with which the listener has failed for good, how, and what was decided then.
        self._failed: list[tuple[Lease, Failure, Decision]] = []
        self._leases = leases
        self._listener: Listener  # once the first event is routed
        self._is_current, self._pauses, self._report = is_current, pauses, report
        self._settings = current()
        self._halving: Halving | None = None
        self._done: set[str]  # ids of what is done, while it is halved

    def steps(self) -> Steps:
        """Deliver; of a delivery that was given up, call what fallbacks are left."""
        if ready := self._ready() if self._is_shared else [*filter(self._is_ready, self._leases)]:
            if len(ready) > 1:
                yield from self._halve(ready)
            else:
                call = Call(self, self._listener, ready)
                yield call
                self._conclude(call, call.answer)
        while self._failed:
            yield PASS_ON
            yield Tidy()
            lease, failure, _ = self._failed[0]
            call = Call(self, self._listener, [lease], failure)
            yield call
            self._conclude(call, call.answer)

    def _halve(self, whole: list[Lease]) -> Steps:
        """Call with all; halve what fails, to find the events that do."""
        self._halving = halving = Halving(whole)
        self._done = set()
        for part in halving:
            ours = part if part is whole else self._without_lost(part)
            if not (ready := self._without_blocked(ours)):
                continue
            call = Call(self, self._listener, ready)
            yield call
            self._conclude(call, call.answer)
            if halving.is_over:
                break
            yield (tidied := Tidy())
            if not tidied.goes_on:
                break
        self._end(halving)

    def give_up(self, call: Call) -> None:
        """Decide in place of the thread that hangs in ``call``, which was written off.

        What is not decided then is to be repeated, but for fallbacks that another thread may call.
        """
        call.count(monotonic() - call.started)
        self._conclude(call, call.timeout_error("its thread was written off"))
        if self._halving is not None:
            self._end(self._halving)
        self._leases = []
        self._renew([lease for lease, _, _ in self._failed])  # the thread keeps its events

    def leave(self) -> None:
        """Let what is left be released, as if it had not started."""
        for each in self.left.values():
            each.started_at = 0.0
        self.left.clear()

    # -- the events ------------------------------------------------------------------------------

    def _ready(self) -> list[Lease]:
        """Return the events to be called; one that is not holds up those behind it in its key."""
        ready: list[Lease] = []
        held_up: set[str] = set()  # streams
        for lease in self._leases:
            if lease.stream in held_up:
                self._repeat(lease)
            elif self._is_ready(lease):
                ready.append(lease)
            elif lease.stream is not None:
                held_up.add(lease.stream)
        return ready

    def _is_ready(self, lease: Lease) -> bool:
        """Route and decode an event; if it cannot be called, decide on it and return False."""
        only_check = self._is_shared
        found = routed(lease, self._settings, self._pauses, self.alias, check_only=only_check)
        if isinstance(found, Listener):
            self._listener = found
            lease.waited = lease.waited or monotonic() - lease.claimed_at
            if (error := prepare(lease, found, self.alias)) is None:
                if event_started.receivers:
                    announce(event_started, sender=self.alias, event=lease.event, listener=found)
                return True
            decision = decide.own(error, lease, found, self._settings)
            lease.note_failure(decision, listener=found.title, seconds=0.0)
        else:
            decision = found
        self.decided.append((lease, decision))
        del self.left[lease.id]
        lease.drop_event()
        return False

    def _renew(self, part: list[Lease]) -> None:
        """Have the next call get new events: the listener may have changed the payloads."""
        for each in part:
            each.drop_event()
            prepare(each, self._listener, self.alias)  # cannot fail: it fitted before

    def _without_lost(self, part: list[Lease]) -> list[Lease]:
        """Return the events of a part whose leases have not ended since the call before."""
        kept = []
        for each in part:
            if self._is_current(each):
                kept.append(each)
            else:  # another worker may run it by now
                self._record(each, AT_ONCE)
        return kept

    def _without_blocked(self, part: list[Lease]) -> list[Lease]:
        """Return the events of a part that no earlier one of their key holds up."""
        inside, kept = {each.id for each in part}, []
        held_up: set[str] = set()  # streams
        for each in self._leases:
            if each.id not in inside:
                if each.stream is not None and each.id not in self._done:
                    held_up.add(each.stream)
            elif each.stream in held_up:
                self._repeat(each)
            else:
                kept.append(each)
        return kept

    def _repeat(self, lease: Lease) -> None:
        del self.left[lease.id]
        self.to_repeat.append(lease)
        lease.drop_event()

    # -- decisions -------------------------------------------------------------------------------

    def _conclude(self, call: Call, answer: Any) -> None:
        """Decide on the events of a call that has ended; if a shared one failed, halve it."""
        part, listener = call.leases, self._listener
        if call.failure is not None:
            self._conclude_fallback(call, answer)
            return
        if answer is None and call.committed is None and listener.batching is None:
            self._count(DONE)  # as nearly all end; the rest takes longer
            self._record(part[0], DONE)
            return
        failed = isinstance(answer, BaseException)
        if listener.batching is not None:
            announce(
                batch_called,
                sender=self.alias,
                listener=listener,
                size=len(part),
                duration=call.seconds,
            )
        if self._halving is not None:
            # What fails for all of its events is not split.
            split = part[:1] if isinstance(answer, FOR_ALL) else part
            self._halving.note(split, answer if failed else None)
        if failed and len(part) > 1:
            # Unrecoverable does not count.
            self._count(decide.own(answer, part[0], listener, self._settings))
            if isinstance(answer, FOR_ALL):
                self._fail_together(part, answer)
            else:
                self._renew(part)
            return
        found: list[Verdict] = call.committed or self._verdicts(call, answer)
        decisions = [each for _, _, each in found if each is not None and each is not LOST]
        self._count(decide.for_breaker(decisions))
        for lease, said, decision in found:
            if decision is None:
                self._repeat(lease)
            elif decide.needs_fallback(listener, said, decision):
                self._failed.append((lease, _failure(lease, listener, said), decision))
            else:
                self._record(lease, decision)

    def _count(self, decision: Decision) -> None:
        if self._report is not None:
            self._report(self._listener, decision)

    def _conclude_fallback(self, call: Call, answer: Any) -> None:
        found: list[Verdict] = call.committed or self._verdicts(call, answer)
        ((lease, _, decision),), failure = found, call.failure
        assert failure is not None and decision is not None
        if decision.status is Status.DONE:
            logger.warning(
                "fallback succeeded event_id=%s event_type=%s listener=%r attempt=%d error=%s",
                lease.event_id,
                lease.event_type,
                failure.listener,
                failure.attempts,
                name(failure.exception),
            )
        del self._failed[0]
        self._record(lease, decision)

    def _verdicts(self, call: Call, answer: Any) -> list[Verdict]:
        """Return what a call's answer means for each of its events."""
        part, rules = call.leases, (self._listener, self._settings)
        if call.failure is not None:
            if isinstance(answer, (decide.NotBegun, decide.NotOurs)):
                decision = decide.own(answer, part[0], *rules)
            else:
                after = self._failed[0][2]
                decision = decide.recovered(answer, failure=call.failure, after=after)
            return [(part[0], answer, decision)]
        is_list = answer is None or (self._listener.batching and isinstance(answer, list))
        return decide.verdicts(part, answer if is_list else [answer], *rules)

    def _record(self, lease: Lease, decision: Decision) -> None:
        """Note what was decided on an event, for its history too, and send the signal."""
        if decision is not DONE:
            lease.note_failure(decision, listener=self._listener.title, seconds=lease.duration)
        if event_decided.receivers:
            announce(
                event_decided,
                sender=self.alias,
                event=lease.event,
                listener=self._listener,
                outcome=decision.outcome,
                duration=lease.duration,
            )
        self.decided.append((lease, decision))
        del self.left[lease.id]
        if self._halving is not None and decision.status is Status.DONE:
            self._done.add(lease.id)
        lease.drop_event()

    def _fail_together(self, part: list[Lease], error: BaseException) -> None:
        """Count a failure for each event, of each key for the first."""
        failed: set[str] = set()  # streams
        for each in part:
            if each.stream in failed:
                self._repeat(each)
                continue
            self._record(each, decide.shared(error, each, self._listener, self._settings))
            if each.stream is not None:
                failed.add(each.stream)

    def _end(self, halving: Halving) -> None:
        """Decide on what is not called again: in an outage it has failed, else it comes back."""
        is_outage = halving.is_over
        for part, error in halving.rest():
            kept = self._without_blocked(part)
            if is_outage and error is not None:
                self._fail_together(kept, error)
            else:  # the worker stops, or has lost its lease
                for each in kept:
                    self._record(each, AT_ONCE)

    # -- atomic listeners ------------------------------------------------------------------------

    def commit(self, call: Call, answer: Any) -> bool:
        """Settle a call's events in its transaction; return whether all were ours."""
        seconds = (monotonic() - call.started) / len(call.leases)
        found: list[Verdict] = []
        endings: dict[LeaseKind, list[Ending]] = {}
        for lease, said, decision in self._verdicts(call, answer):
            if not decision or decide.needs_fallback(self._listener, said, decision):
                found.append((lease, said, decision))
                continue
            lease.note_failure(decision, listener=self._listener.title, seconds=seconds)
            endings.setdefault(lease.kind, []).append(lease.ending(decision))
            found.append((lease, said, replace(decision, written=True)))
        call.committed = found
        return all(
            len(some)
            == settle_within(
                connections[self.alias],
                some,
                me=self.lead.owner,
                kind=kind,
                delete_done=self._settings.RETENTION_DONE == 0,
            )
            for kind, some in endings.items()
        )


def _failure(lease: Lease, listener: Listener, error: BaseException) -> Failure:
    return Failure(
        listener=listener.title, attempts=lease.attempts + 1, exception=error, text=describe(error)
    )
