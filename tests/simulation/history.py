"""Plays one history: starts workers, writes events, makes things fail, waits for the end."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.db import Error, connections, transaction

import django_outbox as outbox
from django_outbox.events import new_id
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause
from tests.simulation import listeners
from tests.simulation.database.base import server
from tests.simulation.doorbell import Touched
from tests.simulation.evidence import Rules, Tables
from tests.simulation.listeners import TYPES, Stage
from tests.simulation.oracle import Oracle
from tests.simulation.places import UNSTORABLE, Places
from tests.simulation.plan import Plan
from tests.simulation.primitives import SimpleQueue
from tests.simulation.scheduler import START, Process, Stalled, Task, scheduler

END = 700.0  # virtual seconds after the last fault in which everything has to end
EXIT = 0.3  # seconds from the hand-back of a stopping worker to the end of its process
WRITERS = ("write", "person")  # threads whose statements are not the engine's
WRITING = ("INSERT", "UPDATE", "DELETE", "COMMIT", "BEGIN")


@dataclass(frozen=True)
class Outcome:
    """What became of one history."""

    plan: Plan
    violations: list[tuple[str, str]]
    digest: str
    lines: list[str] | None
    seconds: float  # of virtual time
    events: int
    calls: int


class History:
    """One history, played in the driver's thread."""

    def __init__(self, plan: Plan, path: str) -> None:
        self.plan, self.kind = plan, plan.kind
        self.chance = random.Random(f"history {plan.seed}")
        self.violations: list[tuple[str, str]] = []
        scheduler.violation = self.violate
        by_type, queues = listeners.titles()
        policy = plan.outbox["RETRY"]
        self.oracle = Stage.oracle = Oracle(
            Tables(path, scheduler.database_time),
            Rules(
                listeners=by_type,
                queues=queues,
                max_attempts=policy["max_attempts"],
                max_rescues=plan.outbox["MAX_RESCUES"],
                dead_blocks=plan.outbox["ON_DEAD"] == "block",
                failure_blocks=plan.outbox["STOP_ON_FIRST_FAILURE"],
                is_calm=plan.kind.is_calm,
            ),
            report=self.violate,
            clock=lambda: scheduler.now,
        )
        self.processes: list[Process] = []  # of workers, that live
        self.tasks: list[Task] = []  # of writers and people
        self.numbers = iter(range(1, 1000))
        self.faulty_until = scheduler.now + plan.seconds
        self.written = 0
        self.places = Places(plan.seed, self.is_started) if plan.kind.faulty_places else None

    def violate(self, rule: str, text: str) -> None:
        scheduler.trace("VIOLATION", rule, text)
        self.violations.append((rule, text))

    # -- processes -------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        number, skew = next(self.numbers), self.kind.skew
        return Process(
            name=f"{name}{number}",
            pid=1000 + number,
            rate=1 + self.chance.uniform(-skew, skew) / 2,
            offset=self.chance.uniform(-5000, 5000),
            wall_offset=self.chance.uniform(-2, 2),
        )

    def start_worker(self) -> None:
        process = self.process("worker")
        process.values["orders"] = SimpleQueue()
        self.processes.append(process)
        scheduler.spawn(lambda: self.run_worker(process), "main", process)

    def run_worker(self, process: Process) -> None:
        worker = outbox.Worker(purge=self.plan.seed % 3 == 0)
        process.values["worker"] = worker.id
        process.on_kill.append(lambda: self.oracle.killed(worker.id))
        try:
            worker.start()
        except Error:
            scheduler.kill(process)
        process.values["started"] = True
        process.values["orders"].get()
        self.oracle.stops(worker.id)
        scheduler.trace("stop")
        until = scheduler.monotonic() + worker.settings.DRAIN_TIMEOUT
        worker.finish(lambda: scheduler.monotonic() > until)
        worker.hand_back(1.0)
        scheduler.sleep(EXIT)
        scheduler.kill(process)

    def stop_worker(self, process: Process) -> None:
        process.values["orders"].put("stop")

    def suspend(self, process: Process, seconds: float) -> None:
        if process.suspended or not process.alive:
            return
        scheduler.suspend(process, seconds)
        worker = process.values.get("worker", "")
        scheduler.at(scheduler.now + seconds, lambda: self.oracle.wakes(worker))

    # -- faults of statements --------------------------------------------------------------------

    def set_faults(self) -> None:
        server.before = lambda sql: self.stall(sql, self.kind.slow_before, 0.0003)
        server.after = lambda sql: self.stall(sql, self.kind.slow_after, 0.0001)
        server.fails = self.failure
        server.loses_answer = lambda sql: self.goes_wrong(sql, self.kind.lost_answers)
        if self.places is not None:
            self.places.install()
            Touched.act = self.places.touch
            if self.plan.seed % 2:
                Stage.error = UNSTORABLE
        server.changed = lambda: self.oracle.look(
            scheduler.current.process.values.get("worker", "")
        )

    def is_faulty(self) -> bool:
        return scheduler.now < self.faulty_until and scheduler.current.process in self.processes

    def stall(self, sql: str, probability: float, usual: float) -> float:
        """Return how long a statement stalls."""
        usual *= scheduler.random.random()
        if not probability or not self.is_faulty() or scheduler.random.random() > probability:
            return usual
        if scheduler.current.name.endswith("heartbeat") and not self.kind.slow_heartbeat:
            return usual
        return scheduler.random.choice(self.kind.stalls)

    def failure(self, sql: str, params: Any, is_inside: bool) -> Exception | None:
        """Return what a statement raises in place of doing anything."""
        if self.places is not None and scheduler.current.name not in WRITERS:
            return self.places.statement(sql, params)
        if not is_inside and self.goes_wrong(sql, self.kind.failures):
            return sqlite3.OperationalError("the server failed")
        return None

    def is_started(self) -> bool:
        return self.is_faulty() and "started" in scheduler.current.process.values

    def goes_wrong(self, sql: str, probability: float) -> bool:
        if not probability or not self.is_faulty() or not sql.startswith(WRITING):
            return False
        return scheduler.random.random() < probability

    # -- events ----------------------------------------------------------------------------------

    def write_some(self) -> None:
        """Write one to three events in a transaction, in a worker's process or in another."""
        hot = [each for each in self.processes if each.alive and "worker" in each.values]
        if hot and self.chance.random() < self.kind.hot:
            process = self.chance.choice(hot)
        else:
            process = self.process("writer")
        events = [self.event() for _ in range(self.chance.choice([1, 1, 2, 3]))]
        self.write(process, events)

    def write(self, process: Process, events: list[tuple[str, dict[str, Any], Any]]) -> None:
        """Write events in a transaction, which may take long, be rolled back or fail."""
        self.written += len(events)
        holds, fails = self.chance.choice([0, 0, 0, 0.2]), self.chance.random() < 0.1
        late: dict[str, Any] = self.chance.choice([{}] * 5 + [{"deliver_after": 0.5}])

        def write() -> None:
            new_id.reset()
            try:
                with transaction.atomic():
                    for event_type, payload, place in events:
                        is_late = "key" not in place
                        outbox.write(event_type, payload, **place, **(late if is_late else {}))
                    scheduler.sleep(holds)
                    if fails:
                        raise Error("planned")
            except Error:
                scheduler.trace("not written")
            finally:
                connections.close_all()

        self.tasks.append(scheduler.spawn(write, "write", process))

    def event(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        chance, number = self.chance, next(self.numbers)
        payload = {
            "n": number,
            "act": chance.choice(self.kind.acts),
            "seconds": chance.choice(self.kind.durations),
        }
        keyed = chance.random() < self.kind.keyed
        place = {"key": f"key{chance.randrange(self.kind.keys)}"} if keyed else {}
        if not keyed and self.kind.slotted and chance.random() < self.kind.slotted:
            place = {"coalesce": f"slot{chance.randrange(2)}"}
        return TYPES[chance.choice(self.kind.types)], payload, place

    # -- what people and operators do ------------------------------------------------------------

    def disturb(self, passed: float) -> None:
        """Make things fail, as probable as they are in the seconds that have ``passed``."""
        kind, chance, workers = self.kind, self.chance, [*self.processes]
        acts: list[tuple[float, Callable[[Process], None]]] = [
            (kind.kills, scheduler.kill),
            (kind.suspensions, lambda each: self.suspend(each, chance.uniform(0.3, 7.0))),
            (kind.deploys, self.stop_worker),
            (kind.pauses, lambda each: self.as_person(self.pause)),
            (kind.replays, lambda each: self.as_person(self.replay)),
            (kind.outages, lambda each: self.outage()),
        ]
        for rate, act in acts:
            if rate and workers and chance.random() < rate * passed:
                act(chance.choice(workers))

    def as_person(self, act: Callable[[], None]) -> None:
        """Do something in a process of its own; it is left if the database refuses it."""

        def run() -> None:
            try:
                act()
            except Error:
                scheduler.trace("refused")
            finally:
                connections.close_all()

        self.tasks.append(scheduler.spawn(run, "person", self.process("person")))

    def pause(self) -> None:
        kind, name = self.chance.choice(self.kind.paused)
        OutboxPause.objects.pause(kind, name)
        scheduler.sleep(self.chance.uniform(*self.kind.paused_for))
        steps = OutboxPause.objects.filter(kind=kind, name=name).resume_batches()
        for _ in steps:
            if self.chance.random() < self.kind.interrupted:
                break

    def resume_all(self) -> None:
        OutboxPause.objects.exclude(kind="breaker").resume()

    def replay(self) -> None:
        """Replay what is dead, in this process or by workers, either of which may be killed."""
        dead, rate = OutboxEvent.objects.dead(), self.chance.choice([None, "20/s", "2/s"])
        if self.chance.random() < 0.3:
            OutboxOperation.objects.begin("replay", dead, rate=rate)
            return
        process, soon = scheduler.current.process, scheduler.now + self.chance.uniform(0, 0.01)
        scheduler.at(soon, lambda: scheduler.kill(process))
        dead.replay(rate=rate)

    def outage(self) -> None:
        if Stage.mail_is_away:
            return
        Stage.mail_is_away = True
        scheduler.trace("outage")
        until = scheduler.now + self.chance.uniform(1.0, 6.0)
        scheduler.at(until, lambda: setattr(Stage, "mail_is_away", False))

    def poison(self) -> None:
        event_type, payload, place = self.event()
        payload |= {"act": "poison", "seconds": 0.05}
        self.write(self.process("writer"), [(event_type, payload, place)])

    # -- the course ------------------------------------------------------------------------------

    def play(self) -> None:
        self.set_faults()
        for _ in range(self.plan.workers):
            self.start_worker()
        for _ in range(self.kind.poison):
            scheduler.at(scheduler.now + self.chance.uniform(0, 4), self.poison)
        pause = self.plan.seconds / self.plan.events
        while scheduler.now < self.faulty_until:
            if self.written < self.plan.events:
                self.write_some()
            began = scheduler.now
            scheduler.sleep(self.chance.choice([0.0, 0.5, 1.0, 1.0, 2.5]) * pause)
            self.disturb(scheduler.now - began)
            self.replace_lost()
        self.settle_down()

    def replace_lost(self) -> None:
        for process in [each for each in self.processes if not each.alive]:
            self.processes.remove(process)
            scheduler.at(scheduler.now + self.chance.uniform(0.1, 1.0), self.start_worker)

    def settle_down(self) -> None:
        """Wait until everything has ended."""
        until = scheduler.now + END
        if self.kind.pauses:  # those whose resume the database refused
            scheduler.at(scheduler.now + 5.0, lambda: self.as_person(self.resume_all))
        while scheduler.now < until and not self.violations:
            scheduler.sleep(0.25)
            self.replace_lost()
            is_quiet = all(each.is_done or not each.process.alive for each in self.tasks)
            self.oracle.look("")
            table = self.oracle.table
            if is_quiet and not (self.oracle.pending or table.leases or table.open_replays):
                break
        scheduler.sleep(1.0)
        self.oracle.finish()


def play(plan: Plan, path: str, *, keep_lines: bool = False) -> Outcome:
    """Play a history on the database at ``path``, in this process, which can play no other."""
    scheduler.reset(plan.seed)
    scheduler.lines = [] if keep_lines else None
    scheduler.preemption = plan.preemption
    random.seed(f"engine {plan.seed}")
    server.reset()
    connections.settings["default"]["NAME"] = path
    settings.OUTBOX = plan.outbox
    setting_changed.send(sender=None, setting="OUTBOX", value=plan.outbox, enter=True)
    history = History(plan, path)
    try:
        history.play()
    except Stalled:
        history.violate("stalled", "every thread waits for ever")
    oracle = history.oracle
    return Outcome(
        plan,
        history.violations,
        scheduler.digest.hexdigest(),
        scheduler.lines,
        scheduler.now - START,
        len(oracle.table.events),
        len(oracle.calls),
    )
