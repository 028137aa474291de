"""Relays: brokers and workers are killed, stopped and cut off while events go to a broker."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import Sum

from tests.faults import clock, oracle, stored
from tests.faults.relay_brokers import (
    NO_PLACE,
    ODD,
    SQS,
    USUAL,
    Broker,
    Kafka,
    Nats,
    RabbitMQ,
    Redis,
    Webhook,
)
from tests.faults.rig import Rig
from tests.faults.scenarios.queues import waits
from tests.faults.scenarios.registry import ALL, scenario
from tests.relay import Relay
from tests.waiting import wait_until

SMALL = ("postgres",)  # what has to pass at every change; a broker takes seconds to start
QUEUE = "relay.broker"
KINDS = tuple(each.removeprefix("fault.") for each in (USUAL, ODD))
BATCH, THREADS = 100, 2  # messages of a call; threads of a relay in a process
LEASE = 3.0  # seconds: twice as long as anything is waited for
BURST = 1000  # events that are on their way when a broker is killed
# What an operator sees of a broker's outage, and not of a worker that was killed.
OF_BROKER = re.compile(r"\S+ \d+ (WARNING|ERROR|CRITICAL) (?!rescued |worker )")


@scenario(*ALL, small=SMALL)
def relays_redis(rig: Rig) -> None:
    """A relay to Redis, which is killed, stopped, cut off, full; workers are killed."""
    play(rig, Redis(rig.place))


@scenario(*ALL, small=SMALL)
def relays_rabbitmq(rig: Rig) -> None:
    """A relay to RabbitMQ, which is killed, stopped, cut off, full; workers are killed."""
    play(rig, RabbitMQ(rig.place))


@scenario(*ALL, small=SMALL)
def relays_nats(rig: Rig) -> None:
    """A relay to JetStream, which is killed, stopped, cut off, full; workers are killed."""
    play(rig, Nats(rig.place))


@scenario(*ALL, small=SMALL)
def relays_kafka(rig: Rig) -> None:
    """A relay to librdkafka's mock of Kafka, by the same faults."""
    play(rig, Kafka(rig.place))


@scenario(*ALL, small=SMALL)
def relays_webhook(rig: Rig) -> None:
    """A relay to webhooks, by the same faults."""
    play(rig, Webhook(rig.place))


@scenario(*ALL, small=SMALL)
def relays_sqs(rig: Rig) -> None:
    """A relay to SQS, by the same faults."""
    play(rig, SQS(rig.place))


def play(rig: Rig, broker: Broker) -> None:
    way = Relay(lambda: socket.create_connection(("127.0.0.1", broker.port)))
    configure(rig, broker.relay(way.port))
    rig.start_workers(rig.pick(ci=2, full=4))  # they start while the broker does
    with reaching(broker, way):
        rig.wait_until_they_run()
        strikes, found = planned(rig, broker), Found()
        begin(rig, len(strikes))
        for number in rig.schedule(len(strikes), rig.pick(ci=(0.3, 0.6), full=(1.0, 2.5))):
            strike(rig, broker, way, strikes[number], found)
        spent = attempts()
        be_refused(rig, broker)
        rig.wait_for_writers()
        rig.settle_down()
        rig.stored = broker.read()
        measure(rig, broker, found, spent)


@contextmanager
def reaching(broker: Broker, way: Relay) -> Iterator[None]:
    """Run a broker, to which leads a way that can be cut."""
    try:
        broker.server.start()
        broker.prepare()
        way.open()
        yield
    finally:
        way.cut()
        broker.server.stop()


def configure(rig: Rig, relay: dict[str, Any]) -> None:
    retry = {"policy": "fixed", "delay": 0.3, "max_attempts": 1000}
    own = {"EVENTS": [USUAL, ODD], "BATCH": BATCH, "RETRY": retry, **relay}
    queues = {QUEUE: {"WORKERS": THREADS}}
    rig.outbox |= {
        "LEASE": LEASE,
        "DRAIN_TIMEOUT": 3.0,
        "WORKERS": 2,
        "QUEUES": queues,
        "RELAYS": {"broker": own},
    }
    rig.relayed, rig.backlog = KINDS, True
    rig.patience = rig.pick(ci=60.0, full=300.0)


