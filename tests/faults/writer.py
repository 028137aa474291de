"""A business process: ``python -m tests.faults.writer PLAN`` writes as the plan (JSON) says.

Each transaction writes one to three events and, beside each, its intent. Whatever the database
answers, the table of intents tells afterwards what has committed.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import django
from django.db import Error, IntegrityError, connection, transaction

from tests.faults import witness

DIED = 137  # the exit code of a process that SIGKILL ended, as a shell sees it
DELIVERING = 60.0  # seconds until a process has delivered an event of its own


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one writer writes."""

    events: int
    seed: str
    rate: float = 0.0  # events a second; 0: as fast as it goes
    kinds: tuple[str, ...] = ()  # of the events, each as likely; none: plain and booked ones
    keys: int = 0
    keyed: float = 0.0  # share of the events with a key
    booked: float = 0.0  # share of those without that go to the atomic listener
    follow: float = 0.0  # share of those without that make their listener write
    fail: float = 0.0  # share that fails once
    later: float = 0.0  # share that asks for a retry later
    defer: float = 0.0  # share that is deferred now and then
    slow: float = 0.0  # share of transactions that stay open for a while
    rollback: float = 0.0  # share of transactions that are undone
    work: tuple[float, float] = (0.0, 0.002)  # seconds that a listener takes, from and to
    long: float = 0.0  # share whose listener takes ``long_work`` instead
    long_work: tuple[float, float] = (0.0, 0.0)
    delayed: float = 0.0  # share of those without a key that are due later
    delays: tuple[float, float] = (0.2, 2.0)
    batch: int = 3  # events of one transaction, at most
    dies: bool = False  # in its last transaction, before the commit
    storm: bool = False  # of transactions undone in every way
    early: float = 0.0  # share whose listener fails until ``early_for`` seconds have passed
    early_for: float = 1.0
    calls: int = 0  # the port of a receiver that plain listeners call
    partner: int = 0  # the port of one that listeners of the queue ``hooks`` call
    filler: int = 0  # characters that a payload has more
    forks: int = 0  # children, made half-way, that go on with writing beside their parent


@dataclass
class Writer:
    plan: Plan
    written: int = 0
    committed: int = 0
    refused: int = 0
    longest: float = 0.0  # seconds of a transaction
    intents: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.luck = random.Random(self.plan.seed)

    def run(self) -> None:
        started = time.monotonic()
        while self.committed < self.plan.events:
            if self.plan.rate:
                ahead = self.committed / self.plan.rate - (time.monotonic() - started)
                time.sleep(max(ahead, 0))  # the load is steady
            self.try_once()

    def try_once(self) -> None:
        began = time.monotonic()
        try:
            self.transact()
            self.longest = max(self.longest, time.monotonic() - began)
        except Error:
            self.refused += 1  # or committed without a reply
            connection.close()
            time.sleep(0.1)  # the database is away, or tired

    def go_on_until_it_delivers(self, since: int) -> None:
        """Write more until this process delivers an event of its own.

        ``since`` is the size of the witness's file before. Its share of the events is written in
        less than a second, and a worker on a busy machine may begin later than that; others, which
        deliver already, then have them all.
        """
        path, until = Path(os.environ[witness.VARIABLE]), time.monotonic() + DELIVERING
        while time.monotonic() < until:
            lines = witness.heard(path, since)
            if any(line.pid == os.getpid() and line.source == "hot" for line in lines):
                return
            self.try_once()
            time.sleep(1 / self.plan.rate)

    def transact(self) -> None:
        from tests.faults.models import Intent

        luck, plan = self.luck, self.plan
        undone = luck.random() < plan.rollback
        self.intents = []
        with transaction.atomic():
            chosen = [self.choose() for _ in range(luck.randint(1, plan.batch))]
            # Two that take two keys in opposite order would deadlock, as with any rows.
            for kind, key in sorted(chosen, key=lambda each: each[1] or ""):
                self.write(kind, key)
            if luck.random() < plan.slow:
                time.sleep(luck.random() * 0.03)  # a slow business transaction
            for each in self.intents:
                each.at = time.monotonic()
            Intent.objects.bulk_create(self.intents)
            transaction.set_rollback(undone)
            if plan.dies and self.committed + len(self.intents) >= plan.events:
                os._exit(DIED)
        self.committed += 0 if undone else len(self.intents)

    def choose(self) -> tuple[str, str | None]:
        if self.plan.kinds:
            key = f"key-{self.luck.randrange(self.plan.keys)}"
            return self.luck.choice(self.plan.kinds), (
                key if self.luck.random() < self.plan.keyed else None
            )
        if self.luck.random() < self.plan.keyed:
            return "plain", f"key-{self.luck.randrange(self.plan.keys)}"
        return ("booked" if self.luck.random() < self.plan.booked else "plain"), None

    def write(self, kind: str, key: str | None) -> str:
        import django_outbox as outbox
        from tests.faults.models import Intent

        luck, plan = self.luck, self.plan
        # An atomic listener works in a transaction, which on SQLite is everybody's.
        work = plan.long_work if luck.random() < plan.long and kind == "plain" else plan.work
        payload: dict[str, Any] = {"seconds": round(luck.uniform(*work), 4)}
        if luck.random() < plan.fail:
            payload["fail"] = 1
        if luck.random() < plan.later:
            payload.update(fail=1, later=True)
        if luck.random() < plan.defer:
            payload["defer"] = True
        if luck.random() < plan.early:
            payload["until"] = time.monotonic() + plan.early_for
        if plan.filler:
            payload["filler"] = "x" * plan.filler
        if plan.calls:
            payload["calls"] = plan.calls
        if plan.partner:
            payload["partner"] = plan.partner
        if key is None and luck.random() < plan.follow:
            payload["follow"] = True
        when: dict[str, Any] = {"key": key}
        due = 0.0
        if key is None and luck.random() < plan.delayed:
            delay = luck.uniform(*plan.delays)
            when, due = {"deliver_after": delay}, time.monotonic() + delay
        event_id = outbox.write(f"fault.{kind}", payload, **when)
        assert event_id is not None
        self.written += 1
        self.intents.append(
            Intent(
                event_id=event_id, kind=kind, key=key, writer=os.getpid(), n=self.written, due=due
            )
        )
        return event_id


