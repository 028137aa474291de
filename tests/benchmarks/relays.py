"""Relays: a worker sends a backlog to each broker; beside it the bare client.

Each broker is a private one that stores what it confirms before it does so; Kafka is librdkafka's
mock cluster, which keeps it in memory. The bare client has as many messages on their way at a time
as a relay has in a call, and reads nothing from a table.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from tests import brokers
from tests.relay_adapters import Consumer, Stream

from . import backlog
from .figures import Figure, in_turn
from .scale import Scale
from .witness import Witness
from .workers import WorkerProcess

EVENTS, BATCH = 10_000, 500
PLACE = "benchmark.relayed"  # the event type, and what it is sent to
QUEUE = "relay.bench"
HEADERS = {"event-id": "0" * 26, "event-type": PLACE, "occurred-at": "2026-01-01T00:00:00+00:00"}
BODY = backlog.TEXT.encode()

Send = Callable[[int], float]  # sends so many messages by the bare client; returns messages/s
Target = tuple[dict[str, Any], Send]  # the settings of a relay, and the bare client


def run(scale: Scale, witness: Witness) -> list[Figure]:
    targets = {
        "Redis Streams": (redis, 0.35),
        "RabbitMQ": (rabbitmq, 0.7),
        "NATS JetStream": (jetstream, 0.6),
        "Kafka (mock cluster)": (kafka, 0.7),
    }
    return [compared(name, *each, scale, witness) for name, each in targets.items()]


def compared(name: str, target: Any, bar: float, scale: Scale, witness: Witness) -> Figure:
    title = f"relay of {EVENTS:,} events to {name}, one worker"
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            target(Path(directory)) as (settings, bare),
        ):
            found = in_turn(
                {"relay": lambda: relay(settings, witness), "bare": lambda: bare(EVENTS)},
                scale.repeats,
            )
    except (ImportError, pytest.skip.Exception, pytest.fail.Exception) as lack:
        return Figure(name=title, unit="events/s", values=[], failure=str(lack))
    return Figure(
        name=title,
        unit="events/s",
        values=found["relay"],
        references=found["bare"],
        reference=f"the bare client, {BATCH} messages on their way",
        bar=f"≥ {bar}",
    )


def relay(settings: dict[str, Any], witness: Witness) -> float:
    """Have a worker send a backlog; return events a second from its first batch to its settles."""
    own = {"EVENTS": [PLACE], "TO": "{event_type}", **settings}
    outbox = {"RELAYS": {QUEUE.removeprefix("relay."): own}}
    with override_settings(OUTBOX=outbox):  # whoever writes knows the relay, too
        fill()
    witness.clear()
    with WorkerProcess(**outbox) as worker:
        end = worker.wait_until_settled()
    batches = [(int(count), at) for count, at in witness.lines()]
    first, began = batches[0]
    assert sum(count for count, _ in batches) == EVENTS, batches
    return (EVENTS - first) / (end - began)


def fill() -> None:
    backlog.empty()
    backlog.insert(EVENTS, due=backlog.DUE, event_type=PLACE, text=backlog.TEXT, queue=QUEUE)
    backlog.analyze()


# --- the brokers ----------------------------------------------------------------------------------


@contextmanager
def redis(directory: Path) -> Iterator[Target]:
    """Redis with an append-only file that is synced at every write."""
    from redis import Redis

    def send(count: int) -> float:
        client: Any = Redis.from_url(server.url)
        client.ping()
        began = time.perf_counter()
        for _ in range(count // BATCH):
            pipeline = client.pipeline(transaction=False)
            for _ in range(BATCH):
                pipeline.xadd("bare", {**HEADERS, "payload": BODY})
            pipeline.execute()
        return count / (time.perf_counter() - began)

    with brokers.running(brokers.Redis(directory)) as server:
        backend = "django_outbox.relays.redis.Stream"
        yield {"BACKEND": backend, "OPTIONS": {"url": server.url}}, send


@contextmanager
def rabbitmq(directory: Path) -> Iterator[Target]:
    """RabbitMQ with a durable queue and persistent messages."""
    import aio_pika

    async def sending(count: int) -> float:
        async with await aio_pika.connect(server.url) as client:
            exchange = await (await client.channel()).get_exchange("events")
            began = time.perf_counter()
            for _ in range(count // BATCH):
                messages = [
                    aio_pika.Message(BODY, headers={**HEADERS}, delivery_mode=2, message_id="0")
                    for _ in range(BATCH)
                ]
                await asyncio.gather(*(exchange.publish(each, PLACE) for each in messages))
            return count / (time.perf_counter() - began)

    with brokers.running(brokers.RabbitMQ(directory)) as server:
        Consumer(server.url, exchange="events")
        options = {"url": server.url, "exchange": "events"}
        backend = "django_outbox.relays.rabbitmq.RabbitMQ"
        yield {"BACKEND": backend, "OPTIONS": options}, lambda n: asyncio.run(sending(n))


@contextmanager
def jetstream(directory: Path) -> Iterator[Target]:
    """NATS with a JetStream stream on disk."""
    import nats

    async def sending(count: int) -> float:
        client = await nats.connect(server.url)
        stream = client.jetstream()
        began = time.perf_counter()
        for _ in range(count // BATCH):
            sent = [stream.publish(PLACE, BODY, headers={**HEADERS}) for _ in range(BATCH)]
            await asyncio.gather(*sent)
        seconds = time.perf_counter() - began
        await client.close()
        return count / seconds

    with brokers.running(brokers.Nats(directory)) as server:
        Stream(server.url, "events", subjects=[PLACE])
        backend, options = "django_outbox.relays.nats.JetStream", {"servers": server.url}
        yield {"BACKEND": backend, "OPTIONS": options}, lambda n: asyncio.run(sending(n))


@contextmanager
def kafka(directory: Path) -> Iterator[Target]:
    """The mock cluster of librdkafka, with one topic of four partitions."""
    from confluent_kafka import Producer

    from tests.mock_kafka import MockCluster

    def send(count: int) -> float:
        own = {"enable.idempotence": True, "acks": "all", "linger.ms": 1}
        producer = Producer({"bootstrap.servers": cluster.servers, **own})
        confirmed = list[Any]()

        def batch(size: int) -> None:
            for _ in range(size):
                producer.produce(PLACE, BODY, headers=[*HEADERS.items()], on_delivery=report)
                producer.poll(0)
            producer.flush()

        def report(error: Any, message: Any) -> None:
            confirmed.append(error)

        batch(1)  # an idempotent producer may wait for its id for half a second
        began = time.perf_counter()
        for _ in range(count // BATCH):
            batch(BATCH)
        assert confirmed == [None] * (count + 1)
        return count / (time.perf_counter() - began)

    cluster = MockCluster()
    try:
        cluster.create(PLACE, 4)
        options = {"bootstrap.servers": cluster.servers}
        yield {"BACKEND": "django_outbox.relays.kafka.Kafka", "OPTIONS": options}, send
    finally:
        cluster.close()