def planned(rig: Rig, broker: Broker) -> list[str]:
    """Return what is done, in an order that the seed decides."""
    kinds = {
        "broker kill": rig.pick(ci=1, full=20),
        "broker stop": rig.pick(ci=1, full=5),
        "cut": rig.pick(ci=1, full=5) * broker.has_way,
        # Longer than a lease.
        "silence": rig.pick(ci=int(isinstance(broker, Webhook)), full=3) * broker.has_way,
        "full": rig.pick(ci=1, full=5) * broker.fills,
        "long": rig.pick(ci=0, full=1),
        "kill": rig.pick(ci=1, full=20),
        "pause": rig.pick(ci=1, full=4),
    }
    if rig.size == "ci" and isinstance(broker, RabbitMQ):  # it takes seconds to start
        kinds |= {"cut": 0, "pause": 0}
    found = [kind for kind, count in kinds.items() for _ in range(count)]
    rig.luck.shuffle(found)
    return found


def begin(rig: Rig, strikes: int) -> None:
    """Start to write, for about as long as the strikes last."""
    span = strikes * rig.pick(ci=2.5, full=9.0)
    events = rig.pick(ci=int(100 * span), full=100_000, sqlite=30_000)
    rig.start_writers(
        2,
        events=events,
        rate=events / span,
        kinds=KINDS,
        keys=200,
        keyed=0.4,
        filler=250,
        slow=0.02,
    )
    rate = rig.pick(ci=20, full=40, sqlite=20)
    rig.start_writers(1, events=int(rate * span), rate=rate, kinds=("plain",), keys=1)
    wait_until(lambda: flowed(0), within=60, what="events reach the broker")


@dataclass
class Found:
    """What was measured in the outages."""

    back: list[tuple[float, str]] = field(default_factory=list)  # seconds until events flowed again
    # Logged in each, of all workers, a minute; and the lines.
    lines: list[tuple[float, list[str]]] = field(default_factory=list)


def strike(rig: Rig, broker: Broker, way: Relay, kind: str, found: Found) -> None:
    server = broker.server
    if kind == "kill":
        rig.kill(rig.one_that_runs())
    elif kind == "pause":
        rig.pause(rig.one_that_runs(), 1.5 * LEASE)
    elif kind == "broker kill":
        burst(rig)
        outage(rig, kind, rig.pick(ci=0.5, full=2.0), server.kill, server.restart, found)
    elif kind == "long":
        outage(rig, "broker kill", 120.0, server.kill, server.restart, found)
    elif kind == "broker stop":
        burst(rig)
        # Without a way to be silent, it is longer than a lease.
        seconds = rig.pick(ci=2.5 if broker.has_way else 5.0, full=5.0)
        outage(rig, kind, seconds, server.pause, server.resume, found)
    elif kind == "cut":
        outage(rig, kind, rig.pick(ci=1.0, full=4.0), way.cut, way.open, found)
    elif kind == "silence":
        outage(rig, kind, 5.0, way.hold, lambda: (way.cut(), way.open()), found)
    elif kind == "full":
        outage(rig, kind, rig.pick(ci=1.0, full=4.0), broker.fill, broker.make_room, found)


def outage(
    rig: Rig,
    kind: str,
    seconds: float,
    go: Callable[[], object],
    come: Callable[[], object],
    found: Found,
) -> None:
    """Have the broker go, and come back; note what the workers said, and when events flowed."""
    size = rig.log.stat().st_size
    with rig.fault(kind):
        go()
        time.sleep(seconds)  # how long the fault lasts
        lines = [
            each
            for each in rig.log.read_bytes()[size:].decode().splitlines()
            if OF_BROKER.match(each)
        ]
        waiting = [*write(rig, 20), *oldest(20)]  # after two minutes there are many thousands
        come()
    found.lines.append((len(lines) / max(seconds / 60, 1), lines))
    came = clock.now()
    wait_until(lambda: flowed(0, waiting), within=60, what="events flow again")
    found.back.append((round(clock.now() - came, 2), kind))


