"""The claimer: leases what the hot queues offer and what is due in the table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from math import inf

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..conf import CENTURY, Settings
from ..delivery.lease import Run
from ..sql import dialect_of
from ..sql.values import Branch, Table
from .breaker import close_breaker
from .claims import SMALL_CLAIM, Claims
from .effects import Steps, T, perform
from .gate import Gate
from .gates import Gates
from .pauses import READ_INTERVAL, KnownPauses
from .quarantine import Quarantine
from .queues import Offer
from .releases import Releases
from .throttle import ClaimThrottle, Throttle
from .wakeup import Wakeup

STREAMS_INTERVAL = 0.05  # seconds between claims of streams while other events wait
MAX_SCANNED = 2000  # rows due first of a queue in which suspects are looked for
SCAN_AGAIN = 1.0  # seconds after a quarantine until suspects are looked for again
DUE_TIME_FACTOR = 10.0  # the query for the next due time pauses that many times as long as it takes


class Claimer:
    """Asks the gates of the queues, and claims what they have room for. One thread only."""

    def __init__(
        self,
        *,
        settings: Settings,
        gates: Gates,
        claims: Claims,
        releases: Releases,
        quarantine: Quarantine,
        known_pauses: KnownPauses,
        wakeup: Wakeup,
        may_claim: Callable[[], bool],
    ) -> None:
        self.alias, self.me, self.settings = releases.alias, releases.me, settings
        self.held, self._runs, self._releases = releases.held, releases.runs, releases
        self._gates, self._claims, self._quarantine = gates, claims, quarantine
        self._known_pauses, self._wakeup = known_pauses, wakeup
        self._may_claim = may_claim  # False on the standby of single_node
        hot, cold = settings.FAIRNESS
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._throttle, self._scans = ClaimThrottle(), Throttle()
        self._due_times, self._questions = Throttle(DUE_TIME_FACTOR), Throttle(DUE_TIME_FACTOR)
        self._due_at: dict[str, float] = {}  # monotonic; when the next event of each queue is due
        self._more_events = False  # more rows were due than the last claim of events took
        self._streams_wait = False  # the last claim of streams found events
        # Monotonic; the next full scan and the next claim of streams during a backlog.
        self._scan_at = self._streams_at = 0.0
        wakeup.expect(quarantine.proven_at - monotonic())

    def step(self) -> float:
        """Make one claim, if there is room and reason; return the seconds to wait."""
        if not self._may_claim():
            return min(self.settings.PROBE_INTERVAL, self.settings.POLL_INTERVAL)
        self._known_pauses.refresh(self._connection, notified=self._wakeup.poll_wanted)
        now = monotonic()
        if self._quarantine.is_on:
            return self._run_suspects(now)
        for gate in self._gates:
            self._follow_breaker(gate, now)
            self._give_back(gate, gate.to_release(now), now)
        open_ones = [each for each in self._gates if each.room(now)]
        if any(each.has_left_offers for each in self._gates):
            self._wakeup.poll_wanted = True  # perhaps no other worker runs
            doorbell.ring(self._connection)
        if open_ones and self._claim(open_ones, now):
            return 0.0
        return max(self._wait_until(open_ones, now) - monotonic(), 0.001)

    def _wait_until(self, open_ones: list[Gate], now: float) -> float:
        """Return until when (monotonic) only a wakeup can bring work."""
        times = [each.again(now) for each in self._gates if not each.free]
        if open_ones:
            poll_at = min(self._wakeup.next_poll(), *(each.again(now) for each in open_ones))
            # It may be another worker's turn to poll.
            times += [max(poll_at, self._throttle.next_poll()), self._runs.next_read()]
            if len(self.held):
                times.append(now + READ_INTERVAL)
        return min(times)

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self, open_ones: list[Gate], now: float) -> bool:
        """Read streams, claim what was offered, or poll; return False if there is nothing to do."""
        if self._wakeup.take_due(now):
            self._poll_all()
        if self._runs.next_read() <= now:
            room = sum(each.free for each in open_ones)
            self._perform(self._claims.reads.read(self._runs.to_read(now, room), room))
            return True
        is_time = now >= max(min(each.poll_at for each in open_ones), self._throttle.next_poll())
        hot = any(len(each.offers) for each in open_ones)
        if not (hot or is_time):
            return False
        self._throttle.wait()
        if hot and (not is_time or next(self._turns)):
            self._claim_hot(open_ones)
        else:
            has_backlog = any(each.more for each in open_ones)  # else one statement asks for all
            wanted = [each for each in open_ones if each.poll_at <= now or not has_backlog]
            if has_backlog or not self._nothing_due(wanted, now):
                self._claim_due(wanted, now)
        return True

    def _claim_hot(self, open_ones: list[Gate]) -> None:
        offered: list[Offer] = []
        for gate in open_ones:
            offered += gate.offers.take(min(gate.free, self.settings.POLL_BATCH_SIZE))
        events = {each.id: each.event for each in offered}
        if len(events) < SMALL_CLAIM and not any(len(each.offers) for each in open_ones):
            self._throttle.count()
        try:
            self._perform(self._claims.claim_hot(events))
        except BaseException:
            self._wakeup.poll_wanted = True  # the offers are gone, but the table has them
            raise

    def _nothing_due(self, gates: list[Gate], now: float) -> bool:
        """Ask in one statement whether nothing is due; if so, have ``gates`` rest.

        Return False without asking if that is throttled, or if something was reported.
        """
        if now < self._questions.until or any(each.poll_at == 0 for each in gates):
            return False
        due = self._ask_due_times(now, since=CENTURY)
        self._questions.after(now)
        if any(due.get(each.name, inf) <= 0 and not each.closed for each in self._gates):
            return False
        for gate in gates:
            gate.ended_poll(self._due_at[gate.name])
        self._wakeup.suspect_waits = False
        return True

    def _claim_due(self, gates: list[Gate], now: float) -> None:
        most = self.settings.POLL_BATCH_SIZE
        limits = {each.name: min(each.free, most) for each in gates}
        scan = now >= self._scans.until and (now >= self._scan_at or not self._more_events)
        if scan and self._look_for_suspects(now):
            return
        wanted = {name: limit for name, limit in limits.items() if limit > 0}
        finished = self._poll(wanted, now, scan=scan) if wanted else set()
        if scan:
            self._scans.after(now)
        until = inf
        if finished:
            self._throttle.count_poll(monotonic() - now, others=self._gates.others)
            until = self._next_poll(now, inf if scan else self._scans.until)
        for gate in gates:
            due_at = self._due_at.get(gate.name, inf)
            again = min(due_at if due_at > now else inf, until)
            gate.ended_poll(again if gate.name in finished else None)

    def _poll(self, limits: dict[str, int], now: float, *, scan: bool) -> set[str]:
        """Claim due events and streams; return the queues in which nothing more is due.

        A full scan finds what committed late or was locked when a claim passed it.
        """
        gates = [self._gates.by_queue[name] for name in limits]
        most = {
            name: (limit + 1) // 2 if self._streams_wait else limit
            for name, limit in limits.items()
        }
        branches = [each.branch(most[each.name], scan=scan) for each in gates]
        claim = self._claims.of(branches, exclude=[one for each in gates for one in each.excluded])
        claim = replace(claim, skip_recent=self.settings.SKIP_RECENT)
        found = self._perform(self._claims.claim_rows(claim))
        for gate in gates:
            gate.polled(found.found(gate.name))
        more = {queue for queue, each in found.queues.items() if each.more}
        self._more_events = bool(more)
        if found.rows and not more:
            self._throttle.count()
        if more and not self._streams_wait and now < self._streams_at:
            return set()
        rooms = {each.name: max(min(each.free, limits[each.name]), 1) for each in gates}
        added, more_streams = self._perform(self._claims.claim_streams(rooms, scan=scan))
        self._streams_wait, self._streams_at = added > 0, now + STREAMS_INTERVAL
        return limits.keys() - more - more_streams

    def _next_poll(self, now: float, until: float) -> float:
        """Return when (monotonic) to poll again, though nothing falls due: ``until`` at the latest.

        The table is asked when something does; if that query is throttled, when it may run again.
        """
        until, asked_at = min(until, self._runs.next_exclusion_end()), monotonic()
        if asked_at < self._due_times.until:
            return min(until, self._due_times.until)
        self._ask_due_times(now, since=asked_at - now + 0.001)
        self._due_times.after(asked_at)
        return until

    def _ask_due_times(self, now: float, *, since: float) -> dict[str, float]:
        """Ask when the next event of each queue falls due; that, or the longest pause, is noted.

        Return the answer in seconds. What became due in the last ``since`` seconds counts too.
        """
        longest, margin = self.settings.POLL_INTERVAL, self.settings.SKIP_RECENT or inf
        if not self._wakeup.doorbell_is_reliable:  # a poll takes the place of notifications
            longest = min(longest, self.settings.PROBE_INTERVAL)
        longest *= random.uniform(0.8, 1.2)
        due = dialect_of(self._connection).seconds_to_next_due(
            queues=[*self._gates.by_queue], since=since
        )
        answered_at = monotonic()
        for queue in self._gates.by_queue:
            pause = min(due.get(queue, inf) + 0.001, longest)
            if queue in due:  # it may be the end of a lease
                self._scan_at = min(self._scan_at, now + pause)
            # What is too young to be claimed is old enough after ``margin``.
            self._due_at[queue] = answered_at + max(min(pause, margin), 0.001)
        return due

    def _give_back(self, gate: Gate, runs: Sequence[Run], now: float) -> None:
        """Release what waits for a thread, for other workers."""
        if runs:
            rows, _ = self._perform(self._releases.give_back(runs))
            gate.released(rows, now)

    # -- breakers --------------------------------------------------------------------------------

    def _follow_breaker(self, gate: Gate, now: float) -> None:
        """Write what a queue's breaker has counted; deliver one event when its pause is over."""
        if gate.breaker is not None:
            gate.breaker.follow(self._connection)
        if gate.probe_at <= now:
            self._probe(gate, now)

    def _probe(self, gate: Gate, now: float) -> None:
        """Deliver one event of a queue whose breaker is open, if no other worker does.

        If the queue has no ``BREAKER`` any more, close it without a probe.
        """
        connection, breaker, known = self._connection, gate.breaker, self._known_pauses
        _, pause = known.breakers[gate.name]
        gate.probed(now)
        if breaker is None:  # the queue has lost its BREAKER since this one opened
            close_breaker(connection, gate.name)
        elif ("queue", gate.name) in known.pauses:
            return
        elif not breaker.begin_check(connection, pause):
            if breaker.is_probing or not gate.ready.idle:
                return
            if not dialect_of(connection).has_due(queue=gate.name):
                return
            if breaker.begin_probe(connection, pause) and not self._claim_probe(gate.name):
                breaker.cancel_probe()
        known.read(connection)

    def _claim_probe(self, queue: str) -> bool:
        """Claim an event or a stream of a queue; return whether there was one."""
        claims = self._claims
        if self._perform(claims.claim_rows(claims.of([Branch(queue, 1)]))).rows:
            return True
        return self._perform(claims.claim_streams({queue: 1}, scan=True))[0] > 0

    # -- suspects --------------------------------------------------------------------------------

    def _look_for_suspects(self, now: float) -> bool:
        """Enter the quarantine if a suspect is due and no other worker is in it."""
        self._scan_at = now + self.settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
        self._wakeup.suspect_waits = bool(self._suspects())
        if not (self._wakeup.suspect_waits and self._quarantine.enter()):
            return False
        for gate in self._gates:
            self._give_back(gate, gate.waiting(), now)
        return True

    def _suspects(self) -> list[tuple[Table, str]]:
        """Return the tables and queues in which suspects are due."""
        queues = [each.name for each in self._gates if not each.closed]
        dialect = dialect_of(self._connection)
        return dialect.suspects(me=self.me, queues=queues, limit=MAX_SCANNED) if queues else []

    def _run_suspects(self, now: float) -> float:
        """Run one suspect after another, each once nothing else runs; then claim as before."""
        if [each for each in self._gates if each.leave_offers()]:
            doorbell.ring(self._connection)
        suspect = self._runs.suspect()
        if suspect is not None and suspect.read_at <= now:
            self._quarantine.go_on()
            self._perform(self._claims.reads.read([suspect], 1))
        elif suspect is not None or not self.held.wait_empty(0.05):
            if not self._quarantine.lasts_too_long:
                return 0.01
            self._quarantine.give_up()
            self._poll_all()
        elif not (self._quarantine.go_on() and self._claim_suspect()):
            self._quarantine.leave()
            self._scans.after(now, least=SCAN_AGAIN)  # one may be locked, or left to others
            self._poll_all()
        return 0.0

    def _claim_suspect(self) -> bool:
        """Lease the suspect that is due first in one queue and table; return if there was one."""
        return any(
            self._perform(self._claims.claim_suspect(table, queue))
            for table, queue in self._suspects()
        )

    def _poll_all(self) -> None:
        for gate in self._gates:
            gate.poll_soon()

    def _perform(self, steps: Steps[T]) -> T:
        return perform(self._connection, steps)

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    def close(self) -> None:
        """Let another worker enter the quarantine at once. Call it in the thread of ``step``."""
        self._quarantine.leave()
