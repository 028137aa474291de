"""``python -m tests.simulation SEED [COUNT] [--trace] [--jobs N]``: play histories, judge them.

Each seed is played in a fork of a process that has imported everything and made the tables once.
The exit status is 1 if a rule was broken; a line then says how to replay the seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import pickle
import pkgutil
import shutil
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST = 600  # seconds of real time after which a history hangs; a busy machine needs minutes
SHOWN = 3  # violations of a seed


def main() -> int:
    given = arguments()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets belongs to the history
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(command[0], command, {**os.environ, "PYTHONHASHSEED": "0"})
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="outbox-simulation-", dir=place) as folder:
        prepare(Path(folder))
        return report(given, Path(folder))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--jobs", type=int, default=1, help="histories at a time")
    parser.add_argument("--kind", help="play this kind of history, whatever the seed")
    parser.add_argument("--trace", action="store_true", help="print each step")
    parser.add_argument("--digests", action="store_true", help="print the digest of each history")
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    return parser.parse_args()


def prepare(folder: Path) -> None:
    """Import everything, in virtual time, and make the tables that each history copies."""
    from tests.simulation import primitives

    primitives.install()
    os.environ["SIMULATION_DATABASE"] = str(folder / "tables.sqlite3")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.simulation.settings"
    import django

    django.setup()
    logging.disable(logging.CRITICAL)
    from django.core.management import call_command
    from django.db import connection

    from django_outbox import delivery, doorbell, inspection, worker

    for package in (worker, delivery, doorbell, inspection):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(each.name)  # else each history would import it
    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode = WAL")
    connection.close()
    from tests.simulation import history, listeners, processes  # noqa: F401 - histories need it

    processes.prepare()
    listeners.register()
    gc.collect()
    gc.freeze()


def report(given: argparse.Namespace, folder: Path) -> int:
    began, seconds, failed = time_now(), 0.0, 0
    for outcome in outcomes(given, folder):
        seconds += outcome.seconds
        if given.digests:
            print(outcome.plan.seed, outcome.digest, flush=True)
        if outcome.lines is not None:
            print(*outcome.lines, sep="\n")
        if outcome.violations:
            failed += 1
            show(outcome)
            if not given.keep_going:
                break
    took = time_now() - began
    print(
        f"{given.count} histories from {given.seed}: {failed} with violations, "
        f"{seconds:.0f} virtual seconds in {took:.1f} s",
        file=sys.stderr,
    )
    return 1 if failed else 0


def show(outcome: Any) -> None:
    seed, kind = outcome.plan.seed, outcome.plan.name
    for rule, text in outcome.violations[:SHOWN]:
        print(f"seed {seed} ({kind}): {rule}: {text}")
    print(f"replay: python -m tests.simulation {seed} --kind '{kind}' --trace", flush=True)


def outcomes(given: argparse.Namespace, folder: Path) -> Any:
    """Yield the outcome of each seed, in order."""
    from tests.simulation.plan import KINDS

    if given.kind not in (None, *KINDS):
        raise ValueError(f"--kind is {given.kind!r}; expected one of {', '.join(KINDS)}.")
    seeds = iter(range(given.seed, given.seed + given.count))
    running: list[tuple[int, Any]] = []
    try:
        while True:
            while len(running) < given.jobs and (seed := next(seeds, None)) is not None:
                running.append(fork(seed, folder, given))
            if not running:
                return
            pid, stream = running.pop(0)
            with stream:
                found = stream.read()
            os.waitpid(pid, 0)
            if not found:
                raise RuntimeError("a history hangs, or cannot be played; see above")
            yield pickle.loads(found)
    finally:
        for pid, _ in running:
            os.waitpid(pid, 0)


def fork(seed: int, folder: Path, given: argparse.Namespace) -> tuple[int, Any]:
    """Play a seed in a child; return its id and the stream from which to read the outcome."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as stream:
                stream.write(pickle.dumps(played(seed, folder, given)))
            status = 0
        except BaseException:  # noqa: BLE001 - reported, and the child ends
            print(f"seed {seed} cannot be played", file=sys.stderr)
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return pid, os.fdopen(reading, "rb")


def played(seed: int, folder: Path, given: argparse.Namespace) -> Any:
    from tests.simulation import history, plan

    gc.disable()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    path = folder / f"{seed}.sqlite3"
    shutil.copy(folder / "tables.sqlite3", path)
    try:
        return history.play(plan.plan_of(seed, given.kind), str(path), keep_lines=given.trace)
    finally:
        for each in folder.glob(f"{seed}.sqlite3*"):
            each.unlink()


time_now = time.monotonic  # before it becomes virtual


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except Exception:  # noqa: BLE001 - reported, and the process ends
        traceback.print_exc()
    finally:  # not by the interpreter's end, which waits for threads in virtual time
        sys.stdout.flush()
        os._exit(status)
