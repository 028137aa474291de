"""Print what each test run counted; exit 1 if one is missing, empty, skipped as a whole or red.

Usage: python3 counts.py DIRECTORY RUN…, for the JUnit files that tox leaves as DIRECTORY/RUN.xml.
"""

from __future__ import annotations

import sys
from collections import Counter
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
    count = Counter(outcome(case) for case in ET.parse(file).getroot().iter("testcase"))
    print(f"{run}: " + ", ".join(f"{count[each]} {each}" for each in (PASSED, FAILED, SKIPPED)))
    return count[PASSED] > 0 and not count[FAILED]


def outcome(case: ET.Element) -> str:
    said = {child.tag for child in case}
    return FAILED if said & {"failure", "error"} else SKIPPED if "skipped" in said else PASSED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
