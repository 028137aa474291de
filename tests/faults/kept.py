"""The kept lines of fault runs: read them, choose the ones that count, and add them up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

DATABASES = {"postgres": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}
CLUSTERS = {
    "pair": "PostgreSQL with a standby",
    "galera": "MariaDB Galera",
    "group": "MySQL Group Replication",
}
NAMES = DATABASES | CLUSTERS
COUNTED = {
    "lost": "lost",
    "ghosts": "ghosts",
    "unexplained": "unexplained repeats",
    "overlaps": "overlaps",
    "inversions": "out of order",
    "stuck": "stuck",
    "false_dead": "dead without cause",
    "booked_twice": "duplicate rows",
}

SOAKS = ("leaks", "bloat")  # many events under a steady load; a sum with them would mislead
WITH_FAULTS, WITHOUT_FAULTS, OF_SOAKS = "runs with faults", "runs without faults", "soak runs"


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def latest(lines: Iterable[Line]) -> list[Line]:
    """Return the last line of each run that was made more than once, in the order of the first."""
    return [*{_what(line): line for line in lines}.values()]


def _what(line: Line) -> tuple[str, ...]:
    if "mutant" in line:
        return ("mutant", line["mutant"])
    return (line["scenario"], line["db"], line["size"])


def runs(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if "mutant" not in line]


def largest(lines: Sequence[Line]) -> dict[tuple[str, str], Line]:
    """Return the run of each scenario and database; one at full size where there is one."""
    found: dict[tuple[str, str], Line] = {}
    for line in sorted(runs(lines), key=lambda each: each["size"] == "full"):
        found[line["scenario"], line["db"]] = line
    return found


def grouped(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return the runs with faults, those without, and soaks; leave out a group without runs."""
    found: dict[str, list[Line]] = {WITH_FAULTS: [], WITHOUT_FAULTS: [], OF_SOAKS: []}
    for line in largest(lines).values():
        other = WITH_FAULTS if struck(line) else WITHOUT_FAULTS
        found[OF_SOAKS if line["scenario"] in SOAKS else other].append(line)
    return {title: those for title, those in found.items() if those}


def events_of(found: Sequence[Line]) -> int:
    return sum(each["events"] for each in found)


def struck(line: Line) -> int:
    return sum(line["faults"].values())
