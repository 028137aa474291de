"""What the witness says of the calls of batch listeners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.faults.witness import Line


@dataclass(kw_only=True)
class Call:
    """One call of a batch listener, with the events that said so."""

    since: float  # monotonic; when it began
    events: dict[str, int] = field(default_factory=dict)  # attempts before it, by event
    outcomes: dict[str, str] = field(default_factory=dict)  # "end", "failed", "shared"; by event

    def ended_well(self) -> set[str]:
        return {event_id for event_id, outcome in self.outcomes.items() if outcome == "end"}


def calls(lines: Iterable[Line]) -> list[Call]:
    """Return the calls in the order of their beginnings."""
    found: dict[tuple[int, int, float], Call] = {}
    running: dict[tuple[int, int, str], Call] = {}
    for line in lines:
        place = (line.pid, line.thread, line.id)
        if line.phase == "start" and line.since:
            call = found.setdefault((*place[:2], line.since), Call(since=line.since))
            call.events[line.id] = line.attempts
            running[place] = call
        elif (ended := running.pop(place, None)) is not None:
            ended.outcomes[line.id] = line.phase
    return sorted(found.values(), key=lambda call: call.since)


@dataclass(kw_only=True)
class Batch:
    """The calls that one delivery took: the first with all events, the others with parts."""

    calls: list[Call] = field(default_factory=list)

    @property
    def events(self) -> Mapping[str, int]:
        return self.calls[0].events

    def ended_well(self) -> set[str]:
        return {event_id for call in self.calls for event_id in call.ended_well()}


def batches(found: Iterable[Call]) -> list[Batch]:
    """Put calls together that no attempt divides; this holds only where nothing is lost."""
    by_event: dict[tuple[str, int], Batch] = {}
    made: list[Batch] = []
    for call in found:
        known = next((by_event[each] for each in call.events.items() if each in by_event), None)
        if known is None:
            known = Batch()
            made.append(known)
            by_event.update(dict.fromkeys(call.events.items(), known))
        known.calls.append(call)
    return made


def crowded(found: Iterable[Call], keys: Mapping[str, str | None], most: Mapping[str, int]) -> int:
    """Return how many calls had more events of a key than ``most`` says of that event's."""
    count = 0
    for call in found:
        seen: dict[str, int] = {}
        for event_id in call.events:
            key = keys.get(event_id)
            if key is not None:
                seen[key] = seen.get(key, 0) + 1
                if seen[key] > most.get(event_id, 1):
                    count += 1
                    break
    return count
