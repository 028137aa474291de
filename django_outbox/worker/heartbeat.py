"""The heartbeat: renews a worker's leases, writes its row and statistics, gives back at a stop."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import django
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..delivery.lease import Lease
from ..listeners.outcomes import Decision
from ..listeners.queues import published
from ..log import first_line
from ..models import OutboxStatistics, OutboxWorker, live_workers, write_statistics
from ..models.fields import DatabaseNow
from ..models.statistics import COUNTS, OUTCOMES, RUN_COLUMNS, WAIT_COLUMNS, bucket
from ..sql import dialect_of
from ..sql.values import EVENTS, STREAMS
from .effects import Steps, Wait, ask, in_turn
from .gate import Gate, Gates
from .leases import AT_ONCE, LOCKED_RETRY_TIME, Releases

logger = logging.getLogger("django_outbox")

COUNT_INTERVAL = 1.0  # seconds between two counts of workers, while a queue has a rate
MAX_RUNNING = 5  # running events that the row lists, at most
LOST_AFTER = 10  # leases without a heartbeat until the row of a lost worker may be removed
LOST_KEPT_FOR = timedelta(days=1)  # for which rows of lost workers stay, so that users see them
MAX_LOST = 100  # rows of lost workers that stay, those with the latest heartbeats
MAX_REMOVED = 1000  # rows of lost workers that are removed at once
WRITE_INTERVAL = 10.0  # seconds between two writes, at least; a killed worker loses no more
MAX_LISTENERS = 20  # that get rows of their own in one minute; all others share one

RESCUED, RUN_MS = COUNTS.index("rescued"), COUNTS.index("run_ms")
WAIT, RUN = COUNTS.index(WAIT_COLUMNS[0]), COUNTS.index(RUN_COLUMNS[0])
PLACES = {name: place for place, name in enumerate(OUTCOMES)}

Counts = dict[str, list[int]]  # by title of the listener, in the order of ``COUNTS``


def renew(releases: Releases) -> Steps[float]:
    """Renew leases older than a third of their length; return the seconds until the next step.

    A step comes every sixth of that length, so that a new lease never gets near its deadline.
    """
    started, held = monotonic(), releases.held
    runs = held.to_renew(started)
    parts = [runs[at : at + AT_ONCE] for at in range(0, len(runs), AT_ONCE)]
    yield from in_turn(*map(releases.renew, parts))
    return max(held.lease / 6 - (monotonic() - started), 0.001)


class Heartbeat:
    """Renews leases, shows in a row that the worker is alive, and writes its statistics.

    Correctness does not depend on the row. It is made anew if it was removed.

    It gives leases back once the worker stops, because its thread exists already: no thread can be
    started at the interpreter's exit. A database that does not answer must not block who stops it.
    """

    def __init__(self, *, releases: Releases, statistics: Statistics, gates: Gates) -> None:
        self._releases, self._held, self._gates = releases, releases.held, gates
        self._statistics = statistics
        self._limited = [each for each in gates if each.rate is not None]
        self._show_at = self._count_at = 0.0  # monotonic
        self._stopping = False  # set by ``begin_stop``
        self._due_after: float | None = None  # set by ``hand_back_in``
        self.released, self.handed_back = 0, 0  # so far; only its thread changes them
        self._info: dict[str, Any] = {
            "mode": releases.settings.MODE,
            "queues": sorted(gates.by_queue),
            "django": django.get_version(),
            "python": sys.version.split()[0],
        }

    def step(self) -> Steps[float]:
        started = monotonic()
        yield from in_turn(
            renew(self._releases),
            self._show(started),
            self._statistics.write_if_due(),
            self._release(),
        )
        count = COUNT_INTERVAL if self._limited else WRITE_INTERVAL
        pause = min(self._held.lease / 6, WRITE_INTERVAL, count)
        return max(pause - (monotonic() - started), 0.001)

    def begin_stop(self) -> None:
        """Release unstarted events at each step from now on. Any thread may call it."""
        self._info["stopping"] = True  # so that its row is not missed if it is killed
        self._show_at, self._stopping = 0.0, True

    def hand_back_in(self, seconds: float | None) -> None:
        """Have ``close`` make due in so many seconds what still runs; None: when its lease ends."""
        self._due_after = seconds

    def close(self) -> Steps[None]:
        """Write the last statistics, remove the worker's row, give back what is left."""
        yield from in_turn(
            self._statistics.write(), self._remove(), self._release(), self._hand_back()
        )

    # -- the worker's row ------------------------------------------------------------------------

    def _show(self, now: float) -> Steps[None]:
        """Show that the worker is alive, and adapt to the others.

        Streams are released for workers that have fewer; those that none claims come back.
        """
        if now >= self._show_at:
            yield self._update
            self._show_at = now + self._held.lease / 3
            others = yield from self._share_rates()
            self._gates.others = len(others)
            self._releases.runs.leave_surplus([each["streams"] for each in others])
            yield from self._releases.runs.release_ended()
        elif self._limited and now >= self._count_at:
            yield from self._share_rates()

    def _share_rates(self) -> Steps[list[dict[str, Any]]]:
        """Divide the rates of queues by the live workers that serve them; return the others."""
        others: list[dict[str, Any]] = yield self._others
        self._count_at = monotonic() + COUNT_INTERVAL
        for gate in self._limited:
            assert gate.rate is not None
            gate.rate.set_workers(1 + sum(gate.name in each["queues"] for each in others))
        return others

    def _update(self, connection: BaseDatabaseWrapper) -> None:
        rows = OutboxWorker.objects.using(connection.alias)
        leases: dict[str, Any] = {"held": len(self._held), "streams": len(self._releases.runs)}
        leases["threads"] = {each.name: self._threads(each) for each in self._gates}
        if self._gates.wakeup.suspect_waits:
            leases["suspect_waits"] = True
        info = json.dumps({**self._info, **published(), **leases, "running": self._running()})
        if not rows.filter(pk=self._releases.me).update(heartbeat_at=DatabaseNow(), info=info):
            worker = OutboxWorker(
                id=self._releases.me,
                hostname=socket.gethostname()[:255],
                pid=os.getpid(),
                started_at=DatabaseNow(),
                heartbeat_at=DatabaseNow(),
                info=info,
            )
            rows.bulk_create([worker])  # a plain save would read the times, from Django 6.0 on
        self._remove_lost(connection)

    def _remove_lost(self, connection: BaseDatabaseWrapper) -> None:
        """Delete the rows of workers lost a day ago, and the oldest of more than ``MAX_LOST``."""
        now, rows = dialect_of(connection).clock(), OutboxWorker.objects.using(connection.alias)
        silent, oldest = now - timedelta(seconds=LOST_AFTER * self._held.lease), now - LOST_KEPT_FOR
        lost = rows.filter(heartbeat_at__lt=silent).order_by("-heartbeat_at", "pk")
        found = lost.values_list("pk", "heartbeat_at")[: MAX_LOST + MAX_REMOVED]
        if gone := [pk for place, (pk, at) in enumerate(found) if place >= MAX_LOST or at < oldest]:
            rows.filter(pk__in=gone).delete()

    def _others(self, connection: BaseDatabaseWrapper) -> list[dict[str, Any]]:
        """Return what the rows of the other live workers say; standbys do not count."""
        if self._releases.settings.MODE == "single_node":
            return []
        return live_workers(connection.alias, but=self._releases.me)

    def _running(self) -> list[dict[str, Any]]:
        """Return the events that have run longest, so that users see where a worker hangs."""
        now = monotonic()
        longest = sorted(self._held.running(), key=lambda each: each.started_at)[:MAX_RUNNING]
        return [
            {
                "event_type": each.event_type,
                "id": each.id,
                "seconds": round(now - each.started_at, 1),
            }
            for each in longest
        ]

    def _threads(self, gate: Gate) -> tuple[int, int]:
        """Return how many threads of a queue are busy, and how many it has."""
        threads = gate.settings.WORKERS
        running = sum(each.queue == gate.name for each in self._held.running())
        return min(running, max(threads - gate.ready.idle, 0)), threads

    def _remove(self) -> Steps[None]:
        rows = OutboxWorker.objects.filter(pk=self._releases.me)
        yield lambda connection: rows.using(connection.alias).delete()

    # -- a stop ----------------------------------------------------------------------------------

    def _release(self) -> Steps[None]:
        """During a stop, release what has not started."""
        if not self._stopping:
            return
        rows, _ = yield from self._releases.give_back(self._held.of(EVENTS))
        count = len(rows) + (yield from self._releases.release_streams())
        self.released += count
        if count:
            yield doorbell.ring

    def _hand_back(self) -> Steps[None]:
        running = self._held.running()
        for lease in running:
            logger.warning(
                "listener still runs, event handed back "
                "event_id=%s event_type=%s listener=%r seconds=%.1f",
                *lease.named,
                monotonic() - lease.started_at,
            )
        self.handed_back = len(running)
        wanted = len(self._held.of(EVENTS)) + len(self._held.of(STREAMS))
        until = monotonic() + LOCKED_RETRY_TIME
        while wanted > 0:
            wanted -= yield from self._releases.hand_back(self._due_after)
            if monotonic() > until:
                break
            yield Wait(0.01 if wanted > 0 else 0)
        self._held.drop(running)


