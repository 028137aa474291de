"""``python -m tests.faults.report FILE…``: put the lines of runs into the documentation.

The lines are kept beside the page, the latest of each scenario, database and size, and of each
mutant; the marked blocks of page and README are what they render to. Lines that are kept already
stay until a later run of the same replaces them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import django

from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
KEPT = PAGE.with_suffix(".jsonl")
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- faults: (\w+) -->\n).*?(<!-- end of faults -->)", re.DOTALL)
DATABASES = {"postgres": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}
COUNTED = {
    "lost": "lost", "ghosts": "ghosts", "unexplained": "unexplained repeats",
    "overlaps": "overlaps", "inversions": "out of order", "stuck": "stuck",
    "false_dead": "innocents dead", "booked_twice": "twice in the database",
}  # fmt: skip

FAULTS = {
    "pause": "SIGSTOP", "restart fast": "server restart", "restart immediate": "server crash",
    "restart kill": "server kill", "terminate": "all sessions ended", "suspend": "suspension",
    "worn out": "all threads hung", "misplace": "rows in wrong queues",
    "take over": "leases taken over",
}  # fmt: skip

NOT_RUN = "no run is published yet"

# What a first reader asks about; the page has them all.
ASKED = (
    "kill", "pause", "restart", "terminate", "poison", "ordered", "batches", "poisoned_batches",
)  # fmt: skip

Line = dict[str, Any]


def main(paths: Iterable[Path]) -> None:
    lines = [*read(KEPT)] if KEPT.exists() else []
    for path in paths:
        lines += read(path)
    lines = latest(lines)
    KEPT.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for page in (PAGE, README):
        page.write_text(filled(page.read_text(), lines))


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def latest(lines: Iterable[Line]) -> list[Line]:
    """Return the last line of each run that was made more than once, in the order of the first."""
    return [*{_what(line): line for line in lines}.values()]


def _what(line: Line) -> tuple[str, ...]:
    if "mutant" in line:
        return ("mutant", line["mutant"])
    return (line["scenario"], line["db"], line["size"])


def filled(text: str, lines: Sequence[Line]) -> str:
    """Return a page whose marked blocks are what the lines say."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](lines) + found[3], text)


# --- the blocks ---------------------------------------------------------------------------------


def shortlist(lines: Sequence[Line]) -> str:
    """What is asked first, a row each, and what came of it on each database."""
    rows = []
    found = largest(lines)
    databases = [name for name in DATABASES if any(name == line["db"] for line in runs(lines))]
    for scenario, title in titles(found).items():
        if scenario not in ASKED:
            continue
        cells = [found.get((scenario, database)) for database in databases]
        rows.append([title, *(brief(each) if each else "" for each in cells)])
    head = [DATABASES[name] for name in databases]
    return summary(lines) + "\n\n" + table(["", *head], rows)


def summary(lines: Sequence[Line]) -> str:
    """The sum of all, in one sentence."""
    found = [*largest(lines).values()]
    events, faults = sum(each["events"] for each in found), sum(map(struck, found))
    wrong = [f"{sum(each[name] for each in found)} {title}" for name, title in COUNTED.items()]
    said = [f"{events:,} events, {faults:,} faults: {', '.join(wrong)}.", size_of(found)]
    return " ".join(filter(None, [*said, missed_by(found)]))


def counted(lines: Sequence[Line]) -> str:
    """Every run: what was done, how often, and everything that the oracle counts."""
    rows = [
        [DATABASES[line["db"]], line["scenario"], line["size"], faults_of(line),
         f"{line['events']:,}", f"{line['runs']:,}", f"{line['repeats']:,}", f"{line['dead']:,}",
         *(str(line[name]) for name in COUNTED), "yes" if line["holds"] else "**no**"]
        for line in runs(lines)
    ]  # fmt: skip
    head = ["database", "scenario", "size", "faults", "events", "runs", "repeats", "dead"]
    return table([*head, *COUNTED.values(), "holds"], rows)


def figures(lines: Sequence[Line]) -> str:
    """What was measured beside; a bar is asked of full sizes on a quiet machine."""
    rows = [
        [DATABASES[line["db"]], line["scenario"], line["size"], each["name"],
         "" if each["value"] is None else f"{each['value']:g}", bar(each),
         "" if not each["judged"] else "yes" if each["holds"] else "**no**"]
        for line in runs(lines) for each in line["figures"]
    ]  # fmt: skip
    return table(["database", "scenario", "size", "what", "value", "asked", "reached"], rows)


def scenarios(lines: Sequence[Line]) -> str:
    """The names of the scenarios and what each does; those without a kept line, too."""
    from tests.faults.scenarios import SCENARIOS

    run = titles(largest(lines))
    new = {name: f"{each.title} ({NOT_RUN})" for name, each in SCENARIOS.items() if name not in run}
    return "".join(
        f"- `{name}`: {title[0].lower()}{title[1:]}\n" for name, title in {**run, **new}.items()
    )