class Forking(Writer):
    """A pre-forking server: it has used the outbox when it makes its children."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.children: list[int] = []

    def run(self) -> None:
        whole = self.plan
        self.plan = replace(whole, events=whole.events // 2)
        super().run()
        connection.close()  # as such a server does: two processes must not share one
        rest = whole.events - self.plan.events
        said = Path(os.environ[witness.VARIABLE]).stat().st_size
        for number in range(whole.forks + 1):
            share = replace(whole, events=rest // (whole.forks + 1), seed=f"{whole.seed}-{number}")
            if number == whole.forks:  # the parent
                own = Writer(share, written=self.written)
                own.run()
                own.go_on_until_it_delivers(said)
                self.committed = whole.events
            elif child := os.fork():
                self.children.append(child)
            else:
                own = Writer(share)
                own.run()
                own.go_on_until_it_delivers(said)
                sys.exit(0)  # with everything that is registered for the exit

    def wait(self) -> None:
        for child in self.children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == 0, f"a child ended with {code}"


class Storm(Writer):
    """Half of its transactions, as many as the plan has events, are undone, wholly or in part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ways = (
            self.commit,
            self.fail,
            self.set_rollback,
            self.nest,
            self.undo_savepoint,
            self.call_back,
            self.break_constraint,
            self.forget_transaction,
        )

    def transact(self) -> None:
        with suppress(Undone, ReferenceError):
            self.luck.choice(self.ways)()
        self.committed += 1

    def intend(self) -> None:
        """Write one event and, in the same block, its intent."""
        self.intents = []
        self.write(*self.choose())
        self.intents[0].at = time.monotonic()
        self.intents[0].save(force_insert=True)

    def commit(self) -> None:
        with transaction.atomic():
            self.intend()

    def fail(self) -> None:
        with transaction.atomic():
            self.intend()
            raise Undone

    def set_rollback(self) -> None:
        with transaction.atomic():
            self.intend()
            transaction.set_rollback(True)

    def nest(self, depth: int = 3) -> None:
        """Three savepoints in each other, of which any may be undone."""
        with transaction.atomic():
            self.intend()
            if depth:
                with suppress(Undone):
                    self.nest(depth - 1)
            if self.luck.random() < 0.3:
                raise Undone

    def undo_savepoint(self) -> None:
        """What Django's own callbacks survive: they do not know of it."""
        with transaction.atomic():
            self.intend()
            savepoint = transaction.savepoint()
            self.intend()
            transaction.savepoint_rollback(savepoint)

    def call_back(self) -> None:
        """Somebody else's callbacks fail after the commit, before ours and after."""
        robust = self.luck.random() < 0.5
        with transaction.atomic():
            transaction.on_commit(self.stumble, robust=robust)
            self.intend()
            transaction.on_commit(self.stumble, robust=not robust)

    def stumble(self) -> None:
        raise ReferenceError("a callback of somebody else")

    def break_constraint(self) -> None:
        """The database refuses the commit, or, on MariaDB, the statement before it."""
        from tests.faults.models import Charge

        with suppress(IntegrityError), transaction.atomic():
            self.intend()
            Charge.objects.create(account_id=987654321)

    def forget_transaction(self) -> None:
        import django_outbox as outbox

        with suppress(outbox.NoActiveTransaction):
            outbox.write("fault.plain", {})
            raise AssertionError("write() outside of a transaction was not refused")


class Undone(Exception):
    """Undoes the transaction that it leaves."""


def main() -> None:
    logging.disable(logging.ERROR)  # Django's, of callbacks that fail as they should
    django.setup()
    plan = Plan(**json.loads(sys.argv[1]))
    writer = Storm(plan) if plan.storm else Forking(plan) if plan.forks else Writer(plan)
    writer.run()
    children = writer.children if isinstance(writer, Forking) else []
    if isinstance(writer, Forking):
        writer.wait()
    told = {"committed": writer.committed, "refused": writer.refused, "longest": writer.longest}
    print(json.dumps({**told, "children": children}))


if __name__ == "__main__":
    main()