class Statistics:
    """The settler's thread adds counts to a small dict; the heartbeat's thread writes them."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._settled = deque[Counts]()  # of each settle
        # All that follow are the heartbeat's.
        self._new: Counts = {}  # not written yet
        self._minute: datetime | None = None  # of the last write
        self._rows: Counts = {}  # of that minute, as stored
        self._write_at = 0.0  # monotonic
        self.failures = 0  # consecutive

    def add(self, settled: Iterable[tuple[Lease, Decision]]) -> None:
        """Count what was just settled."""
        found: Counts = {}
        for lease, decision in settled:
            place = PLACES.get(decision.outcome)
            if place is None:  # it was not delivered, or not for good
                continue
            title = lease.listener or lease.event_type
            counts = found.get(title)
            if counts is None:
                counts = found[title] = [0] * len(COUNTS)
            counts[place] += 1
            if lease.rescued:
                counts[RESCUED] += 1
            if lease.started_at:  # an event that is dead for its lost workers was not started
                counts[WAIT + bucket(lease.lag + lease.waited)] += 1
                counts[RUN + bucket(lease.duration)] += 1
                counts[RUN_MS] += round(lease.duration * 1000)
        if found:
            self._settled.append(found)

    def write_if_due(self) -> Steps[None]:
        """Write, if it is time; what cannot be written now is written next time."""
        if monotonic() >= self._write_at:
            yield from self.write()

    def write(self) -> Steps[None]:
        """Write the counts into the present minute; an error is logged and has no other effect."""
        self._write_at = monotonic() + WRITE_INTERVAL
        while self._settled:
            _add(self._new, self._settled.popleft())
        if not self._new:
            return
        try:
            minute: datetime = (yield ask("clock")).replace(second=0, microsecond=0)
            rows = _limited(self._rows if minute == self._minute else {}, self._new)
            yield partial(_store, minute=minute, owner=self._me, rows=rows)
            self._minute, self._rows, self._new, self.failures = minute, rows, {}, 0
        except Exception as error:  # noqa: BLE001 - counts are not worth more
            self.failures += 1
            if self.failures & (self.failures - 1) == 0:  # 1, 2, 4, 8 …
                logger.warning(
                    "statistics could not be updated; events are not affected error=%s times=%d",
                    first_line(error),
                    self.failures,
                )
            yield lambda connection: connection.close()  # the next query opens a new session


def _add(counts: Counts, more: Mapping[str, list[int]]) -> None:
    for title, new in more.items():
        old = counts.get(title, [0] * len(new))
        counts[title] = [one + other for one, other in zip(old, new, strict=True)]


def _limited(rows: Counts, new: Counts) -> Counts:
    """Return rows with new counts added; frequent listeners get rows of their own first."""
    rows = {**rows}
    for title in sorted(new, key=lambda each: (-sum(new[each][: len(OUTCOMES)]), each)):
        named = title in rows or len(rows.keys() - {""}) < MAX_LISTENERS
        _add(rows, {title if named else "": new[title]})
    return rows


def _store(connection: BaseDatabaseWrapper, *, minute: datetime, owner: str, rows: Counts) -> None:
    made = [
        OutboxStatistics(
            started_at=minute,
            owner=owner,
            listener=title,
            **dict(zip(COUNTS, rows[title], strict=True)),
        )
        for title in sorted(rows)
    ]
    write_statistics(connection.alias, made)
