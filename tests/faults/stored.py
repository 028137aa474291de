"""What a broker holds in the end, judged: what a relay lost, invented, repeated or put in disorder.

A relay sends again what was not confirmed when something struck, so a broker may hold an event more
than once. Its first copy is the one that counts for the order of a key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.oracle import Evidence, Verdict


def judge(evidence: Evidence, verdict: Verdict) -> None:
    """Count ghosts, repeats and inversions; what is lost, the oracle finds itself."""
    places: dict[str, int] = {}  # of the first copies
    for place, event_id in enumerate(evidence.stored or ()):
        places.setdefault(event_id, place)
    for event_id in places.keys() - evidence.intents.keys():
        verdict.count("ghosts", f"{event_id} is in the broker")
    verdict.runs += len(evidence.stored or ())
    verdict.repeats += repeats(evidence.stored or ())
    _judge_order(evidence, places, verdict)


def repeats(stored: Sequence[str]) -> int:
    """Return how many copies there are beside the first ones."""
    return len(stored) - len({*stored})


def _judge_order(evidence: Evidence, places: dict[str, int], verdict: Verdict) -> None:
    streams: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in evidence.rows.values():
        if row.key is not None and row.seq is not None and row.event_id in places:
            streams[row.key].append((row.seq, row.event_id))
    for key, events in streams.items():
        latest = -1
        for _, event_id in sorted(events):
            if places[event_id] < latest:
                verdict.count("inversions", f"{key}: {event_id} is stored before one before it")
            latest = max(latest, places[event_id])
