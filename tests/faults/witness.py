"""The witness: a file to which every listener adds its lines, whatever the database does.

O_APPEND keeps the lines of many processes apart and in the order of their writing; monotonic time
is the same in every process of the machine, however wrong its clock is set.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import django_outbox as outbox
from tests.faults import clock

VARIABLE = "FAULTS_WITNESS"  # the environment variable with the file's path


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    id: str
    attempts: int  # executions before this one, as the listener was told
    phase: str  # "start", "end", "failed", "deferred"
    pid: int
    thread: int
    at: float  # monotonic
    source: str = ""  # "hot" or "cold"
    listener: str = ""  # its title
    since: float = 0.0  # monotonic; of a batch: when its call began


def testify(event: outbox.Event, phase: str) -> None:
    say(event, phase, 0.0)


def say(event: outbox.Event, phase: str, since: float) -> None:
    """Testify to a phase; ``since`` is when the call of a batch began."""
    say_all([event], phase, since)


def say_all(events: Sequence[outbox.Event], phase: str, since: float = 0.0) -> None:
    """Testify to the same phase of several events at once."""
    found = "".join(json.dumps(_line(each, phase, since)) + "\n" for each in events)
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, found.encode())
    finally:
        os.close(file)


def _line(event: outbox.Event, phase: str, since: float) -> dict[str, object]:
    return {
        "id": event.event_id,
        "attempts": event.attempts,
        "phase": phase,
        "pid": os.getpid(),
        "thread": threading.get_ident(),
        "at": clock.now(),
        "source": event.source,
        "listener": event.listener,
        "since": since,
    }


def healed(path: Path) -> Path:
    """The file whose existence heals events that are ill."""
    return path.with_suffix(".healed")


def troubled(path: Path) -> Path:
    """The file that says what a troubled listener does: fails, hangs or dies."""
    return path.with_suffix(".trouble")


def heard(path: Path, offset: int = 0) -> list[Line]:
    """Return the whole lines that begin at the offset or later.

    A line that is being written grows by pages: the file's last one may be there only in part, and
    a size of the file may lie within a line.
    """
    with path.open() as file:
        if offset:
            file.seek(offset - 1)
            file.readline()  # the rest of a line that began before
        return [Line(**json.loads(text)) for text in file if text.endswith("\n")]


def running(lines: Iterable[Line]) -> dict[str, int]:
    """Return the process in which each event runs that has begun and not ended."""
    found: dict[str, int] = {}
    for line in lines:
        if line.phase == "start":
            found[line.id] = line.pid
        elif found.get(line.id) == line.pid:
            del found[line.id]
    return found
