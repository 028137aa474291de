"""``python -m tests.simulation.mutants [WORD] [--seeds N]``: break the engine; who notices?

Each mutant is the engine without one of its safeguards, in a copy of the repository. Histories are
played until a rule is broken. The table tells after how many seeds, and by which rule.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from tests.faults.mutants import MUTANTS, Mutant, patched_copy
from tests.simulation.safeguards import OWN, Broken

# Files that a history never runs: other databases, the process of a worker, relays.
OUTSIDE = ("sql/postgresql", "sql/mysql", "process/main.py", "relays/")
FOUND = re.compile(r"seed (\d+) \((.*?)\): (\w+):")


def fitting() -> list[Broken]:
    """Return our own mutants, and those of the fault harness that a history can show."""
    theirs = [each for each in MUTANTS if not is_outside(each)]
    return [*OWN, *(Broken(name=each.name, edits=each.edits) for each in theirs)]


def is_outside(mutant: Mutant) -> bool:
    return any(file.startswith(OUTSIDE) for file, _, _ in mutant.edits)


def tried(broken: Broken, seeds: int, jobs: int) -> str:
    """Play histories of a mutant; return what was seen."""
    kind = ["--kind", broken.kind] if broken.kind else []
    with patched_copy(broken) as copy:
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "0", str(seeds), "--jobs", str(jobs), *kind],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        return f"not seen in {seeds} seeds"
    if found := FOUND.search(done.stdout):
        return f"seed {found[1]} ({found[2]}): {found[3]}"
    return f"failed: {done.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="a part of a mutant's name")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    for each in fitting():
        if given.word in each.name:
            print(f"{each.name:60} {tried(each, given.seeds, given.jobs)}", flush=True)
    for mutant in MUTANTS:
        if given.word in mutant.name and is_outside(mutant):
            print(f"{mutant.name:60} does not fit: {mutant.edits[0][0]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
