"""``python -m tests.benchmarks``: the parts, each in a process of its own; a table, and JSON.

What fails is a line of the table and the rest goes on; the JSON is written after every part. The
database is that of the tests (``OUTBOX_TEST_DB``, ``DATABASE_URL``), or those of ``--on``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import databases, where_possible

from . import console, machine
from .scale import FULL, QUICK, Scale

PARTS = "write writers drain latency claim processes keyed batches several relays peers".split()
# Left out, unless named, where they would say little that PostgreSQL's figures do not say.
LEFT_OUT = {"sqlite": {"processes"}}
PART_LIMIT = 900.0  # seconds


def main() -> int:
    options = arguments()
    scale = FULL if options.full else QUICK
    given: dict[str, Any] = {
        "repeats": options.repeats,
        "events": options.events,
        "reference": options.reference,
    }
    scale = replace(scale, **{name: value for name, value in given.items() if value})
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    os.environ["OUTBOX_TEST_DURABLE"] = "1"
    run: dict[str, Any] = {
        "hardware": machine.hardware(),
        "software": machine.software(),
        "scale": asdict(scale),
        "results": [],
    }
    for place in options.on or [databases.vendor()]:
        with patch.dict(os.environ, environment(place)):
            if lack := where_possible.missing():
                run["results"].append(not_run(lack))
                print(console.as_text(run["results"][-1]), flush=True)
                continue
            databases.database_url()  # starts a server where none is named
            for part in options.parts or parts_on(databases.vendor()):
                run["results"].append(measure(part, scale))
                options.json.write_text(json.dumps(run, indent=1) + "\n")
                print(console.as_text(run["results"][-1]), flush=True)
    print(f"{console.heading(run)}\nJSON: {options.json}")
    return 1 if any("error" in result for result in run["results"]) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes (the default)")
    size.add_argument("--full", action="store_true", help="what is published; half an hour")
    parser.add_argument("--repeats", type=int, help="rounds; medians are of these")
    parser.add_argument("--events", type=int, help="events of a backlog")
    parser.add_argument(
        "--reference",
        choices=["best", "same"],
        help="statements that a drain is compared with; both unless given",
    )
    parser.add_argument(
        "--on",
        action="append",
        metavar="DATABASE",
        help="postgres, mariadb, mysql, sqlite or a URL; repeatable",
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for place in options.on or ():
        if place.partition("://")[0] not in databases.SCHEMES | databases.OPTIONS:
            parser.error(
                f"--on: no such database: {place}; it is one of these, or a URL: "
                f"{', '.join(databases.OPTIONS)}"
            )
    return options


def not_run(why: str) -> dict[str, Any]:
    return {"part": "every part", "database": databases.vendor(), "seconds": 0, "error": why}


def parts_on(vendor: str) -> list[str]:
    return [part for part in PARTS if part not in LEFT_OUT.get(vendor, ())]


def environment(place: str) -> dict[str, str]:
    """Return the variables that name a database, given by its vendor or URL."""
    if "://" not in place:
        return {"OUTBOX_TEST_DB": place}
    vendors, named = databases.SCHEMES[place.partition(":")[0]], os.environ.get("OUTBOX_TEST_DB")
    return {"OUTBOX_TEST_DB": named if named in vendors else vendors[0], "DATABASE_URL": place}


def measure(part: str, scale: Scale) -> dict[str, Any]:
    """Run one part on one database; return its figures, or what went wrong."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "tests.benchmarks.alone", part, str(result)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            process.communicate(json.dumps(asdict(scale)), timeout=PART_LIMIT)
            error = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done after {PART_LIMIT:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # it and its workers
                process.wait()
        found = json.loads(result.read_text()) if result.exists() else {"error": error}
    seconds = round(time.monotonic() - started, 1)
    return {"part": part, "database": databases.vendor(), "seconds": seconds, **found}


if __name__ == "__main__":
    sys.exit(main())