def be_refused(rig: Rig, broker: Broker) -> None:
    """Have the broker refuse messages for a while: attempts are spent, and what follows waits."""
    # RabbitMQ's command takes seconds.
    small = (NO_PLACE,) if isinstance(broker, RabbitMQ) else broker.refusals
    for why in rig.pick(ci=small, full=broker.refusals):
        before = attempts()
        with rig.fault(why):
            broker.refuse(why)
            for number in range(30):
                kind = KINDS[(number + 1) % 2]  # each key begins with one that has no place
                rig.write(kind, {"filler": "x" * 250}, key=f"refused-{number % 3}", queue=QUEUE)
            wait_until(lambda least=before: attempts() > least, within=60, what="refusals")
            time.sleep(rig.pick(ci=0.7, full=5.0))  # how long the fault lasts
            broker.accept(why)


def burst(rig: Rig) -> None:
    """Have batches under way: return when the first of many events has arrived."""
    waiting = write(rig, BURST)
    wait_until(lambda: flowed(0, waiting), within=60, what="the first of a burst")


def write(rig: Rig, count: int) -> list[str]:
    """Write that many events in one transaction; return their ids."""
    import django_outbox as outbox
    from django_outbox.models import OutboxEvent
    from tests.faults.models import Intent

    payload = {"filler": "x" * 250}
    with transaction.atomic():
        ids = [outbox.write(USUAL, payload) for _ in range(count)]
        OutboxEvent.objects.filter(pk__in=ids).update(queue=QUEUE)
        Intent.objects.bulk_create(
            Intent(
                event_id=each,
                kind="relayed",
                writer=os.getpid(),
                n=next(rig._numbers),
                at=clock.now(),
            )
            for each in ids
        )
    return [each for each in ids if each]


def oldest(count: int) -> list[str]:
    """Return the ids of the first events that wait."""
    from django_outbox.models import OutboxEvent

    rows = OutboxEvent.objects.pending().filter(event_type__in=(USUAL, ODD)).order_by("event_id")
    return [*rows.values_list("pk", flat=True)[:count]]


def flowed(least: int, ids: list[str] | None = None) -> bool:
    """Return whether more than that many events, or of these, were confirmed."""
    from django_outbox.models import OutboxEvent

    done = OutboxEvent.objects.filter(event_type__in=(USUAL, ODD), status=1)
    if ids is not None:
        done = done.filter(pk__in=ids)
    return done[: least + 1].count() > least


def attempts(types: Sequence[str] = (USUAL, ODD)) -> int:
    """Return the attempts that were spent on what is relayed."""
    from django_outbox.models import OutboxEvent

    rows = OutboxEvent.objects.filter(event_type__in=types)
    return int(rows.aggregate(all=Sum("attempts"))["all"] or 0)


def measure(rig: Rig, broker: Broker, found: Found, spent: int) -> None:
    assert rig.stored is not None
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    workers = rig.pick(ci=2, full=4)
    of_broker = sum(fault.kind not in ("kill", "pause") for fault in rig.faults)
    of_workers = len(rig.faults) - of_broker
    most = (of_broker * workers + of_workers) * THREADS * BATCH
    rig.measure("messages that the broker holds", len(rig.stored), least=1)
    rig.measure("messages that it holds twice", stored.repeats(rig.stored), most=most)
    rig.measure("attempts spent by outages", spent, most=broker.attempts)
    rig.measure("attempts spent by refusals", attempts() - spent)
    opened = len(rig.logged(f"breaker opened queue={QUEUE}"))  # which says so now and then only
    rig.measure("lines on breakers that opened", opened, least=1)
    print(f"until events flowed again: {sorted(found.back)}", file=sys.stderr)
    rig.measure("until events flowed again, s", max(found.back)[0], most=broker.back, timed=True)
    a_minute, lines = max(found.lines)
    rig.measure("log lines a minute in an outage", a_minute, most=broker.lines)
    rig.figures[-1].examples = lines[:9]
    rig.measure(
        "95 % of the neighbours' waits, s", waits(evidence, runs, ("plain",)), most=1, timed=True
    )
