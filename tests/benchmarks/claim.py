"""What a claim of 500 costs beside rows that do not concern it, and beside many that do."""

from __future__ import annotations

import statistics
import time
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from django_outbox.sql import dialect_of, engine_connection
from django_outbox.sql.values import Branch, Claim
from django_outbox.worker.polling import LATE_COMMIT_MARGIN

from . import backlog
from .figures import Figure
from .scale import Scale
from .witness import Witness

EMPTY, FULL = "default", "other"  # two databases of one server, claimed from in turn
BATCH = 500
CLAIMS = 20  # a round


def run(scale: Scale, witness: Witness) -> list[Figure]:
    states: dict[str, dict[str, Any]] = {
        f"{scale.due_rows:,} due": {
            "count": scale.due_rows,
            "due": f"n * 0.001 - {backlog.AGO / 2}",
        },
        f"{scale.in_flight:,} in flight": {
            "count": scale.in_flight,
            "due": "n * 0.001 + 3600",
            "owner": "another",
        },
        f"{scale.future_rows:,} due later": {
            "count": scale.future_rows,
            "due": "n * 0.01 + 3600",
            "status": 2,
        },
        f"{scale.done_rows:,} done": {"count": scale.done_rows, "due": None, "status": 1},
    }
    return [beside(name, rows, scale.repeats) for name, rows in states.items()]


def beside(name: str, rows: dict[str, Any], repeats: int) -> Figure:
    due = (repeats + 1) * CLAIMS * BATCH  # on both sides, and more than is claimed
    for alias in (EMPTY, FULL):
        backlog.empty(alias)
        backlog.insert(due, due=f"n * 0.001 - {backlog.AGO}", text=backlog.TEXT, alias=alias)
    backlog.insert(**rows, letter="B", alias=FULL)
    for alias in (EMPTY, FULL):
        backlog.analyze(alias)
    claimants = {alias: Claimant(alias) for alias in (EMPTY, FULL)}
    found: dict[str, list[float]] = {EMPTY: [], FULL: []}
    for _ in range(repeats):
        times: dict[str, list[float]] = {EMPTY: [], FULL: []}
        for _ in range(CLAIMS):
            for alias, claimant in claimants.items():
                times[alias].append(claimant.claim())
        for alias, some in times.items():
            found[alias].append(statistics.median(some))
    for alias, claimant in claimants.items():
        claimant.connection.close()
        backlog.empty(alias)
    return Figure(
        name=f"claim of 500, {name}",
        unit="ms",
        values=found[FULL],
        references=found[EMPTY],
        reference=f"{due:,} due and nothing else",
        bar="≤ 1.25",
    )


class Claimant:
    """Claims and settles as a worker does, on one connection of the engine's."""

    def __init__(self, alias: str) -> None:
        self.connection: BaseDatabaseWrapper = engine_connection(alias, lock_wait=2)
        self._dialect = dialect_of(self.connection)
        self._since: float | None = None

    def claim(self) -> float:
        """Claim a batch and settle them; return the claim's milliseconds."""
        branch = Branch("default", BATCH, self._since)
        claim = Claim(me="benchmark", lease=30, branches=[branch])
        started = time.perf_counter()
        found = self._dialect.claim(claim)
        taken = time.perf_counter() - started
        if len(found.rows) < BATCH:
            raise RuntimeError(f"{len(found.rows)} of {BATCH} were due")
        self._since = found.found("default").waited + LATE_COMMIT_MARGIN
        self._dialect.settle_done(me="benchmark", ids=[row[0] for row in found.rows])
        return 1000 * taken
