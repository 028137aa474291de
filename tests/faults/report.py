"""``python -m tests.faults.report FILE…``: put the lines of runs into the documentation.

The lines are kept next to the page: the latest of each scenario, database and size, and of each
mutant. The marked blocks of ``PAGES`` are rendered from them. A kept line stays until a later run
of the same scenario replaces it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import django

from tests.faults.kept import (
    CLUSTERS,
    COUNTED,
    DATABASES,
    NAMES,
    SOAKS,
    WITH_FAULTS,
    Line,
    events_of,
    grouped,
    largest,
    latest,
    read,
    runs,
    struck,
)
from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
KEPT = PAGE.with_suffix(".jsonl")
CLUSTER = ROOT / "docs" / "how-to" / "run-on-a-cluster.md"
PAGES = (PAGE, ROOT / "docs" / "index.md", CLUSTER, ROOT / "README.md")
BLOCK = re.compile(r"(<!-- faults: (\w+) -->\n).*?(<!-- end of faults -->)", re.DOTALL)
FAULTS = {
    "pause": "SIGSTOP",
    "restart fast": "server restart",
    "restart immediate": "server crash",
    "restart kill": "server kill",
    "terminate": "all sessions ended",
    "suspend": "suspension",
    "worn out": "all threads hung",
    "misplace": "rows in wrong queues",
    "take over": "leases taken over",
}

# Which faults are counted together, in a reader's words.
BROKEN = {
    "workers killed (SIGKILL), or crashed by an event": ("kill", "crash"),
    "workers frozen for longer than their lease (SIGSTOP)": ("pause", "suspend"),
    "workers stopped under load (SIGTERM)": ("SIGTERM", "second SIGTERM"),
    "all threads of a worker hung": ("worn out",),
    "leases taken over, rows moved to wrong queues": ("take over", "misplace"),
    "database servers killed, crashed or restarted": (
        "restart fast",
        "restart immediate",
        "restart kill",
    ),
    "all database sessions ended at once": ("terminate",),
    "connections cut, or silent without an error": ("cut", "silence"),
    "brokers killed, stopped, full or refusing": (
        "broker kill",
        "broker stop",
        "full",
        "no place",
        "queue full",
        "stream full",
    ),
    "services that listeners call unavailable": ("receiver away",),
}

# What new readers ask about first; the record has all of them.
ASKED = ("kill", "restart", "poison", "ordered")


def main(paths: Iterable[Path]) -> None:
    lines = [*read(KEPT)] if KEPT.exists() else []
    for path in paths:
        lines += read(path)
    lines = latest(lines)
    KEPT.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for page in PAGES:
        page.write_text(filled(page.read_text(), lines))


def filled(text: str, lines: Sequence[Line]) -> str:
    """Return a page whose marked blocks are what the lines say."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](lines) + found[3], text)


# --- the blocks ---------------------------------------------------------------------------------


def shortlist(lines: Sequence[Line]) -> str:
    """The scenarios that readers ask about first, a row each, with the result on each database."""
    rows = []
    found = largest(lines)
    databases = [name for name in DATABASES if any(name == line["db"] for line in runs(lines))]
    for scenario, title in titles(found).items():
        if scenario not in ASKED:
            continue
        cells = [found.get((scenario, database)) for database in databases]
        rows.append([title, *(brief(each) if each else "" for each in cells)])
    head = [DATABASES[name] for name in databases]
    return table(["", *head], rows)


def promises(lines: Sequence[Line]) -> str:
    """What is promised, each with what all runs have counted against it."""
    groups = grouped(lines)
    every = [line for found in groups.values() for line in found]
    wrong = {name: sum(each[name] for each in every) for name in COUNTED}
    counted = {name: f"{count} {COUNTED[name]}" for name, count in wrong.items()}
    broken = groups.get(WITH_FAULTS, [])
    said = [
        (
            f"**No event is lost.** In {len(broken)} runs we wrote {events_of(broken):,} events, "
            f"and caused {sum(map(struck, broken)):,} faults, such as killed workers and crashed "
            f"database servers: {counted['lost']}, {counted['stuck']}."
        ),
        (
            "**No event without its transaction.** What was rolled back is never delivered: "
            f"{counted['ghosts']}."
        ),
        (
            "**An event repeats only after a fault**, with the same id: "
            f"{counted['unexplained']}, {counted['overlaps']}."
        ),
        (
            "**Events with one key arrive in order**, across workers, retries and crashes: "
            f"{counted['inversions']}."
        ),
    ]
    more = [f"- {each}\n" for each in filter(None, [missed_by(every)])]
    return "".join([*(f"- {each}\n" for each in said), *more])


def outcome(lines: Sequence[Line]) -> str:
    """The same sums as a table, and the repeats."""
    rows = [
        [
            title,
            str(len(found)),
            f"{sum(map(struck, found)):,}" if title == WITH_FAULTS else "–",
            f"{events_of(found):,}",
            f"{sum(each['repeats'] for each in found):,}",
            *(f"{sum(each[name] for each in found):,}" for name in COUNTED),
        ]
        for title, found in grouped(lines).items()
    ]
    head = ["", "runs", "faults", "events", "repeats", *COUNTED.values()]
    every = [*largest(lines).values()]
    said = " ".join(filter(None, [size_of(every), missed_by(every)]))
    return table(head, rows) + f"\n{said}\n" * bool(said)


