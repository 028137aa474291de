"""Keyed events under kills, pauses, a database restart, slow commits and wrong clocks.

``python -m tests.ordered_chaos`` runs it at full size on a private server of the vendor in
``OUTBOX_TEST_DB``; the test suite runs it at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import psutil

from tests.fleet import REPOSITORY, Fleet
from tests.waiting import wait_until

SKEWS = ("-600", "600", "0")  # seconds; clock errors of writers and workers, in turn
LEASE = 2.0
OUTBOX = {
    "LEASE": LEASE,
    "DRAIN_TIMEOUT": 1.5,
    "WORKERS": 4,
    "POLL_INTERVAL": 0.3,
    "LOCK_WAIT": 1,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 1000},
    "MAX_RESCUES": 100,
}


class Chaos:
    """One run: writers write, workers deliver, faults happen; then the witness file is checked."""

    def __init__(self, fleet: Fleet, environment: dict[str, str], *, seed: int) -> None:
        self.fleet, self.environment = fleet, environment
        self.random = random.Random(seed)
        self.workers: list[psutil.Popen] = []
        self.writers: list[subprocess.Popen[str]] = []
        self.faults: defaultdict[str, int] = defaultdict(int)

    def skew(self, number: int) -> dict[str, str]:
        path = str(REPOSITORY / "tests" / "clockshift")
        return {"PYTHONPATH": path, "OUTBOX_TEST_SKEW": SKEWS[number % len(SKEWS)]}

    def run(
        self,
        *,
        events: int,
        keys: int,
        workers: int,
        kills: int,
        pauses: int,
        restart: Callable[[], None] | None = None,
        within: float = 120,
    ) -> dict[str, Any]:
        self.writers = [self._write(number, events // 4, keys) for number in range(4)]
        try:
            return self._strike(workers, kills, pauses, restart, within)
        finally:
            for writer in self.writers:
                writer.kill()
                writer.wait()

    def _strike(
        self,
        workers: int,
        kills: int,
        pauses: int,
        restart: Callable[[], None] | None,
        within: float,
    ) -> dict[str, Any]:
        for number in range(workers):
            self.workers.append(self.fleet.start(**self.skew(number)))
        strikes = ["kill"] * kills + ["pause"] * pauses + ["restart"] * bool(restart)
        self.random.shuffle(strikes)
        for strike in strikes:
            time.sleep(self.random.uniform(0.3, 1.2))  # the random time between faults
            self.faults[strike] += 1
            if strike == "restart" and restart is not None:
                restart()
            else:
                getattr(self, f"_{strike}")()
        committed = sum(int(each.communicate(timeout=within)[0]) for each in self.writers)
        try:
            wait_until(self._is_through, within=within, what="everything delivered")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._left()}") from error
        found = self._hear()
        for each in self.workers:
            self.fleet.end(each)
        return {**found, "committed": committed, "faults": dict(self.faults)}

    def _write(self, number: int, events: int, keys: int) -> subprocess.Popen[str]:
        environment = {**self.environment, **self.skew(number)}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.ordered_chaos",
                "--write",
                str(events),
                "--keys",
                str(keys),
                "--seed",
                str(self.random.random()),
            ],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _kill(self) -> None:
        number = self.random.randrange(len(self.workers))
        self.workers[number].kill()
        self.workers[number].wait()
        self.workers[number] = self.fleet.start(**self.skew(number))

    def _pause(self) -> None:
        worker = self.random.choice(self.workers)
        worker.suspend()
        time.sleep(1.5 * LEASE)  # longer than its lease
        worker.resume()

    def _is_through(self) -> bool:
        from django.db import Error, connection

        from django_outbox.models import OutboxEvent, OutboxStream

        try:
            pending = OutboxEvent.objects.pending().exists()
            return not pending and not OutboxStream.objects.exclude(locked_by=None).exists()
        except Error:
            connection.close()
            return False

    def _left(self) -> str:
        """Return what is pending; a stuck stream is one that is neither leased nor due."""
        from django_outbox.models import OutboxEvent, OutboxStream

        keys = OutboxEvent.objects.pending().values("key")
        left = OutboxStream.objects.filter(key__in=keys)
        stuck = left.filter(locked_by=None, due_at=None)
        return f"{left.count()} streams have pending events, stuck: {[*stuck.values_list('pk')]}"

    def _hear(self) -> dict[str, Any]:
        """Count lost events, and events that started before an earlier one of their key ended."""
        from django_outbox.models import OutboxEvent

        rows = OutboxEvent.objects.filter(event_type="order.chaos")
        places = {each[0]: (each[1], each[2]) for each in rows.values_list("pk", "key", "seq")}
        expected: defaultdict[str, list[int]] = defaultdict(list)
        for key, seq in sorted(places.values()):
            expected[key].append(seq)
        ended: defaultdict[str, set[int]] = defaultdict(set)
        first_open: defaultdict[str, int] = defaultdict(int)  # place in expected
        inversions, starts, ghosts = 0, 0, 0
        for text in self.fleet.witness.read_text().splitlines():
            line = json.loads(text)
            if line["id"] not in places:
                ghosts += 1
                continue
            key, seq = places[line["id"]]
            while first_open[key] < len(expected[key]) and (
                expected[key][first_open[key]] in ended[key]
            ):
                first_open[key] += 1
            if line["phase"] == "start":
                starts += 1
                inversions += seq > min(expected[key][first_open[key] :], default=seq)
            else:
                ended[key].add(seq)
        lost = len(places) - sum(map(len, ended.values()))
        done = rows.filter(status=1).count()
        times = rows.values_list("occurred_at", "created_at")
        clocks = [(occurred - created).total_seconds() for occurred, created in times]
        return {
            "events": len(places),
            "done": done,
            "starts": starts,
            "ghosts": ghosts,
            "lost": lost,
            "inversions": inversions,
            "clocks": [round(min(clocks)), round(max(clocks))],
        }


class Shifted(datetime):
    """A ``datetime`` that goes by ``time.time()``, which ``clockshift`` has shifted."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(time.time(), tz)


