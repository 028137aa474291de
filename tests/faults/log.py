"""What the workers' log says of leases: events handed back, calls written off, rescues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.faults.oracle import HAND_BACK, WRITE_OFF, Fault, Rescue

LINE = re.compile(r"([\d.]+) (\d+) [A-Z]+ (.*)")
HANDED_BACK = re.compile("listener (still runs|cancelled), event handed back ")
EVENT = re.compile(r"\bevent_id=(\S+)")
LISTENER = re.compile(r"\blistener='([^']*)'")


@dataclass(frozen=True)
class Said:
    at: float  # monotonic
    pid: int
    text: str

    @property
    def event_id(self) -> str:
        found = EVENT.search(self.text)
        return found[1] if found else ""

    @property
    def listener(self) -> str:
        found = LISTENER.search(self.text)
        return found[1] if found else ""


def read(text: str) -> list[Said]:
    found = map(LINE.match, text.splitlines())
    return [Said(float(each[1]), int(each[2]), each[3]) for each in found if each]


def hand_backs(said: Iterable[Said], ended: Mapping[int, float]) -> Iterator[Fault]:
    """Yield what was handed back at a stop; each lasts until its listener had surely ended.

    That is when it was cancelled, or when its process was gone.
    """
    for line in said:
        if HANDED_BACK.match(line.text):
            gone = line.at if "cancelled" in line.text else ended.get(line.pid, line.at)
            yield _fault(HAND_BACK, line, gone)


def write_offs(said: Iterable[Said]) -> Iterator[Fault]:
    """Yield the calls that were ended by their timeout, and settled so.

    One that returned late, but before that, is reported alike; its event is not tried again.
    """
    overdue: dict[tuple[int, str], Said] = {}
    for line in said:
        place = (line.pid, line.event_id)
        if line.text.startswith("listener runs longer than its timeout "):
            overdue[place] = line
        elif ".ListenerTimeout unlogged=" in line.text and (since := overdue.pop(place, None)):
            yield _fault(WRITE_OFF, since, since.at)


def rescues(said: Iterable[Said]) -> Iterator[Rescue]:
    for line in said:
        if line.text.startswith("rescued "):
            yield Rescue(event_id=line.event_id, at=line.at, listener=line.listener)


def _fault(kind: str, line: Said, until: float) -> Fault:
    return Fault(
        kind=kind,
        at=line.at,
        until=until,
        pids=frozenset({line.pid}),
        held=frozenset({line.event_id}),
        listener=line.listener,
    )