def broken(lines: Sequence[Line]) -> str:
    """What was broken, and how often on each database; soaks are left out."""
    found = [line for line in largest(lines).values() if line["scenario"] not in SOAKS]
    databases = [name for name in NAMES if any(name == line["db"] for line in found)]
    rows = []
    for title, kinds in BROKEN.items():
        counts = [
            sum(
                line["faults"].get(kind, 0)
                for line in found
                if line["db"] == database
                for kind in kinds
            )
            for database in databases
        ]
        rows.append([title, *(f"{count:,}" if count else "–" for count in counts)])
    return table(["", *(NAMES[name] for name in databases)], rows)


def small(lines: Sequence[Line]) -> str:
    """Which scenarios have no run at full size, by database; the others if those are fewer."""
    said = []
    for database, title in NAMES.items():
        found = {
            scenario: line["size"]
            for (scenario, db), line in largest(lines).items()
            if db == database
        }
        few = [f"`{scenario}`" for scenario, size in found.items() if size != "full"]
        full = [f"`{scenario}`" for scenario, size in found.items() if size == "full"]
        if few:
            names = (
                f"all runs except {', '.join(full)}" if 0 < len(full) < len(few) else ", ".join(few)
            )
            said.append(f"- {title}: {names}\n")
    return "".join(said)


def clusters(lines: Sequence[Line]) -> str:
    """What was done to clusters, and what became of the events."""
    rows = [
        [
            f"{NAMES[line['db']]}: {line['title'][0].lower()}{line['title'][1:]}",
            f"{struck(line)}",
            f"{line['events']:,}",
            f"{line['repeats']:,}",
            f"{sum(line[name] for name in COUNTED):,}",
            f"{line['figures'][0]['value']:.1f} s",
        ]
        for line in largest(lines).values()
        if line["db"] in CLUSTERS
    ]
    wrong = "lost, out of order, repeated without a cause"
    return table(["", "times", "events", "repeats", wrong, "longest until a delivery"], rows)


def noticed(lines: Sequence[Line]) -> str:
    """How many modified workers the harness has told from the real one."""
    made = {line["mutant"]: line["caught"] for line in lines if "mutant" in line}
    new = [f"`{each.name}`" for each in MUTANTS if each.name not in made]
    without = f" Not run yet: {', '.join(new)}." * bool(new)
    return f"{sum(made.values())} of {len(made)} modified copies were caught.{without}\n"


BLOCKS: dict[str, Callable[[Sequence[Line]], str]] = {
    each.__name__: each for each in (shortlist, promises, outcome, broken, small, clusters, noticed)
}


# --- what the blocks consist of -----------------------------------------------------------------


def size_of(found: Sequence[Line]) -> str:
    """Say so if not everything was run at full size."""
    small = sum(line["size"] != "full" for line in found)
    if not small:
        return ""
    those = "All" if small == len(found) else str(small)
    return f"{those} of these {len(found)} runs have the small size that every change must pass."


def missed_by(found: Sequence[Line]) -> str:
    """Name the runs that missed a target, which need not be one of the ``COUNTED``."""
    those = [f"{line['scenario']} on {NAMES[line['db']]}" for line in found if not line["holds"]]
    count = f"{len(those)} of {len(found)} runs"
    return f"**{count} missed a target: {', '.join(those)}.**" * bool(those)


def titles(found: dict[tuple[str, str], Line]) -> dict[str, str]:
    """Return what each scenario does: by its docstring today, or as its line says."""
    from tests.faults.scenarios import SCENARIOS

    return {
        name: SCENARIOS[name].title if name in SCENARIOS else line["title"]
        for (name, _), line in found.items()
    }


def brief(line: Line) -> str:
    what = [f"{line['events']:,} events" * bool(line["events"]), faults_of(line)]
    if not line["events"]:
        what = [f"{each['value']:,} {each['name']}" for each in line["figures"][:1]]
    wrong = [f"**{line[name]} {title}**" for name, title in COUNTED.items() if line[name]]
    return ", ".join(filter(None, what)) + ": " + (", ".join(wrong) or verdict(line))


def verdict(line: Line) -> str:
    """Return the result of a run in which nothing that is counted went wrong."""
    if line.get("error"):
        return "**it was not completed**"
    missed = [
        f"{each['name']} {each['value']:.3g}, target {bar(each)}"
        for each in line["figures"]
        if not each["holds"]
    ]
    return "; ".join(["0 lost, nothing unexplained", *(f"**missed: {each}**" for each in missed)])


def faults_of(line: Line) -> str:
    found = line["faults"].items()
    return ", ".join(f"{count} × {FAULTS.get(kind, kind)}" for kind, count in found)


def bar(figure: Line) -> str:
    bars = [("≤", figure["most"]), ("≥", figure["least"])]
    return " and ".join(f"{sign} {value:g}" for sign, value in bars if value is not None)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    os.environ.setdefault("OUTBOX_TEST_DB", "sqlite")  # the scenarios are named, none is run
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.faults.settings")
    django.setup()
    main(map(Path, sys.argv[1:]))
