"""The rig of one run: a fresh database, business and worker processes, and the faults' diary."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psutil
from django.db import Error, connection, transaction

from tests.faults import clock, log, oracle, people, witness
from tests.faults.oracle import Deed, Evidence, Fault
from tests.faults.writer import DIED
from tests.servers import Server
from tests.sessions import terminate_other_sessions
from tests.waiting import wait_until

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
ERRORS = "errors of the engine"  # a figure: errors that it met, logged and survived
END = 60.0  # seconds that a process gets to end when it was asked to
OUTBOX = {
    "LEASE": 2.0,
    "DRAIN_TIMEOUT": 1.5,
    "WORKERS": 4,
    "POLL_INTERVAL": 0.5,
    "LOCK_WAIT": 1,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 10},
}


class NotHere(Exception):
    """The machine lacks what a scenario needs; it is left out, and that is told."""


@dataclass(kw_only=True)
class Figure:
    """Something measured beside what is counted; it fails a run only where it is judged."""

    name: str
    value: float | None
    most: float | None = None
    least: float | None = None
    judged: bool = True
    examples: list[str] = field(default_factory=list)  # of what was counted, if it does not hold

    @property
    def holds(self) -> bool:
        if self.value is None or not self.judged:
            return True
        below = self.most is None or self.value <= self.most
        return below and (self.least is None or self.value >= self.least)


@dataclass
class Rig:
    """What a scenario plays with."""

    database: str  # "postgres", "mariadb" or "sqlite"
    size: str  # "ci" or "full"
    seed: int
    place: Path
    server: Server | None  # None: SQLite
    outbox: dict[str, Any] = field(default_factory=lambda: dict(OUTBOX))
    environment: dict[str, str] = field(default_factory=dict)  # of every process
    faults: list[Fault] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    backlog: bool = False  # more is written than can be delivered: what is lost waits behind it
    mortal: tuple[str, ...] = ()  # kinds whose events end dead
    listeners: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of kinds with several
    # The same: listeners that may get an event after later ones of its key.
    unordered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    formerly: dict[str, str] = field(default_factory=dict)  # titles by those before a rename
    relayed: tuple[str, ...] = ()  # kinds whose events a relay sends to a broker
    stored: list[str] | None = None  # ids of what the broker holds, in its order; None: not read
    purges: bool = False  # what is finished is deleted on the way
    shift: tuple[float, ...] = ()  # seconds that the processes' clocks are wrong, in turn
    suspends: bool = False  # the processes' monotonic clocks stand still while they are suspended
    patience: float = 180.0  # seconds until all must be delivered, once the faults are over
    refusals: list[str] = field(default_factory=list)  # of transactions, by the database
    met: Counter[str] = field(default_factory=Counter)  # how often writers did what
    longest: float = 0.0  # seconds of a business transaction
    # Of each outage, and one worker: a processor's part, log lines a second, seconds to be back.
    spent: list[float] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    workers: list[psutil.Popen] = field(default_factory=list)
    writers: list[psutil.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.luck = random.Random(self.seed)
        self.witness, self.log = self.place / "witness", self.place / "log"
        self.diary = self.place / "diary"  # of what people do
        for each in (self.witness, self.log, self.diary):
            each.touch()
        self._all: list[psutil.Popen] = []  # ever started
        self._numbers = count(1)  # of what this process writes
        self._forked: set[int] = set()  # process ids
        self.exits: dict[int, int] = {}  # by process id, of workers that were asked to end
        self.ended: dict[int, float] = {}  # by process id, monotonic; of those replaced under load
        self._stood_still: dict[int, Path] = {}  # by process id; see tests/clockshift
        self._arguments: dict[int, tuple[str, ...]] = {}  # of workers, by process id
        self._environments: dict[int, dict[str, str]] = {}  # the same

    def pick(self, *, ci: T, full: T, sqlite: T | None = None) -> T:
        """Return what fits the size of the run; SQLite takes less at full size."""
        if self.size == "ci":
            return ci
        return full if sqlite is None or self.database != "sqlite" else sqlite

    def measure(
        self, name: str, value: float | None, *, timed: bool = False, **bars: float
    ) -> None:
        """Note a figure; what depends on a quiet machine is judged at full size only."""
        judged = not timed or self.size == "full"
        shown = None if value is None else round(value, 4)
        self.figures.append(Figure(name=name, value=shown, judged=judged, **bars))

    def measure_recoveries(self, once: list[float], again: list[float]) -> None:
        """Note how long what a killed worker was running had to wait for its next run."""
        if once:
            most = self.outbox["LEASE"] + 2 * self.outbox["POLL_INTERVAL"]
            bars = {} if self.backlog else {"most": most}
            self.measure("recovery after a kill, s", max(once), timed=True, **bars)
        if again:
            self.measure("recovery of what was lost before, s", max(again))

    # -- processes -------------------------------------------------------------------------------

    def start_workers(self, count: int, *arguments: str, **environment: str) -> None:
        for _ in range(count):
            self.workers.append(self.start_worker(*arguments, **environment))

    def start_worker(self, *arguments: str, **environment: str) -> psutil.Popen:
        """Start ``outbox_worker``."""
        worker = self._start(["-m", "django", "outbox_worker", *arguments], environment)
        self._arguments[worker.pid] = arguments
        self._environments[worker.pid] = environment
        return worker

    def start_another(self, worker: psutil.Popen) -> psutil.Popen:
        """Start a worker with the arguments and the environment of one that has ended."""
        pid = worker.pid
        return self.start_worker(*self._arguments[pid], **self._environments[pid])

    def start_people(self, **task: Any) -> None:
        """Have somebody use the admin and the commands: see ``people.main`` for what to do."""
        given = {"seed": f"{self.seed}", "diary": str(self.diary), **task}
        own = {"DJANGO_SETTINGS_MODULE": "tests.faults.people_settings"}
        self.people = self._start(["-m", "tests.faults.people", json.dumps(given)], own, reply=True)

    def start_writers(
        self,
        count: int,
        *,
        events: int,
        rate: float = 0.0,
        embedded: bool = False,
        environment: Mapping[str, str] | None = None,
        **plan: Any,
    ) -> None:
        """Have that many processes write ``events`` between them, ``rate`` of them a second."""
        own = {"FAULTS_OUTBOX": json.dumps({**self.outbox, "EMBEDDED": embedded})}
        own |= environment or {}
        for number in range(count):
            given = {
                "events": events // count + (number < events % count),
                "rate": rate / count,
                "seed": f"{self.seed}-{number}",
                **plan,
            }
            self.writers.append(
                self._start(["-m", "tests.faults.writer", json.dumps(given)], own, reply=True)
            )

    def _start(
        self, command: list[str], environment: dict[str, str], *, reply: bool = False
    ) -> psutil.Popen:
        still = self.place / f"still-{len(self._all)}"
        with self.log.open("ab") as output:
            process = psutil.Popen(
                [sys.executable, *command],
                env={
                    **os.environ,
                    "PYTHONDONTWRITEBYTECODE": "",  # a start takes what it takes where it is used
                    "FAULTS_OUTBOX": json.dumps(self.outbox),
                    witness.VARIABLE: str(self.witness),
                    **self.environment,
                    **self._clock(still),
                    **environment,
                },
                cwd=REPOSITORY,
                stdout=subprocess.PIPE if reply else output,
                stderr=output,
                start_new_session=True,  # a group of its own: it and its children end together
            )
        self._all.append(process)
        self._stood_still[process.pid] = still
        return process

    def _clock(self, still: Path) -> dict[str, str]:
        """The environment in which a process has the next of the wrong clocks."""
        if not self.shift and not self.suspends:
            return {}
        path = str(REPOSITORY / "tests" / "clockshift")
        wrong = {"PYTHONPATH": f"{path}{os.pathsep}{REPOSITORY}"}
        if self.suspends:
            still.write_bytes(struct.pack("d", 0.0))
            return {**wrong, "OUTBOX_TEST_STILL": str(still)}
        return {**wrong, "OUTBOX_TEST_SKEW": str(self.shift[len(self._all) % len(self.shift)])}

    def wait_for_writers(self, within: float = 900.0) -> None:
        for writer in self.writers:
            said = writer.communicate(timeout=within)[0]
            if writer.returncode != DIED:  # as it was asked to
                told = json.loads(said)
                self.refusals += told["refusals"]
                self.longest = max(self.longest, told["longest"])
                self._forked |= {*told["children"]}
                self.met.update(told["met"])
        self.writers.clear()

    def wait_for_people(self) -> dict[str, int]:
        """Return how often they did what, and met what."""
        said = self.people.communicate(timeout=900)[0]
        return dict(json.loads(said))

    def writers_ended(self) -> bool:
        return all(writer.poll() is not None for writer in self.writers)

    def write(
        self, kind: str, payload: dict[str, Any], key: str | None = None, queue: str | None = None
    ) -> str:
        """Write one event in this process; return its id.

        This process knows no queues, so the event waits in ``default`` unless ``queue`` is given.
        """
        import django_outbox as outbox
        from django_outbox.models import OutboxEvent
        from tests.faults.models import Intent

        with transaction.atomic():
            event_id = outbox.write(f"fault.{kind}", payload, key=key)
            assert event_id is not None
            if kind == "damaged":
                OutboxEvent.objects.filter(pk=event_id).update(payload='{"cut')
            if queue is not None:
                OutboxEvent.objects.filter(pk=event_id).update(queue=queue)
            Intent.objects.create(
                event_id=event_id,
                kind=kind,
                key=key,
                writer=os.getpid(),
                n=next(self._numbers),
                at=time.monotonic(),
            )
        return event_id

    def put(self, count: int, kind: str, payload: dict[str, Any] | None = None) -> list[str]:
        """Put in that many due events, faster than they can be written; return their ids."""
        from tests.table import insert

        ids = insert(count, event_type=f"fault.{kind}", payload=json.dumps(payload or {}))
        self._intend(kind, ids)
        return ids

    def turn_into(self, kind: str, ids: Sequence[str]) -> None:
        """Make events that were put in, and that nobody has leased, events of another kind."""
        from django_outbox.models import OutboxEvent
        from tests.faults.models import Intent

        for first in range(0, len(ids), 500):
            some = {"pk__in": ids[first : first + 500]}
            OutboxEvent.objects.filter(**some).update(event_type=f"fault.{kind}")
            Intent.objects.filter(**some).update(kind=kind)

    def _intend(self, kind: str, ids: Sequence[str]) -> None:
        from tests.faults.models import Intent
        from tests.table import multiply

        first = Intent(
            event_id=ids[0],
            kind=kind,
            writer=os.getpid(),
            n=next(self._numbers),
            at=time.monotonic(),
        )
        multiply(first, ids[1:])

    def put_dead(self, count: int) -> list[str]:
        """Put in that many events that are dead since an hour; return their ids."""
        from tests.table import insert, now

        ended = now() - timedelta(hours=1)
        ids = insert(
            count,
            due=None,
            event_type="fault.plain",
            status=3,
            done_at=ended,
            attempts=10,
            last_error="ConnectionError: the receiver was away",
        )
        self._intend("plain", ids)
        return ids

    def alive(self, kinds: Collection[str]) -> int:
        """How many events of these kinds are not dead."""
        from django_outbox.models import OutboxEvent
        from tests.faults.models import Intent

        ids = Intent.objects.filter(kind__in=kinds).values("event_id")
        return OutboxEvent.objects.filter(pk__in=ids).exclude(status=3).count()

    def wrote(self) -> set[int]:
        """The processes that wrote events."""
        from tests.faults.models import Intent

        return {*Intent.objects.values_list("writer", flat=True)}

    def wait_until_started(self, ids: Collection[str]) -> None:
        wait_until(lambda: {*ids} <= self.started(), within=60, what="their listeners began")

    def wait_until_logged(self, text: str, times: int) -> None:
        wait_until(lambda: len(self.logged(text)) >= times, within=60, what=f"{text} in the log")

    def wait_for_a_start(self, ids: Collection[str], offset: int) -> int:
        """Wait until one of these begins, said after that place in the file; return its process."""

        def found() -> int | None:
            lines = witness.heard(self.witness, offset)
            return next((e.pid for e in lines if e.phase == "start" and e.id in ids), None)

        return int(wait_until(found, within=60, what="one of their listeners began"))

    def started(self) -> set[str]:
        """The events whose listener has begun at least once."""
        return {line.id for line in witness.heard(self.witness) if line.phase == "start"}

    def ended_well(self) -> set[str]:
        """The events whose listener has come to its end."""
        return {line.id for line in witness.heard(self.witness) if line.phase == "end"}

    def hot(self) -> list[int]:
        """Return the process of each run that began with an event written there."""
        lines = witness.heard(self.witness)
        return [line.pid for line in lines if line.phase == "start" and line.source == "hot"]

    def replay_the_dead(self) -> None:
        """Replay what is dead, until everything has ended well."""
        from django_outbox.models import OutboxEvent

        self.heal()
        dead = OutboxEvent.objects.dead().values_list("pk", "event_id")
        until = time.monotonic() + self.patience
        while (rows := dict(dead.all())) and time.monotonic() < until:
            with people.doing(self.diary, "replay", [*rows.values()]):
                OutboxEvent.objects.filter(pk__in=rows).replay()
            self.settle_down()

    def longest_wait(self) -> float:
        """Seconds that an event waited at most."""
        evidence = self.evidence()
        return oracle.latencies(evidence, oracle.executions(evidence, oracle.Verdict()))[-1]

    def running(self, worker: psutil.Popen) -> bool:
        """Say whether a worker has told that it runs."""
        return any(f" {worker.pid} INFO worker started" in line for line in self.logged("started"))

    def began(self, pid: int) -> float:
        """When a worker told that it runs."""
        return next(
            line.at
            for line in self.told()
            if line.pid == pid and line.text.startswith("worker started")
        )

    def wait_until_they_run(self) -> None:
        wait_until(lambda: all(map(self.running, self.workers)), within=60, what="the workers run")

    def told(self) -> list[log.Said]:
        text = self.log.read_text()
        for before, title in self.formerly.items():
            text = text.replace(repr(before), repr(title))
        return log.read(text)

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if text in line]

    # -- faults ----------------------------------------------------------------------------------

    @contextmanager
    def fault(self, kind: str, *struck: psutil.Popen) -> Iterator[None]:
        """Note a fault that begins and ends with the block."""
        at = time.monotonic()
        yield
        pids = frozenset(each.pid for each in struck)
        self.faults.append(Fault(kind=kind, at=at, until=time.monotonic(), pids=pids))

    def kill(self, number: int) -> None:
        """End a worker as a power cut would, and start another in its place."""
        worker = self.workers[number]
        with self.fault("kill", worker):
            worker.kill()
            worker.wait()
        self.workers[number] = self.start_another(worker)
        time.sleep(0.1)  # a claim that the server was executing may still commit
        with suppress(Error):  # of a database that is away, too
            self.faults[-1] = replace(self.faults[-1], held=held_by(worker.pid))

    def roll(self, number: int, *arguments: str, **environment: str) -> float:
        """Ask a worker to end, note its exit code, start another; return the seconds to its end.

        The other one has the same arguments and environment, unless some are given.
        """
        worker, began = self.workers[number], time.monotonic()
        worker.send_signal(signal.SIGTERM)
        self.exits[worker.pid] = worker.wait(END)
        took = time.monotonic() - began
        arguments = arguments or self._arguments[worker.pid]
        environment = environment or self._environments[worker.pid]
        self.workers[number] = self.start_worker(*arguments, **environment)
        return took

    def take_over(self, number: int, ids: Collection[str]) -> int:
        """Take events from a worker, as another does that takes it for lost, and is lost itself.

        They are rescued when their leases end. Return how many were taken. The worker does not
        notice before it settles or renews them, so the fault lasts for a lease.
        """
        from django_outbox.models import OutboxEvent

        pid = self.workers[number].pid
        with self.fault("take over", self.workers[number]):
            held = OutboxEvent.objects.filter(pk__in=ids, locked_by__contains=f"-{pid}-")
            taken = held.update(locked_by="another-0-0")
        until = self.faults[-1].until + self.outbox["LEASE"]
        self.faults[-1] = replace(self.faults[-1], until=until, held=frozenset(ids))
        return taken

    def hand_over(self, number: int) -> int:
        """Ask a worker to end that cannot finish what it runs; return its exit code."""
        worker = self.workers[number]
        with self.fault("SIGTERM"):  # explains nothing: what is handed back says so itself
            worker.send_signal(signal.SIGTERM)
            code = int(worker.wait(END))
        self.ended[worker.pid] = clock.now()
        self.workers[number] = self.start_another(worker)
        return code

    def handed_back_by(self, pid: int) -> int:
        """How many events a worker handed back when it was stopped."""
        return sum(pid in each.pids for each in log.hand_backs(self.told(), {}))

    def suspend(
        self, number: int, seconds: float, until: Callable[[], bool] = lambda: True
    ) -> None:
        """Stop a worker as a suspended machine would: its monotonic clock stands still meanwhile.

        It goes on after so many ``seconds``, or later, once ``until()`` is true.

        On SQLite it may hold the one write lock, as with ``pause``.
        """
        worker = self.workers[number]
        still = self._stood_still[worker.pid]
        struck = self.workers if self.server is None else [worker]
        with self.fault("suspend", *struck):
            worker.suspend()
            began = clock.now()
            time.sleep(seconds)  # how long the fault lasts
            with suppress(AssertionError):
                wait_until(until, within=20)
            before = struct.unpack("d", still.read_bytes())[0]
            with still.open("r+b") as file:
                file.write(struct.pack("d", before + clock.now() - began))
        worker.resume()

    def place_of(self, event_id: str) -> int | None:
        """Return the place of the worker in which an event runs now; None if it runs nowhere."""
        found = witness.running(witness.heard(self.witness))
        pids = [worker.pid for worker in self.workers]
        pid = found.get(event_id)
        return pids.index(pid) if pid in pids else None

    def wait_until_busy(self, number: int) -> None:
        """Wait until an event runs in a worker."""
        pid = self.workers[number].pid
        wait_until(
            lambda: pid in witness.running(witness.heard(self.witness)).values(),
            within=60,
            what="an event runs in the worker",
        )

    def wait_until_running(self, ids: Collection[str]) -> None:
        """Wait until each of these runs in a worker that was not replaced."""
        wait_until(
            lambda: all(self.place_of(each) is not None for each in ids),
            within=60,
            what="their listeners run again",
        )

    def heal(self) -> None:
        """Let all end that goes on until then."""
        witness.healed(self.witness).touch()

    def trouble(self, how: str) -> None:
        """Have the listener in trouble fail, hang or die from now on; empty: it is well."""
        witness.troubled(self.witness).write_text(how)

    def one_that_runs(self) -> int:
        """Return the place of a worker that has started: one that has not holds nothing."""

        def running() -> list[int]:
            return [n for n, worker in enumerate(self.workers) if self.running(worker)]

        return self.luck.choice(wait_until(running, within=60, what="a worker runs"))

    def replace_the_dead(self) -> int:
        """Start workers in the place of those that ended by themselves; return how many."""
        dead = 0
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                with self.fault("crash", worker):
                    self.workers[number] = self.start_another(worker)
                dead += 1
        return dead

    def replace_the_worn_out(self) -> int:
        """Start workers in the place of those that hanging threads ended; return how many."""
        ended = [n for n, worker in enumerate(self.workers) if worker.poll() is not None]
        for number in ended:
            worker = self.workers[number]
            self.ended[worker.pid] = clock.now()
            assert worker.returncode == 1, f"a worker ended with {worker.returncode}"
            with self.fault("worn out"):  # explains nothing
                self.workers[number] = self.start_another(worker)
        return len(ended)

    def misplace(self, most: int, queues: Sequence[str]) -> int:
        """Put pending rows and streams into queues at random; return how many.

        So a writer leaves them that does not know their listeners, as one of an older release.
        """
        from django_outbox.models import OutboxEvent, OutboxStream

        moved = 0
        with self.fault("misplace"):  # explains nothing
            for rows in (OutboxEvent.objects.pending(), OutboxStream.objects.exclude(due_at=None)):
                ids = sorted(rows.values_list("pk", flat=True))
                ids = sorted(self.luck.sample(ids, min(most, len(ids))))
                for each in ids:  # one at a time: workers lock them in another order
                    with suppress(Error):
                        queue = self.luck.choice(queues)
                        moved += rows.filter(pk=each).update(queue=queue)
        return moved

    def terminate_sessions(self) -> int:
        """Have the server end every session but our own."""
        with self.fault("terminate"):
            return terminate_other_sessions()

    def wait_for_delivery(self, within: float = 60.0) -> float:
        """Write an event and wait until a listener says something; return the seconds it took."""
        size, started = self.witness.stat().st_size, time.monotonic()
        self.write("plain", {})
        wait_until(lambda: self.witness.stat().st_size > size, within=within, what="a line")
        return time.monotonic() - started

    def pause(self, number: int, seconds: float) -> None:
        """Stop a worker and have it go on later.

        On SQLite it may hold the one write lock meanwhile: then no lease of anybody can be renewed.
        """
        worker = self.workers[number]
        struck = self.workers if self.server is None else [worker]
        with self.fault("pause", *struck):
            worker.suspend()
            time.sleep(seconds)  # how long the fault lasts
        worker.resume()

    def restart(self, how: str, outage: float) -> None:
        """Stop the database server and start it again."""
        assert self.server is not None
        connection.close()
        cpu, lines = self._cpu(), len(self.log.read_text().splitlines())
        with self.fault(f"restart {how}"):
            self.server.stop(how)
            began = time.monotonic()
            time.sleep(outage)  # how long the fault lasts
            spent = (self._cpu() - cpu) / (time.monotonic() - began) / len(self.workers)
            said = len(self.log.read_text().splitlines()) - lines
            self.server.start()
        self.spent.append(spent)
        self.said.append(said / outage / len(self.workers))
        self.back.append(self.wait_for_delivery())

    def _cpu(self) -> float:
        """Seconds of processor time that the workers have used."""
        times = [worker.cpu_times() for worker in self.workers]
        return float(sum(each.user + each.system for each in times))

    def schedule(self, strikes: int, pause: tuple[float, float]) -> Iterator[int]:
        """Yield at the times of a schedule that the seed alone decides; it is shown first."""
        pauses = [self.luck.uniform(*pause) for _ in range(strikes)]
        print(f"schedule of {strikes}: {[round(each, 2) for each in pauses]}", file=sys.stderr)
        for number, seconds in enumerate(pauses):
            time.sleep(seconds)  # the faults' own time-table
            yield number

    # -- the end ---------------------------------------------------------------------------------

    def settle_down(self, *, but: int = 0) -> None:
        """Wait until nothing is pending, ``but`` so many; what stays is counted as stuck."""
        with suppress(AssertionError):
            wait_until(lambda: asked(lambda: self.is_quiet(but=but)), within=self.patience)

    def nothing_disturbed(self, *, locked: bool = False) -> None:
        """The database was well all the time: nobody may have met an error of its own.

        ``locked``: but for locks of a worker that was stopped in the middle of a transaction.
        """
        if self.server is not None:  # SQLite has one writer at a time, and says so
            failed = self.logged(" failed error=")
            if locked:
                failed = [line for line in failed if "lock" not in line.lower()]
            self.measure(ERRORS, len(failed), most=0)
            self.figures[-1].examples = failed[:5]  # the log goes away with the run
            self.measure("business transactions refused", len(self.refusals), most=0)
            self.figures[-1].examples = self.refusals[:5]

    def is_quiet(self, *, but: int = 0) -> bool:
        from django_outbox.models import OutboxEvent, OutboxStream

        time.sleep(0.1)  # between two looks, which read the whole table
        leased = OutboxStream.objects.exclude(locked_by=None).exists()
        return not leased and OutboxEvent.objects.pending()[: but + 1].count() <= but

    def stop_workers(self) -> None:
        """Ask every worker to end; its exit code must be 0."""
        if not self.workers:
            return
        with suppress(AssertionError):  # before that a signal simply ends the process
            self.wait_until_they_run()
        for worker in self.workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            with suppress(psutil.TimeoutExpired):
                self.exits[worker.pid] = worker.wait(END)
        bad = [code for code in self.exits.values() if code]
        self.measure("exit codes other than 0", len(bad), most=0)
        self.workers.clear()

    def close(self) -> None:
        """End every group that was started, whatever became of its leader."""
        for process in self._all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END)

    def evidence(self) -> Evidence:
        said = self.told()
        given_up = [*log.hand_backs(said, self.ended), *log.write_offs(said)]
        return Evidence(
            **collected(),
            lines=[
                replace(each, listener=self.formerly.get(each.listener, each.listener))
                for each in witness.heard(self.witness)
            ],
            faults=sorted([*self.faults, *given_up], key=lambda fault: fault.at),
            rescues=[*log.rescues(said)],
            pids={process.pid for process in self._all} | self._forked,
            deeds=[Deed(**each) for each in people.read(self.diary)],
            lease=self.outbox["LEASE"],
            mortal=self.mortal,
            relayed=self.relayed,
            stored=self.stored,
            listeners=self.listeners,
            unordered=self.unordered,
            attempts=self.outbox["RETRY"]["max_attempts"],
            purged=self.purges,
        )


def held_by(pid: int) -> frozenset[str]:
    """The events, keys and slots that a worker has leased."""
    from django_outbox.models import OutboxEvent, OutboxStream

    mine = {"locked_by__contains": f"-{pid}-"}
    events = OutboxEvent.objects.filter(**mine).values_list("event_id", "stream")
    names = [name for event_id, stream in events for name in (event_id, slot_of(stream))]
    return frozenset([*names, *OutboxStream.objects.filter(**mine).values_list("key", flat=True)])


def slot_of(stream: str | None) -> str:
    return (stream or "").rpartition(":")[2]


def asked(question: Callable[[], bool]) -> bool:
    """Ask a database that may be away."""
    try:
        return question()
    except Error:
        connection.close()
        return False


def collected() -> dict[str, Any]:
    """What the database has to say at the end."""
    from django.db.models import Case, When

    from django_outbox.models import OutboxEvent
    from tests.faults.models import Booking, Intent

    names = ("event_id", "kind", "key", "writer", "n", "at", "due", "begun", "cancelled")
    intents = {row["event_id"]: oracle.Intent(**row) for row in Intent.objects.values(*names)}
    columns = ("event_id", "status", "attempts", "rescues", "key", "seq", "locked_by")
    rows = {}
    # The rows of an event by its listeners: one that is dead stands for it, and one that waits.
    by_fate = OutboxEvent.objects.order_by(
        Case(When(status=1, then=0), When(status=3, then=1), default=2)
    )
    for row in by_fate.values(*columns).iterator():
        leased = row.pop("locked_by") is not None
        rows[row["event_id"]] = oracle.Row(**row, leased=leased)
    bookings = Counter(Booking.objects.values_list("event_id", flat=True))
    return {"intents": intents, "rows": rows, "bookings": bookings}
