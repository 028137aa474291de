"""``python -m tests.faults``: play scenarios, print a JSON line for each, exit 1 on a violation."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tests import clusters, debian, servers
from tests.where_possible import missing

NAME = "faults"  # of the database, made anew for every run
DATABASES = ("postgres", "mariadb", "mysql", "sqlite")
CLUSTERS = tuple(clusters.VENDORS)
AT_ONCE = {"ci": 3, "full": 1}  # databases: at full size times are judged, too


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--db", choices=(*DATABASES, *CLUSTERS), help="all of them if not given")
    parser.add_argument("--scenario", action="append", help="a name; all of them if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=("ci", "full"), default="ci")
    parser.add_argument("--out", type=Path, help="a file that the lines are added to as well")
    parser.add_argument("--patience", type=float, help="seconds until what is pending is stuck")
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="play again what is wrong in nothing but errors that the engine survived",
    )
    parser.add_argument("--keep", type=Path, help="a directory for logs, witnesses and faults")
    options = parser.parse_args()
    if options.db is None:
        with ThreadPoolExecutor(AT_ONCE[options.size]) as pool:
            return max(pool.map(apart, (*DATABASES, *CLUSTERS)))
    os.environ["OUTBOX_TEST_DB"] = clusters.VENDORS.get(options.db, options.db)
    os.environ.pop("DATABASE_URL", None)  # a server of its own, always
    if lack := missing():
        print(f"{options.db} was NOT RUN: {lack}.", flush=True)
        return 1 if os.environ.get("CI") == "true" else 0
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as place:
        try:
            with serving(options.db, Path(place)) as server:
                return play(options, server, Path(place))
        except debian.Unavailable as lack:
            print(f"{options.db} was NOT RUN: {lack}.", flush=True)
            return 1 if os.environ.get("CI") == "true" else 0


def apart(database: str) -> int:
    """Run on one database in a process of its own; Django knows one in its life.

    What it says is shown when it has ended: several may run side by side.
    """
    command = [sys.executable, "-m", "tests.faults", "--db", database, *sys.argv[1:]]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout, end="", flush=True)
    return done.returncode


@contextmanager
def serving(database: str, place: Path) -> Iterator[servers.Server | None]:
    """Start a server of this harness's own and point Django at a database in it."""
    server: Any = None
    if database in CLUSTERS:
        server = clusters.make(database, place)
    elif database != "sqlite":
        server = servers.make(database, place)
    if server is not None:
        server.start()
    url = f"sqlite:///{place}/{NAME}.sqlite3" if server is None else named(server.url)
    os.environ.update(
        OUTBOX_TEST_DB=clusters.VENDORS.get(database, database),
        DATABASE_URL=url,
        DJANGO_SETTINGS_MODULE="tests.faults.settings",
    )
    if isinstance(server, clusters.Pair):  # of the others this process stays with one node
        os.environ["FAULTS_POOLED"] = json.dumps(server.way)
    try:
        yield server
    finally:
        if server is not None:
            server.stop("immediate" if database in ("postgres", "pair") else "terminate")


