"""Others beside us: a job in a business transaction, the drain of a backlog, the latency.

All are asked in the same words (``contestants``), each in its own environment and database, with
its fastest sensible settings. One that cannot be asked is a line that says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from django.db import connection

from .contestants.roster import PEERS
from .contestants.running import Running, wait_for_lines
from .drain import WARM_UP
from .figures import Figure, percentile
from .latency import APART
from .latency import WARM_UP as FIRST
from .scale import Scale
from .witness import STEP, Witness

# The drain's bars are ours by theirs.
DRAIN_BARS = {"django-reliable-outbox": "≥ 15", "pgqueuer": "≥ 1.5"}

BLOCK = 20  # transactions of one before the next has its turn

Measure = Callable[[Running], dict[str, float]]


def run(scale: Scale, witness: Witness) -> list[Figure]:
    ours = Running(None)
    contest = Contest(ours, scale.repeats)
    try:
        contest.invite()
        contest.measure_writes(scale.transactions)
        contest.measure(lambda each: {"drain": drain(each, scale, witness)})
        contest.measure(lambda each: latency(each, scale.latencies // 3, witness))
        return contest.figures()
    finally:
        contest.close()


class Contest:
    """Rounds in which all are measured one after the other; who fails leaves."""

    def __init__(self, ours: Running, repeats: int) -> None:
        self._ours, self._repeats = ours, repeats
        self._running = [ours]
        self._failures: dict[str, str] = {}
        self._found: dict[str, dict[str, list[float]]] = {ours.name: {}}

    def invite(self) -> None:
        for peer in PEERS:
            if connection.vendor not in peer.vendors:
                self._failures[peer.name] = f"it does not run on {connection.vendor}"
                continue
            try:
                self._running.append(Running(peer))
            except Exception as error:  # noqa: BLE001 - the others go on
                self._failures[peer.name] = why(error)
            self._found[peer.name] = {}

    def measure_writes(self, transactions: int) -> None:
        """Have all write in blocks, taking turns; a round's value is the mean of its blocks."""
        self.measure(lambda each: each.ask("fill", 0) or {}, rounds=1)
        blocks = max(1, transactions // BLOCK)
        self.measure(
            lambda each: {"write": each.ask("write", BLOCK)}, rounds=blocks * (self._repeats + 1)
        )
        for values in self._found.values():
            means = [
                statistics.fmean(values["write"][start : start + blocks])
                for start in range(0, len(values.get("write", ())), blocks)
            ]
            values["write"] = means[1:]  # the first round is a warm-up

    def measure(self, measure: Measure, *, rounds: int = 0) -> None:
        for _ in range(rounds or self._repeats):
            for each in [*self._running]:
                try:
                    for name, value in measure(each).items():
                        self._found[each.name].setdefault(name, []).append(value)
                except Exception as error:
                    if each is self._ours:
                        raise
                    self._failures[each.name] = why(error)
                    self._running.remove(each)
                    each.close()

    def figures(self) -> list[Figure]:
        return [
            *self._compared(
                "write",
                "a transaction with an order and a job",
                "µs",
                dict.fromkeys(self._found, "≤ 0.75"),
            ),
            *self._compared("drain", "drain, one worker process", "jobs/s", DRAIN_BARS),
            *self._compared(
                "p50", "commit to listener, p50", "ms", dict.fromkeys(self._found, "≤ 1")
            ),
            *self._compared("p99", "commit to listener, p99", "ms", {}),
        ]

    def _compared(self, what: str, name: str, unit: str, bars: dict[str, str]) -> list[Figure]:
        ours = self._found[self._ours.name][what]
        return [
            Figure(
                name=f"{name}, compared with {peer.name}",
                unit=unit,
                bar=bars.get(peer.name, ""),
                **self._pairs(ours, peer.name, what),
            )
            for peer in PEERS
        ]

    def _pairs(self, ours: list[float], name: str, what: str) -> dict:  # type: ignore[type-arg]
        theirs = self._found.get(name, {}).get(what, [])
        if len(theirs) < len(ours):
            return {"values": [], "failure": self._failures.get(name, "it was not measured")}
        return {"values": ours, "references": theirs, "reference": name}

    def close(self) -> None:
        for each in self._running:
            each.close()


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def drain(each: Running, scale: Scale, witness: Witness) -> float:
    """Return jobs a second from the first 200 calls to the last."""
    jobs = scale.events
    if each.peer:
        jobs = max(500, int(each.peer.rate * scale.seconds) // STEP * STEP)
    each.ask("fill", jobs)
    witness.clear()
    with each.working() as worker:
        wait_for_lines(worker, witness, jobs // STEP)
    calls = witness.calls()
    return (jobs - WARM_UP) / (calls[-1] - calls[WARM_UP // STEP - 1])


def latency(each: Running, events: int, witness: Witness) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    each.ask("fill", 0)
    witness.clear()
    with each.working() as worker:
        committed = each.ask("send", 1, 1, 0)
        wait_for_lines(worker, witness, 1)
        committed += each.ask("send", 2, FIRST + events, APART)
        wait_for_lines(worker, witness, FIRST + events + 1)
    heard = dict(witness.lines())
    late = [1000 * (heard[str(number)] - at) for number, at in enumerate(committed, 1)]
    return {"p50": percentile(late[FIRST + 1 :], 50), "p99": percentile(late[FIRST + 1 :], 99)}
