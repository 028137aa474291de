"""Print what each test run counted; exit 1 if one is missing, empty, skipped as a whole or red.

Usage: python3 counts.py DIRECTORY RUN…, for the JUnit files that tox leaves as DIRECTORY/RUN.xml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

COUNTS = ("tests", "failures", "errors", "skipped")


def main(directory: str, *runs: str) -> int:
    good = [report(run, Path(directory, f"{run}.xml")) for run in runs]
    return 0 if good and all(good) else 1


def report(run: str, file: Path) -> bool:
    if not file.exists():
        print(f"{run}: did not run")
        return False
    suites = ET.parse(file).getroot().iter("testsuite")
    totals = [sum(column) for column in zip(*map(counts_of, suites), strict=True)]
    tests, failures, errors, skipped = totals or (0, 0, 0, 0)
    passed = tests - failures - errors - skipped
    print(f"{run}: {passed} passed, {failures + errors} failed, {skipped} skipped")
    return passed > 0 and failures + errors == 0


def counts_of(suite: ET.Element) -> list[int]:
    return [int(suite.get(name, 0)) for name in COUNTS]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