def named(url: str) -> str:
    """The same server's database of our name."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{NAME}"))


def play(options: argparse.Namespace, server: servers.Server | None, place: Path) -> int:
    import django

    django.setup()
    from tests.faults.rig import NotHere
    from tests.faults.scenarios import SCENARIOS

    failed = 0
    for name in options.scenario or SCENARIOS:
        scenario = SCENARIOS[name]
        if not scenario.is_for(options.db, options.size):
            print(f"{name}: not on {options.db} at size {options.size}", file=sys.stderr)
            continue
        print(f"-- {options.db} {name} seed={options.seed}: {scenario.title}", file=sys.stderr)
        try:
            found = played(options, name, server, place)
            if not found["violations"] and (
                found.get("error") or (options.rerun and only_survived(found))
            ):
                print(json.dumps(found), flush=True)
                print(f"AGAIN {options.db} {name}: {reasons(found)}", file=sys.stderr)
                found = played(options, name, server, place)
        except NotHere as lack:
            print(f"{name}: NOT RUN, {lack}", file=sys.stderr)
            continue
        print(json.dumps(found), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if not found["holds"]:
            failed += 1
            print(f"FAILED {options.db} {name}: {reasons(found)}", file=sys.stderr)
    return 1 if failed else 0


def only_survived(found: dict[str, Any]) -> bool:
    """Return whether a run is wrong in nothing but errors that the engine met and survived."""
    from tests.faults.rig import ERRORS

    return [each["name"] for each in found["figures"] if not each["holds"]] == [ERRORS]


def reasons(found: dict[str, Any]) -> str:
    broken = [
        "; ".join([f"{each['name']}: {each['value']}", *each["examples"]])
        for each in found["figures"]
        if not each["holds"]
    ]
    return "; ".join([*found["violations"], *broken, *filter(None, [found.get("error")])])


def played(
    options: argparse.Namespace, name: str, server: servers.Server | None, place: Path
) -> dict[str, Any]:
    from tests.faults.rig import NotHere, Rig
    from tests.faults.scenarios import SCENARIOS

    make_database(options.db)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    rig = Rig(options.db, options.size, options.seed, directory, server)
    rig.patience = options.patience or rig.patience
    started, error = time.monotonic(), ""
    try:
        SCENARIOS[name].play(rig)
        rig.stop_workers()
    except NotHere:
        raise
    except Exception as raised:  # noqa: BLE001 - told in the line, and the next scenario is played
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"[:500]
    finally:
        rig.close()
        if options.keep:
            (directory / "faults").write_text("\n".join(map(str, rig.faults)))
            shutil.copytree(directory, options.keep / f"{options.db}-{name}", dirs_exist_ok=True)
    from django.db import connection

    try:
        return report(rig, name, error, time.monotonic() - started)
    finally:
        connection.close()


def report(rig: Any, name: str, error: str, seconds: float) -> dict[str, Any]:
    from tests.benchmarks import machine
    from tests.faults import oracle
    from tests.faults.scenarios import SCENARIOS

    evidence = rig.evidence()
    verdict = oracle.judge(evidence)
    runs = oracle.executions(evidence, oracle.Verdict())
    waits = oracle.latencies(evidence, runs)
    rig.measure_recoveries(*oracle.recoveries(evidence, runs))
    faults: dict[str, int] = {}
    for each in rig.faults:
        faults[each.kind] = faults.get(each.kind, 0) + 1
    counts = oracle.evidence_of(verdict)
    violations = {each: counts[each] for each in verdict.VIOLATIONS if counts[each]}
    broken = [each.name for each in rig.figures if not each.holds]
    for what in violations:
        print(f"   {what}: {verdict.examples[what]}", file=sys.stderr)
    for figure in rig.figures:
        if not figure.holds:
            print(f"   BROKEN: {figure}", file=sys.stderr)
    return {
        "scenario": name,
        "title": SCENARIOS[name].title,
        "db": rig.database,
        "seed": rig.seed,
        "size": rig.size,
        "revision": machine.revision(),
        "made_on": made_on(machine),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds, 1),
        "faults": faults,
        **counts,
        "refused": len(rig.refusals),
        "hot": len(rig.hot()),
        "p50": oracle.percentile(waits, 0.5),
        "p95": oracle.percentile(waits, 0.95),
        "p99": oracle.percentile(waits, 0.99),
        "figures": [{**asdict(each), "holds": each.holds} for each in rig.figures],
        "violations": [*violations],
        "holds": not violations and not broken and not error,
        **({"error": error} if error else {}),
    }


def made_on(machine: Any) -> str:
    hardware, software = machine.hardware(), machine.software()
    return (
        f"{machine.server()['name']}; Python {software['python']}, Django {software['django']}; "
        f"{hardware['cores']} cores, a load of {hardware['load_before']:g}"
    )


def make_database(database: str) -> None:
    """Drop the database of the run before, make an empty one and lay the tables."""
    from django.core.management import call_command
    from django.db import connection

    connection.close()
    if database == "sqlite":
        name = Path(connection.settings_dict["NAME"])
        for each in name.parent.glob(f"{name.name}*"):
            each.unlink()
    else:
        with connection._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {NAME}")
            cursor.execute(f"CREATE DATABASE {NAME}")
    call_command("migrate", verbosity=0, run_syncdb=True)


if __name__ == "__main__":
    sys.exit(main())