def write(events: int, keys: int, seed: str) -> int:
    """Write in transactions of 1 to 3 keys, some slow, some rolled back; return how many events."""
    from django.db import Error, connection, transaction

    import django_outbox as outbox
    from django_outbox.events import arguments

    arguments.datetime = Shifted  # type: ignore[attr-defined]  # the wrong clock dates events
    luck, committed = random.Random(seed), 0
    while committed < events:
        chosen = sorted({f"key-{luck.randrange(keys)}" for _ in range(luck.choice((1, 1, 2, 3)))})
        rollback = luck.random() < 0.1
        try:
            with transaction.atomic():
                for key in chosen:
                    outbox.write("order.chaos", {}, key=key)
                if luck.random() < 0.2:
                    time.sleep(luck.random() * 0.02)  # a slow business transaction
                transaction.set_rollback(rollback)
        except Error:
            connection.close()  # the server is down; the commit may have succeeded or not
            time.sleep(0.2)
        else:
            committed += 0 if rollback else len(chosen)
    return committed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ordered_chaos")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--pauses", type=int, default=3)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    if options.write is None:
        with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as place:
            run_alone(options, Path(place))
        return
    import django

    django.setup()
    print(write(options.write, options.keys, options.seed))


def run_alone(options: argparse.Namespace, place: Path) -> None:
    """Run on a private server, which is restarted during the run."""
    from tests import databases, servers

    vendor = databases.vendor()
    server = None if vendor == "sqlite" else servers.make(vendor, place)
    if server is not None:
        server.start()
    os.environ["DATABASE_URL"] = f"sqlite:///{place}/chaos" if server is None else server.url
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    (place / "fleet").mkdir()
    fleet = Fleet(dict(os.environ), place / "fleet", **OUTBOX)

    def restart() -> None:
        assert server is not None
        server.stop("immediate" if vendor == "postgres" else "kill")
        time.sleep(0.5)  # the outage
        server.start()

    started = time.monotonic()
    try:
        found = Chaos(fleet, dict(os.environ), seed=int(options.seed)).run(
            events=options.events,
            keys=options.keys,
            workers=4,
            kills=options.kills,
            pauses=0 if server is None else options.pauses,
            restart=None if server is None else restart,
            within=600,
        )
    finally:
        fleet.kill_all()
        from django.db import connections

        connections.close_all()
        if server is not None:
            server.stop("immediate" if vendor == "postgres" else "terminate")
    print(json.dumps({"vendor": vendor, **found, "seconds": round(time.monotonic() - started, 1)}))
    if found["lost"] or found["inversions"] or found["ghosts"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
