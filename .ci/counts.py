"""Print what each test run counted; exit 1 if one is missing, empty, skipped as a whole or red.

Usage: python3 counts.py DIRECTORY RUN…, for the JUnit files that tox leaves as DIRECTORY/RUN.xml.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def main(directory: str, *runs: str) -> int:
    good = [report(run, Path(directory, f"{run}.xml")) for run in runs]
    return 0 if good and all(good) else 1


def report(run: str, file: Path) -> bool:
    if not file.exists():
        print(f"{run}: did not run")
        return False
    tests = attempts(file)
    count = Counter(outcome(each) for each in tests)
    again = sum(each[0] == PASSED and len(each) > 1 for each in tests)
    line = ", ".join(f"{count[each]} {each}" for each in (PASSED, FAILED, SKIPPED))
    print(f"{run}: {line}; {again} of them run more than once")
    return count[PASSED] > 0 and not count[FAILED]


def attempts(file: Path) -> list[list[str]]:
    """Return, for each test, what its entries say: one that is run again leaves a bare one."""
    found: dict[tuple[str | None, str | None], list[str]] = defaultdict(list)
    for case in ET.parse(file).getroot().iter("testcase"):
        said = {child.tag for child in case}
        state = FAILED if said & {"failure", "error"} else SKIPPED if "skipped" in said else PASSED
        found[case.get("classname"), case.get("name")].append(state)
    return [*found.values()]


def outcome(entries: list[str]) -> str:
    return FAILED if FAILED in entries else entries[-1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
