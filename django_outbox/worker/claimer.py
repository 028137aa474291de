"""The claimer: leases what the hot queues offer and what is due; suspects in quarantine."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from math import inf
from typing import Final

from .. import doorbell
from ..clocks import monotonic
from ..setting_rules import CENTURY
from ..sql.values import EVENTS, Branch, Table
from .claims import SMALL_CLAIM, Claims
from .effects import Steps, Wait, ask
from .gate import Gate, Gates
from .leases import Leader, Releases
from .pauses import READ_INTERVAL
from .polling import ClaimThrottle, Throttle
from .ready import Offer

STREAMS_INTERVAL = 0.05  # seconds between claims of streams while other events wait
SCAN_AGAIN = 1.0  # seconds after a quarantine until suspects are looked for again
QUESTION_FACTOR = 10.0  # the question what is due pauses that many times as long as it takes
QUARANTINE: Final = "quarantine"  # of the lease
MAX_SCANNED = 2000  # rows due first of a queue in which suspects are looked for
MAX_WAIT = 5.0  # seconds for which one stays in quarantine while something else runs
PROBATION = 3.0  # seconds; a process that has settled nothing may be doomed for so long
# Seconds until the next try after what ran did not end in time: at first, and at most. If it never
# ends, claims rest for a twentieth of the time, and less and less.
RETRY_WAITS = (100.0, 3600.0)


class Claimer:
    """Asks the gates of the queues, and claims what they have room for. One thread only."""

    def __init__(
        self,
        *,
        gates: Gates,
        claims: Claims,
        releases: Releases,
        settled: Callable[[], int],
        may_claim: Callable[[], bool],
    ) -> None:
        """``settled`` returns how many events this worker has settled."""
        settings = self._settings = releases.settings
        self._held, self._runs, self._wakeup = releases.held, releases.runs, gates.wakeup
        self._releases = releases
        self._gates, self._claims = gates, claims
        self._quarantine = Quarantine(gates, claims, releases, settled)
        self.close = self._quarantine.leave  # lets another worker enter it at once
        self._known_pauses = claims.known_pauses
        self._may_claim = may_claim  # False on the standby of single_node
        hot, cold = settings.FAIRNESS
        self._turns = cycle([True] * hot + [False] * cold)  # True: hot
        self._throttle = ClaimThrottle()
        self._scans, self._questions = Throttle(), Throttle(QUESTION_FACTOR)
        self._more_events = False  # more rows were due than the last claim of events took
        self._streams_wait = False  # the last claim of streams found events
        # Monotonic; the next full scan and the next claim of streams during a backlog.
        self._scan_at = self._streams_at = 0.0
        self._has_claimed = False  # since the last question
        self._poll_until = inf  # monotonic; when it is polled though nothing falls due

    def step(self) -> Steps[float]:
        """Make one claim, if there is room and reason; return the seconds to wait."""
        if not self._may_claim():
            return min(self._settings.PROBE_INTERVAL, self._settings.POLL_INTERVAL)
        yield from self._known_pauses.refresh(notified=self._wakeup.poll_wanted)
        now = monotonic()
        if self._quarantine.is_on:
            return (yield from self._run_suspects(now))
        for gate in self._gates:
            if (yield from gate.breaker.follow(is_idle=gate.ready.idle > 0)):
                yield from self._claim_probe(gate)
            if late := gate.to_release(now):
                rows, _ = yield from self._releases.give_back(late)
                gate.released(rows, monotonic())
        open_ones = [each for each in self._gates if each.room(now)]
        if any(each.has_left_offers for each in self._gates):
            self._wakeup.want_poll()  # perhaps no other worker runs
            yield doorbell.ring
        if open_ones and (yield from self._claim(open_ones, now)):
            return 0.0
        return max(self._wait_until(open_ones, now) - monotonic(), 0.001)

    def _run_suspects(self, now: float) -> Steps[float]:
        wait = yield from self._quarantine.step()
        if not self._quarantine.is_on:
            self._scans.after(now, least=SCAN_AGAIN)  # one may be locked, or left to others
            self._poll_all()
        return wait

    def _claim_probe(self, gate: Gate) -> Steps[None]:
        """Claim an event or a stream of a queue whose breaker is open."""
        claims, queue = self._claims, gate.name
        if (yield from claims.claim_rows(claims.of([Branch(queue, 1)]))).rows:
            return
        if not (yield from claims.claim_streams({queue: 1}, scan=True))[0]:
            gate.breaker.cancel_probe()

    def _wait_until(self, open_ones: list[Gate], now: float) -> float:
        """Return until when (monotonic) only a wakeup can bring work."""
        times = [each.again(now) for each in self._gates if not each.free]
        if open_ones:
            poll_at = min(self._wakeup.next_poll(), *(each.again(now) for each in open_ones))
            # It may be another worker's turn to poll.
            times += [max(poll_at, self._throttle.next_poll()), self._runs.next_read()]
            if len(self._held):
                times.append(now + READ_INTERVAL)
        return min(times)

    def _poll_all(self) -> None:
        for gate in self._gates:
            gate.poll_soon()

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self, open_ones: list[Gate], now: float) -> Steps[bool]:
        """Read streams, claim what was offered, or poll; return False if there is nothing to do."""
        if self._wakeup.take_due(now):
            self._poll_all()
        if self._runs.next_read() <= now:
            room = sum(each.free for each in open_ones)
            yield from self._claims.read(self._runs.to_read(now, room), room)
            return True
        is_time = now >= max(min(each.poll_at for each in open_ones), self._throttle.next_poll())
        hot = any(len(each.offers) for each in open_ones)
        if not (hot or is_time):
            return False
        if pause := self._throttle.pause():
            yield Wait(pause)
        if hot and (not is_time or next(self._turns)):
            yield from self._claim_hot(open_ones)
        else:
            has_backlog = any(each.more for each in open_ones)  # else one statement asks for all
            wanted = [each for each in open_ones if each.poll_at <= now or not has_backlog]
            resting = [each for each in wanted if not each.more]
            if resting and (yield from self._nothing_due(resting)):
                wanted = [each for each in wanted if each.more]
            if wanted:
                yield from self._claim_due(wanted)
        return True

    def _claim_hot(self, open_ones: list[Gate]) -> Steps[None]:
        offered: list[Offer] = []
        for gate in open_ones:
            offered += gate.offers.take(min(gate.free, self._settings.POLL_BATCH_SIZE))
        events = {each.id: each.event for each in offered}
        if len(events) < SMALL_CLAIM and not any(len(each.offers) for each in open_ones):
            self._throttle.count()
        try:
            yield from self._claims.claim_rows(self._claims.of(ids=[*events]), events)
        except BaseException:
            self._wakeup.want_poll()  # the offers are gone, but the table has them
            raise

    def _nothing_due(self, gates: list[Gate]) -> Steps[bool]:
        """Ask in one statement whether nothing is due; if so, have ``gates`` rest until it is.

        Return False without asking if that is throttled, or if something was reported. After a
        claim, only what has become due since is asked for: what it left is locked, or a suspect.
        """
        started, settings = monotonic(), self._settings
        if started < self._questions.until or any(each.poll_at == 0 for each in gates):
            return False
        queues, since = [each.name for each in gates], CENTURY
        if self._has_claimed:
            since = started - min(each.asked_at for each in gates) + 0.001
        due: dict[str, float] = yield ask("seconds_to_next_due", queues=queues, since=since)
        self._has_claimed = False
        self._questions.after(started)
        if min(due.values(), default=inf) <= 0:
            return False
        now, longest, margin = monotonic(), settings.POLL_INTERVAL, settings.SKIP_RECENT or inf
        if not self._wakeup.doorbell_is_reliable:  # a poll takes the place of notifications
            longest = min(longest, settings.PROBE_INTERVAL)
        longest *= random.uniform(0.8, 1.2)
        if due:  # it may be the end of a lease
            self._scan_at = min(self._scan_at, now + min(due.values()))
        for gate in gates:
            # What is too young to be claimed is old enough after ``margin``.
            pause = max(min(due.get(gate.name, inf), longest, margin), 0.001)
            gate.ended_poll(min(now + pause, self._poll_until), asked_at=started)
        self._poll_until = inf
        if since == CENTURY:
            self._wakeup.note_suspects(())
        return True

    def _claim_due(self, gates: list[Gate]) -> Steps[None]:
        now = monotonic()
        scan = now >= self._scans.until and (now >= self._scan_at or not self._more_events)
        if scan:
            self._scan_at = now + self._settings.POLL_INTERVAL * random.uniform(0.8, 1.2)
            if (yield from self._quarantine.enter()):
                return
        finished = yield from self._poll(gates, now, scan=scan)
        if scan:
            self._scans.after(now)
        if finished:
            self._throttle.count_poll(monotonic() - now, others=self._gates.others)
            until, self._has_claimed = self._runs.next_exclusion_end(), True
            self._poll_until = until if scan else min(until, self._scans.until)
        ask_at = max(self._questions.until, now)
        for gate in gates:
            gate.ended_poll(ask_at if gate.name in finished else None, asked_at=now)

    def _poll(self, gates: list[Gate], now: float, *, scan: bool) -> Steps[set[str]]:
        """Claim due events and streams; return the queues in which nothing more is due.

        A full scan finds what committed late or was locked when a claim passed it.
        """
        limits = {each.name: min(each.free, self._settings.POLL_BATCH_SIZE) for each in gates}
        branches = [
            each.branch(EVENTS, (limit + 1) // 2 if self._streams_wait else limit, scan=scan)
            for each, limit in zip(gates, limits.values(), strict=True)
        ]
        exclude = [one for each in gates for one in each.excluded]
        claim = self._claims.of(branches, exclude=exclude, skip_recent=self._settings.SKIP_RECENT)
        found = yield from self._claims.claim_rows(claim)
        for gate in gates:
            gate.polled(EVENTS, found.found(gate.name))
        more = {queue for queue, each in found.queues.items() if each.more}
        self._more_events = bool(more)
        if found.rows and not more:
            self._throttle.count()
        if more and not self._streams_wait and now < self._streams_at:
            return set()
        rooms = {each.name: max(min(each.free, limits[each.name]), 1) for each in gates}
        added, more_streams = yield from self._claims.claim_streams(rooms, scan=scan)
        self._streams_wait, self._streams_at = added > 0, now + STREAMS_INTERVAL
        return limits.keys() - more - more_streams


class Quarantine:
    """A mode in which a worker runs suspects, one at a time and nothing else.

    A row or stream is a suspect once two workers were lost with it: it may be what they died of.
    One worker at a time is in quarantine, by a named lease; the others go on. The claimer's thread
    only.
    """

    def __init__(
        self, gates: Gates, claims: Claims, releases: Releases, settled: Callable[[], int]
    ) -> None:
        self._gates, self._claims, self._releases = gates, claims, releases
        self._settled, self._wakeup = settled, gates.wakeup
        self._me, self._held, self._runs = releases.me, releases.held, releases.runs
        lease = self._held.lease
        self._leader = Leader(me=self._me, name=QUARANTINE, lease=lease)
        self._max_wait = min(lease, MAX_WAIT)
        # Not the same for all: what kills young processes would meet a suspect each time.
        self._proven_at = monotonic() + min(PROBATION, lease) * random.uniform(1.0, 1.6)
        self._since: float | None = None  # monotonic; since when one suspect is waited for
        self._not_before, self._pause = 0.0, RETRY_WAITS[0]  # the next try (monotonic); seconds
        self._wakeup.expect(self._proven_at - monotonic())

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def enter(self) -> Steps[bool]:
        """Enter it if a suspect is due, this worker may, and no other is in it; return if it did.

        A process that begins, and has settled nothing, must not count against a suspect.
        """
        now, found = monotonic(), (yield from self._due())
        self._wakeup.note_suspects(found)
        is_proven = self._settled() > 0 or now > self._proven_at
        if not (found and is_proven) or (len(self._held) and now < self._not_before):
            return False
        if not (yield self._leader.take):
            return False
        self._since = now
        for gate in self._gates:
            rows, _ = yield from self._releases.give_back(self._held.late(inf, gate.name))
            gate.released(rows, monotonic())
        return True

    def step(self) -> Steps[float]:
        """Run the next suspect once nothing else runs, or leave; return the seconds to wait."""
        if [each for each in self._gates if each.leave_offers()]:
            yield doorbell.ring
        suspect, now = self._runs.suspect(), monotonic()
        is_next = suspect is not None and suspect.read_at <= now
        if not is_next and (suspect is not None or len(self._held)):
            if self._since is not None and now - self._since > self._max_wait:
                self._not_before = now + self._pause  # later tries are less and less frequent
                self._pause = min(2 * self._pause, RETRY_WAITS[1])
                yield from self.leave()
            return 0.01
        is_alone = yield self._leader.take
        if is_next and suspect is not None:
            yield from self._claims.read([suspect], 1)
        elif not (is_alone and (yield from self._claim_one())):
            yield from self.leave()
            return 0.0
        self._since, self._pause = monotonic(), RETRY_WAITS[0]
        return 0.0

    def _claim_one(self) -> Steps[bool]:
        """Lease the suspect that is due first in one queue and table; return if there was one."""
        for table, queue in (yield from self._due()):
            if (yield from self._claims.claim_suspect(table, queue)):
                return True
        return False

    def _due(self) -> Steps[list[tuple[Table, str]]]:
        """Return the tables and queues in which suspects are due."""
        found: list[tuple[Table, str]] = []
        if queues := [each.name for each in self._gates if not each.closed]:
            found = yield ask("suspects", me=self._me, queues=queues, limit=MAX_SCANNED)
        return found

    def leave(self) -> Steps[None]:
        """Let this worker claim again, and others enter."""
        self._since = None
        yield from self._leader.release()
