"""What became of slots (``coalesce=``), judged: writes that no later delivery makes up for.

Each committed write is followed by a delivery in its slot that starts after the commit, and whose
event is not older: its transaction had not come to its commit when the write began.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.oracle import Evidence, Intent, Run, Verdict

KIND = "slot"  # of events whose key is a slot
SHORT = 0.25  # of the delay: a transaction that was open for longer may be delivered by itself
SLACK = 1.25  # of the deliveries that fit into the time: some threads start late


def by_slot(evidence: Evidence) -> dict[str, list[Intent]]:
    found: defaultdict[str, list[Intent]] = defaultdict(list)
    for intent in evidence.intents.values():
        if intent.kind == KIND:
            found[intent.key or ""].append(intent)
    return found


def judge(evidence: Evidence, runs: Mapping[str, Sequence[Run]], verdict: Verdict) -> None:
    for slot, intents in by_slot(evidence).items():
        delivered = sorted(
            (run.start, intent.at)
            for intent in intents
            for run in runs.get(intent.event_id, ())
            if run.outcome == "end"
        )
        starts = [start for start, _ in delivered]
        # The latest commit of what was delivered there or later.
        latest = [*accumulate((at for _, at in reversed(delivered)), max)][::-1]
        for intent in intents:
            after = bisect_right(starts, intent.at)
            if after == len(starts) or latest[after] < intent.begun:
                verdict.count("lost", f"{slot}: {intent}, nothing as new was delivered after it")


def above_share(
    evidence: Evidence, runs: Mapping[str, Sequence[Run]], delay: float, strikes: int
) -> float:
    """Return by how many deliveries a slot exceeds its share: one each ``delay`` seconds.

    Each fault may add two: what a worker had leased is found again, beside what is newer. What
    committed late may add one: it was due when others had been delivered already.
    """
    excess = []
    for intents in by_slot(evidence).values():
        starts = [run.start for each in intents for run in runs.get(each.event_id, ())]
        span = max(starts) - min(each.begun for each in intents)
        late = sum(each.at - each.begun > SHORT * delay for each in intents)
        excess.append(len(starts) - (SLACK * span / delay + 2 + 2 * strikes + late))
    return max(excess)
