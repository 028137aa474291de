"""``python -m tests.benchmarks.report FILE…``: put the figures of a run into the documentation.

Several files are one run measured in parts; of a part that is in two, the later file counts. The
JSON is kept next to the page. The marked blocks of ``PAGES`` are rendered from it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import charts
from .console import heading
from .figures import Figure, Spread, short

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "performance.md"
KEPT = PAGE.with_suffix(".json")
PAGES = (PAGE, ROOT / "docs" / "index.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)
DATABASES = {"postgres": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}
SHORTLIST = (("write", 0), ("drain", 0), ("latency", 0), ("latency", 5), ("latency", 6))

Run = dict[str, Any]


def main(paths: Iterable[Path]) -> None:
    run = merged([json.loads(path.read_text()) for path in paths])
    KEPT.write_text(json.dumps(run, indent=1) + "\n")
    charts.write(run["results"], KEPT.parent)
    for page in PAGES:
        page.write_text(filled(page.read_text(), run))


def merged(runs: list[Run]) -> Run:
    """Return the last run with all results, each part's latest."""
    results = {(each["part"], each["database"]): each for run in runs for each in run["results"]}
    return {**runs[-1], "results": [*results.values()]}


def filled(text: str, run: Run) -> str:
    """Return a page whose marked blocks are the run's."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](run) + found[3], text)


# --- the blocks ---------------------------------------------------------------------------------


def made_on(run: Run) -> str:
    """The machine, the versions and the servers of the run."""
    servers = {each["database"]: each["server"] for each in run["results"] if "server" in each}
    lines = [f"- {heading(run)}", f"- {run['scale']['repeats']} rounds{busy(run)}"]
    for database, server in servers.items():
        settings = [
            f"`{name}` {value}" for name, value in server.items() if name not in ("name", "driver")
        ]
        lines.append(
            f"- {DATABASES[database]}: {server['name']}, {server['driver']}; {', '.join(settings)}"
        )
    return "\n".join(lines) + "\n"


def missed(run: Run) -> str:
    """The figures that missed their target, a row each, and how many there are."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for database, figure in figures(run):
        if figure.reached is False:
            rows.setdefault((figure.name, figure.reference), {})[database] = judged(figure)
    names = [name for name in DATABASES if any(name in cells for cells in rows.values())]
    lines = [
        [", compared with ".join(filter(None, key)), *(cells.get(name, "") for name in names)]
        for key, cells in rows.items()
    ]
    return f"{misses(run)}\n\n" + table(["", *(DATABASES[name] for name in names)], lines)


def misses(run: Run) -> str:
    met = [each.reached for _, each in figures(run) if each.reached is not None]
    return f"{met.count(False)} of {len(met)} targets were missed."


def judged(figure: Figure) -> str:
    value = str(Spread.of(figure.judged)) + (" ×" if figure.references else f" {figure.unit}")
    return f"{value}, not {figure.bar}"


def shortlist(run: Run) -> str:
    """The few that a first reader wants: a row each, a column for each database."""
    found = {
        (each["part"], number, each["database"]): Figure(**figure)
        for each in run["results"]
        for number, figure in enumerate(each.get("figures", ()))
    }
    ran = {each["database"] for each in run["results"]}
    databases = [database for database in DATABASES if database in ran]
    rows = []
    for part, number in SHORTLIST:
        cells = [found.get((part, number, database)) for database in databases]
        names = [
            f"{each.name}, compared with {each.reference}".removesuffix(", compared with ")
            for each in cells
            if each
        ]
        if names:
            rows.append([names[0], *(brief(each) if each else "" for each in cells)])
    # Beside other work those that wait for each commit fall behind most: no comparison then.
    peers = (
        []
        if busy(run)
        else [
            figure
            for database, figure in figures(run)
            if database == "postgres" and figure.name.startswith("drain, one worker")
        ]
    )
    rows += [
        [each.name, brief(each), *[""] * (len(databases) - 1)] for each in peers if not each.failure
    ]
    head = [DATABASES[database] for database in databases]
    return table(["", *head], rows)


def speed(run: Run) -> str:
    """The two figures that a first reader wants, in a sentence each."""
    delays, rates = [], []
    for each in run["results"]:
        found = [Figure(**figure) for figure in each.get("figures", ())]
        if each["part"] == "latency":
            delays.append(
                f"{short(Spread.of(found[0].values).median)} ms ({DATABASES[each['database']]})"
            )
        if each["part"] == "drain":
            rates.append(Spread.of(found[0].values).median)
    return (
        "- **Events arrive in milliseconds.** From the commit to the listener of a separate, idle "
        f"worker: {', '.join(delays)} in the median. One worker process delivers "
        f"{short(min(rates))} to {short(max(rates))} events a second to a listener that only "
        f"counts. {misses(run)}\n"
    )


def busy(run: Run) -> str:
    """Say so if the machine had other work."""
    load, cores = run["hardware"]["load_before"], run["hardware"]["cores"]
    if load < cores / 2:
        return ""
    return (
        f". **The machine was busy with other work** (a load of {load:g} on {cores} cores before "
        "the run): ratios are rough, and absolute figures low"
    )


def brief(figure: Figure) -> str:
    value = f"{short(Spread.of(figure.values).median)} {figure.unit}"
    ratios = f" ({short(Spread.of(figure.ratios).median)} ×)" if figure.references else ""
    return value + ratios


BLOCKS: dict[str, Callable[[Run], str]] = {
    each.__name__: each for each in (made_on, missed, shortlist, speed)
}


def figures(run: Run) -> list[tuple[str, Figure]]:
    """Return every figure with the database it was measured on."""
    return [
        (each["database"], Figure(**figure))
        for each in run["results"]
        for figure in each.get("figures", ())
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    main(Path(name) for name in sys.argv[1:])
