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
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import django
from django.db import Error, IntegrityError, connection, transaction
from django.db.models import F, Q, Value
from django.db.models.functions import Least

from tests.faults import witness

DIED = 137  # the exit code of a process that SIGKILL ended, as a shell sees it
DELIVERING = 60.0  # seconds until a process has delivered an event of its own
LONG = ("plain", "slot")  # kinds whose listener may take long
REMINDED = 2  # listeners of a reminder
SOON, AROUND = 0.1, 0.01  # seconds until what is changed is due, and from there to the change


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
    slow_for: float = 0.03  # seconds, at most
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
    changed: float = 0.0  # share of turns that cancel or reschedule what is about to fall due
    slots: int = 0
    slotted: float = 0.0  # share of the events that go to a slot
    slot_delay: float = 0.0  # seconds, of each of these
    forks: int = 0  # children, made half-way, that go on with writing beside their parent


@dataclass
class Writer:
    plan: Plan
    written: int = 0
    committed: int = 0
    longest: float = 0.0  # seconds of a transaction
    refusals: list[str] = field(default_factory=list)  # what the database said
    intents: list[Any] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)  # how often it did what

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
        except Error as error:
            self.refusals.append(f"{error}")  # or committed without a reply
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
                time.sleep(luck.random() * plan.slow_for)  # a slow business transaction
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
        work = plan.long_work if luck.random() < plan.long and kind in LONG else plan.work
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
        self.written += 1
        when = self.when(kind, key)
        delay, begun = when.get("deliver_after", 0.0), time.monotonic()
        event_id = outbox.write(f"fault.{kind}", payload, **when)
        assert event_id is not None
        self.intents.append(
            Intent(
                event_id=event_id,
                kind=kind,
                key=key,
                writer=os.getpid(),
                n=self.written,
                due=begun + delay if delay else 0.0,
                begun=begun if delay else 0.0,
            )
        )
        return event_id

    def when(self, kind: str, key: str | None) -> dict[str, Any]:
        """Return what ``write`` is told of the order, the time and the name of an event."""
        if key is None and self.luck.random() < self.plan.delayed:
            return {"deliver_after": self.luck.uniform(*self.plan.delays)}
        return {"key": key}


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


class Changing(Writer):
    """Cancels and reschedules events when they are about to fall due, whoever wrote them."""

    def transact(self) -> None:
        if self.luck.random() < self.plan.changed and (event := self.about_to_fall_due()):
            time.sleep(max(event.due + self.luck.gauss(0, AROUND) - time.monotonic(), 0))
            self.change(event)
        else:
            super().transact()

    def choose(self) -> tuple[str, str | None]:
        if self.luck.random() < self.plan.slotted:
            # A busy one for the whole run, and others of a second: what is lost last, is not made
            # up for by what is written later.
            number = self.luck.randrange(2 * self.plan.slots)
            brief = f"{int(time.monotonic())}-{number}"
            return "slot", f"slot-{brief if number < self.plan.slots else 'busy'}"
        return "reminder", super().choose()[1]

    def when(self, kind: str, key: str | None) -> dict[str, Any]:
        if kind == "slot":
            return {"coalesce": key, "deliver_after": self.plan.slot_delay}
        given: dict[str, Any] = {"key": key, "unique_key": f"{os.getpid()}:{self.written}"}
        if key is None:  # an event with a key waits for those before it
            given["deliver_after"] = self.luck.uniform(*self.plan.delays)
        return given

    def about_to_fall_due(self) -> Any:
        from tests.faults.models import Intent

        now = time.monotonic()
        soon = Q(due__range=(now, now + SOON)) | Q(due=0, at__gt=now - SOON)
        events = Intent.objects.filter(soon, kind="reminder", cancelled=0)
        return events.order_by("?").first()

    def change(self, event: Any) -> None:
        """Change an event, and note with it what that reported."""
        import django_outbox as outbox
        from tests.faults.models import Intent

        luck, name = self.luck, {"event_id": event.pk}
        if luck.random() < 0.5:
            name = {"unique_key": f"{event.writer}:{event.n}"}
        verb = luck.choice(("cancelled", "rescheduled"))
        undone, intent = luck.random() < self.plan.rollback, Intent.objects.filter(pk=event.pk)
        with transaction.atomic():
            if verb == "cancelled":
                count = outbox.cancel(**name)
                intent.update(cancelled=F("cancelled") + count)
            else:
                delay = luck.uniform(*self.plan.delays)
                due = Value(time.monotonic() + delay)
                count = outbox.reschedule(**name, deliver_after=delay)
                if count:  # none of these has begun; of the others, one may have
                    intent.update(due=due if count == REMINDED else Least(F("due"), due))
            if luck.random() < self.plan.slow:
                time.sleep(luck.random() * self.plan.slow_for)
            transaction.set_rollback(undone)
        self.met[f"{verb}, then undone" if undone else f"{verb} {count}"] += 1


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
    kind = Storm if plan.storm else Forking if plan.forks else Changing if plan.changed else Writer
    writer = kind(plan)
    writer.run()
    children = writer.children if isinstance(writer, Forking) else []
    if isinstance(writer, Forking):
        writer.wait()
    told: dict[str, Any] = {
        "committed": writer.committed,
        "refusals": writer.refusals,
        "longest": writer.longest,
    }
    told["met"] = writer.met
    print(json.dumps({**told, "children": children}))


if __name__ == "__main__":
    main()