def mutants(lines: Sequence[Line]) -> str:
    """What becomes of the engine without one of its safeguards; not run yet in the end."""
    rows = [
        [line["mutant"], line["without"], f"{DATABASES[line['db']]}, `{line['scenario']}`",
         ", ".join(f"{COUNTED.get(name, name)}: {value:g}" for name, value in line["by"].items()),
         "yes" if line["caught"] else "**no**"]
        for line in lines if "mutant" in line
    ]  # fmt: skip
    run = {line["mutant"] for line in lines if "mutant" in line}
    rows += [
        [each.name, each.without, f"{DATABASES[each.database]}, `{each.scenario}`", NOT_RUN, ""]
        for each in MUTANTS if each.name not in run
    ]  # fmt: skip
    return table(["the engine with", "loses this", "run on", "what was seen", "caught"], rows)


def made_on(lines: Sequence[Line]) -> str:
    """On what the runs were made, and of which revisions."""
    places: dict[tuple[str, str], list[Line]] = {}
    for line in runs(lines):
        places.setdefault((line["db"], line["size"]), []).append(line)
    return "".join(
        f"- {DATABASES[database]}, {size}: {last['made_on']}; revision "
        f"{', '.join(dict.fromkeys(each['revision'] for each in found))}, "
        f"{found[0]['date']} to {last['date']}\n"
        for (database, size), each in places.items()
        for found in [sorted(each, key=lambda line: str(line["date"]))] for last in [found[-1]]
    )  # fmt: skip


BLOCKS: dict[str, Callable[[Sequence[Line]], str]] = {
    each.__name__: each for each in (shortlist, counted, figures, scenarios, mutants, made_on)
}


# --- what they are made of ------------------------------------------------------------------------


def runs(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if "mutant" not in line]


def largest(lines: Sequence[Line]) -> dict[tuple[str, str], Line]:
    """Return the run of each scenario and database; one at full size where there is one."""
    found: dict[tuple[str, str], Line] = {}
    for line in sorted(runs(lines), key=lambda each: each["size"] == "full"):
        found[line["scenario"], line["db"]] = line
    return found


def size_of(found: Sequence[Line]) -> str:
    """Say so where not everything was run at full size."""
    small = sum(line["size"] != "full" for line in found)
    if not small:
        return ""
    those = "All" if small == len(found) else str(small)
    return f"{those} of these {len(found)} runs are small ones, as every change has to pass them."


def missed_by(found: Sequence[Line]) -> str:
    """Say so where not everything holds: it need not be one of the ``COUNTED``, nor among rows."""
    those = [f"{line['scenario']} on {DATABASES[line['db']]}" for line in found
             if not line["holds"]]  # fmt: skip
    return f"**{len(those)} of {len(found)} runs missed a bar: {', '.join(those)}.**" * bool(those)


def titles(found: dict[tuple[str, str], Line]) -> dict[str, str]:
    return {line["scenario"]: line["title"] for line in found.values()}


def brief(line: Line) -> str:
    what = [f"{line['events']:,} events" * bool(line["events"]), faults_of(line)]
    if not line["events"]:
        what = [f"{each['value']:,} {each['name']}" for each in line["figures"][:1]]
    wrong = [f"**{line[name]} {title}**" for name, title in COUNTED.items() if line[name]]
    return ", ".join(filter(None, what)) + ": " + (", ".join(wrong) or verdict(line))


def verdict(line: Line) -> str:
    """What came of a run in which nothing that is counted went wrong."""
    if line.get("error"):
        return "**it did not come to its end**"
    missed = [
        f"{each['name']} {each['value']:.3g}, asked {asked(each)}"
        for each in line["figures"] if not each["holds"]
    ]  # fmt: skip
    return "; ".join(["0 lost, nothing unexplained", *(f"**missed: {each}**" for each in missed)])


def asked(figure: dict[str, Any]) -> str:
    bars = (("≤", figure["most"]), ("≥", figure["least"]))
    return " and ".join(f"{sign} {bar:g}" for sign, bar in bars if bar is not None)


def faults_of(line: Line) -> str:
    found = line["faults"].items()
    return ", ".join(f"{count} × {FAULTS.get(kind, kind)}" for kind, count in found)


def struck(line: Line) -> int:
    return sum(line["faults"].values())


def bar(figure: Line) -> str:
    bars = [("≤", figure["most"]), ("≥", figure["least"])]
    return " and ".join(f"{sign} {value:g}" for sign, value in bars if value is not None)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    os.environ.setdefault("OUTBOX_TEST_DB", "sqlite")  # the scenarios are listed, none is run
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.faults.settings")
    django.setup()
    main(map(Path, sys.argv[1:]))
