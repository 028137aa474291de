"""Relays whose brokers are away for as long as an incident lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.faults import clock, oracle
from tests.faults.relay_brokers import Broker, Nats, RabbitMQ, Redis
from tests.faults.rig import Rig
from tests.faults.scenarios.queues import neighbours, strike
from tests.faults.scenarios.registry import ALL, scenario
from tests.faults.scenarios.relays import attempts
from tests.waiting import wait_until

BROKERS = {"redis": Redis, "rabbitmq": RabbitMQ, "nats": Nats}  # also the kinds of their events
TYPES = [f"fault.{name}" for name in BROKERS]
CALM, OUTAGE = 60.0, 1800.0  # seconds
RATE = 30.0  # events a second that are relayed; as many are not


@scenario(*ALL, sizes=("full",))
def relays_away(rig: Rig) -> None:
    """The three brokers are down for half an hour; workers are killed and restarted meanwhile."""
    rig.relayed, rig.backlog, rig.patience = (*BROKERS,), True, 600.0
    with running(rig) as brokers:
        start(rig, brokers)
        calm = clock.now(), clock.now() + CALM
        time.sleep(CALM)  # all is well
        spent, size, went = attempts(TYPES), rig.log.stat().st_size, clock.now()
        with rig.fault("broker kill"):
            for broker in brokers.values():
                broker.server.kill()
            strike(rig, OUTAGE)
        away, said = (went, clock.now()), rig.log.read_bytes()[size:].decode().splitlines()
        rig.measure("events that waited for their brokers", waiting().count(), least=1)
        back = {name: come(name, broker) for name, broker in brokers.items()}
        rig.wait_for_writers()
        rig.settle_down()
        rig.stored = [each for broker in brokers.values() for each in broker.read()]
    rig.measure("attempts spent by the outage", attempts(TYPES) - spent, most=0)
    for name, seconds in back.items():
        lines = [line for line in said if f"relay.{name}" in line]
        rig.measure(f"until events flowed to {name} again, s", seconds, most=5, timed=True)
        rig.measure(f"log lines a minute on {name}", 60 * len(lines) / OUTAGE, most=1)
    evidence = rig.evidence()
    runs = oracle.executions(evidence, oracle.Verdict())
    before, beside = (neighbours(evidence, runs, *span) for span in (calm, away))
    rig.measure("95 % of the other queues' waits before, s", before)
    rig.measure("the same in the outage, times", beside / before, most=1.5, timed=True)


@contextmanager
def running(rig: Rig) -> Iterator[dict[str, Broker]]:
    with ExitStack() as stack:
        found = dict[str, Broker]()
        for name, kind in BROKERS.items():
            place = rig.place / name
            place.mkdir()
            found[name] = kind(place, f"fault.{name}")
            stack.callback(found[name].server.stop)
            found[name].server.start()
            found[name].prepare()
        yield found


def start(rig: Rig, brokers: dict[str, Broker]) -> None:
    """Start workers and writers; return when events reach each broker."""
    relays = {
        name: {"EVENTS": [*broker.types], **broker.relay(broker.port)}
        for name, broker in brokers.items()
    }
    rig.outbox |= {"LEASE": 3.0, "DRAIN_TIMEOUT": 3.0, "WORKERS": 2, "RELAYS": relays}
    rig.start_workers(2)
    rig.wait_until_they_run()
    events = int(RATE * (OUTAGE + 2 * CALM))
    for kinds in ((*brokers,), ("plain",)):
        # Without keys: one key in several relays would wait for the slowest of them.
        rig.start_writers(1, events=events, rate=RATE, kinds=kinds, keys=1, filler=250)
    wait_until(lambda: all(sent(name) for name in brokers), within=60, what="events arrive")


def come(name: str, broker: Broker) -> float:
    """Have a broker come back; return the seconds until the first that waited was sent."""
    oldest = [*waiting().filter(event_type=f"fault.{name}").values_list("pk", flat=True)[:20]]
    broker.server.restart()
    came = clock.now()
    wait_until(lambda: sent(name, oldest), within=60, what=f"events flow to {name}")
    return clock.now() - came


def waiting() -> Any:
    from django_outbox.models import OutboxEvent

    return OutboxEvent.objects.pending().filter(event_type__in=TYPES).order_by("event_id")


def sent(name: str, ids: list[str] | None = None) -> bool:
    """Return whether an event of a kind, or one of these, was confirmed."""
    from django_outbox.models import OutboxEvent

    done = OutboxEvent.objects.filter(event_type=f"fault.{name}", status=1)
    return (done if ids is None else done.filter(pk__in=ids)).exists()
