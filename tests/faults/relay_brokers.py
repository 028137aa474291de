"""The brokers of the scenarios of relays: how each is filled, and what it holds in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from tests import brokers, mock_kafka, relay_adapters
from tests.faults.rig import NotHere
from tests.receiver import Receiver, receiving

T = TypeVar("T")

PLACE = "events"  # the stream, exchange or queue
READING = 60.0  # seconds without a further message after which a broker is read
USER = "guest"
USUAL, ODD = "fault.relayed", "fault.odd"  # event types; a broker may have no place for the second
NO_PLACE = "no place"


class Broker:
    """A private broker: one of ``tests.brokers``, and what only the scenarios do to it.

    It has a place for messages of ``types``; for the last of them, not always.
    """

    kind: ClassVar[Any]
    fills: ClassVar[bool] = False  # it can be made to take nothing at all
    refusals: ClassVar[tuple[str, ...]] = ()  # why it can be made to refuse single messages
    has_way: ClassVar[bool] = True  # whether its clients come by the way that can be cut
    back: ClassVar[float] = 5  # seconds, at most, from its return until events flow
    # What an outage may cost: attempts, and lines of the log a minute; None: not limited.
    attempts: ClassVar[int | None] = 0
    lines: ClassVar[int | None] = 1

    def __init__(self, place: Path, *types: str) -> None:
        self.types = types or (USUAL, ODD)
        try:
            self.server = self.kind(place)
        except pytest.skip.Exception as lack:
            raise NotHere(str(lack)) from None
        except pytest.fail.Exception as lack:
            raise RuntimeError(str(lack)) from None

    @property
    def port(self) -> int:
        return int(self.server.port)

    def prepare(self) -> None:
        """Declare what the messages go to."""

    def relay(self, port: int) -> dict[str, Any]:
        """The settings of a relay that reaches the broker by way of a port."""
        raise NotImplementedError

    def fill(self) -> None:
        """Have the broker take nothing."""

    def make_room(self) -> None:
        """Have it take messages again."""

    def refuse(self, why: str) -> None:
        """Have the broker refuse messages, each by itself: all, or those of the last type."""

    def accept(self, why: str) -> None:
        """Have it accept them again."""

    def read(self) -> list[str]:
        """Return the event ids of the messages that it holds, in its order."""
        raise NotImplementedError


class Redis(Broker):
    """Redis with an append-only file that is synced at every write."""

    kind, fills = brokers.Redis, True

    def relay(self, port: int) -> dict[str, Any]:
        url = f"redis://127.0.0.1:{port}/0"
        backend = "django_outbox.relays.redis.Stream"
        return {"BACKEND": backend, "TO": PLACE, "OPTIONS": {"url": url, "timeout": 1.5}}

    def fill(self) -> None:
        self._client().config_set("maxmemory", 1)  # the policy is noeviction

    def make_room(self) -> None:
        self._client().config_set("maxmemory", 0)

    def read(self) -> list[str]:
        client, found, since = self._client(), list[str](), "-"
        while entries := client.xrange(PLACE, min=since, count=1000):
            found += [fields[b"event-id"].decode() for _, fields in entries]
            since = "(" + entries[-1][0].decode()
        return found

    def _client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.server.url)


class RabbitMQ(Broker):
    """RabbitMQ with one durable queue that takes everything."""

    kind, fills, refusals = brokers.RabbitMQ, True, ("queue full",)

    def relay(self, port: int) -> dict[str, Any]:
        url = f"amqp://{USER}:{USER}@127.0.0.1:{port}/"
        options = {"url": url, "exchange": PLACE, "timeout": 1.5}
        return {"BACKEND": "django_outbox.relays.rabbitmq.RabbitMQ", "OPTIONS": options}

    def prepare(self) -> None:
        async def declare(channel: Any) -> None:
            exchange = await channel.declare_exchange(PLACE, "topic", durable=True)
            queue = await channel.declare_queue(PLACE, durable=True)
            for each in self.types:
                await queue.bind(exchange, each)

        self._ask(declare)

    def fill(self) -> None:
        self.server.control("set_vm_memory_high_watermark", "absolute", "1MB")

    def make_room(self) -> None:
        self.server.control("set_vm_memory_high_watermark", "0.6")

    def refuse(self, why: str) -> None:
        async def unbind(channel: Any) -> None:
            await (await channel.get_queue(PLACE)).unbind(PLACE, self.types[-1])

        if why == NO_PLACE:
            self._ask(unbind)
            return
        # In this order: a limit drops what is beyond it while the overflow is still to drop.
        for policy in (
            '{"overflow": "reject-publish"}',
            '{"max-length": 1, "overflow": "reject-publish"}',
        ):
            self.server.control("set_policy", "full", f"^{PLACE}$", policy, "--apply-to", "queues")

    def accept(self, why: str) -> None:
        if why == NO_PLACE:
            self.prepare()
        else:
            self.server.control("clear_policy", "full")

    def read(self) -> list[str]:
        found: list[str] = []

        async def consume(channel: Any) -> None:
            queue = await channel.get_queue(PLACE)
            there, complete = queue.declaration_result.message_count, asyncio.Event()

            async def take(message: Any) -> None:
                found.append(message.message_id)
                if len(found) == there:
                    complete.set()

            if there:
                await queue.consume(take, no_ack=True)
                await asyncio.wait_for(complete.wait(), READING)

        self._ask(consume)
        return found

    def _ask(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async def ask() -> T:
            import aio_pika

            async with await aio_pika.connect(self.server.url) as connection:
                return await work(await connection.channel())

        return asyncio.run(ask())


class Nats(Broker):
    """NATS with one JetStream stream on disk."""

    kind, refusals = brokers.Nats, (NO_PLACE, "stream full")

    def relay(self, port: int) -> dict[str, Any]:
        options = {"servers": f"nats://127.0.0.1:{port}", "timeout": 1.5}
        backend = "django_outbox.relays.nats.JetStream"
        return {"BACKEND": backend, "TO": f"{PLACE}.{{event_type}}", "OPTIONS": options}

    def prepare(self) -> None:
        async def add(stream: Any) -> None:
            await stream.add_stream(_config(*self.types))

        self._ask(add)

    def refuse(self, why: str) -> None:
        async def limit(stream: Any) -> None:
            types = self.types[:-1] if why == NO_PLACE else self.types
            limits = {} if why == NO_PLACE else {"max_msgs": await held(stream)}
            await stream.update_stream(_config(*types, **limits))

        async def held(stream: Any) -> int:
            """Return how many messages there are; a limit below that would drop the oldest."""
            await stream.update_stream(_config("nothing"))
            before, found = -1, 0
            while before != found:  # until what was under way is stored
                before, found = found, (await stream.stream_info(PLACE)).state.messages
            return found

        self._ask(limit)

    def accept(self, why: str) -> None:
        async def lift(stream: Any) -> None:
            await stream.update_stream(_config(*self.types, max_msgs=-1))

        self._ask(lift)

    def read(self) -> list[str]:
        async def fetch(stream: Any) -> list[str]:
            there = (await stream.stream_info(PLACE)).state.messages
            found: list[str] = []
            consumer = await stream.pull_subscribe(f"{PLACE}.>", stream=PLACE)
            while len(found) < there:
                messages = await consumer.fetch(min(500, there - len(found)), timeout=READING)
                found += [message.headers["event-id"] for message in messages]
                for message in messages:
                    await message.ack()
            return found

        return self._ask(fetch)

    def _ask(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async def ask() -> T:
            import nats

            client = await nats.connect(self.server.url)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(ask())


class Mock:
    """librdkafka's mock cluster, as a server that can be away, or answer late."""

    def __init__(self, place: Path) -> None:
        self.cluster = mock_kafka.MockCluster()
        self.url = self.cluster.servers
        self.port = int(self.url.rpartition(":")[2])
        self.kill, self.restart, self.stop = self.cluster.down, self.cluster.up, self.cluster.close

    def start(self) -> None:
        """It runs already."""

    def pause(self) -> None:
        self.cluster.delay(10_000)

    def resume(self) -> None:
        self.cluster.delay(0)


class Kafka(Broker):
    """A topic of librdkafka's mock cluster; each key has a partition, so its order shows."""

    kind, refusals, has_way = Mock, (NO_PLACE,), False

    def relay(self, port: int) -> dict[str, Any]:
        options = {"bootstrap.servers": self.server.url, "timeout": 1.5}
        backend = "django_outbox.relays.kafka.Kafka"
        return {"BACKEND": backend, "TO": PLACE, "OPTIONS": options}

    def prepare(self) -> None:
        # It drops the oldest of a partition with more than 5 MB.
        self.server.cluster.create(PLACE, partitions=64)

    def refuse(self, why: str) -> None:
        self.server.cluster.fail_topic(PLACE, mock_kafka.UNKNOWN_TOPIC)
        self.server.kill()  # the clients know it only when they ask for metadata again
        self.server.restart()

    def accept(self, why: str) -> None:
        self.server.cluster.fail_topic(PLACE, 0)

    def read(self) -> list[str]:
        found = relay_adapters.records(self.server.url, PLACE)
        return [dict(each.headers())["event-id"].decode() for each in found]


class Endpoint(relay_adapters.Way):
    """An HTTP server in this process, and a way to it."""

    def __init__(self, place: Path) -> None:
        self._running = receiving()
        self.receiver: Receiver = self._running.__enter__()
        super().__init__(self.receiver.port)
        self.end = lambda: self._running.__exit__(None, None, None)


class Webhook(Broker):
    """A receiver of webhooks. A request without an answer costs an attempt."""

    kind, refusals = Endpoint, (NO_PLACE,)
    back, attempts, lines = 10, None, None

    def __init__(self, place: Path, *types: str) -> None:
        super().__init__(place, *types)
        self._refused, self._taken = "", list[str]()
        self.server.receiver.answer = self._answer

    def relay(self, port: int) -> dict[str, Any]:
        options = {"allow_http": True, "allow_private": True, "timeout": 1.5}
        return {
            "BACKEND": "django_outbox.relays.http.Webhook",
            "TO": f"http://127.0.0.1:{port}/{{event_type}}/{{event_id}}",
            "OPTIONS": {**options, "concurrency_per_host": 20},
        }

    def refuse(self, why: str) -> None:
        self._refused = self.types[-1]

    def accept(self, why: str) -> None:
        self._refused = ""

    def read(self) -> list[str]:
        return [*self._taken]

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        _, kind, event_id = path.split("/")
        if kind == self._refused:
            return 400, {}, b"no place"
        self._taken.append(event_id)
        return 204, {}, b""


class SQS(Webhook):
    """An endpoint that speaks the protocol of SQS; moto takes a few messages a second only."""

    back, attempts, lines = 5, 0, 1

    def relay(self, port: int) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}"
        return {
            "BACKEND": "django_outbox.relays.aws.SQS",
            "TO": f"{url}/123456789012/events",
            "OPTIONS": {"endpoint_url": url, "timeout": 1.5, **relay_adapters.SQS.ACCESS},
        }

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        done: list[Any] = []
        failed: list[Any] = []
        given = json.loads(body)
        for entry in given.get("Entries", ()):
            named = entry["MessageAttributes"]
            if named["event-type"]["StringValue"] == self._refused:
                failed.append({"Id": entry["Id"], "Code": "InternalError", "SenderFault": False})
            else:
                self._taken.append(named["event-id"]["StringValue"])
                done.append({"Id": entry["Id"], "MessageId": "m"})
        asked = dict.fromkeys(given.get("AttributeNames", ()), "arn:aws:sqs:eu-north-1:1:events")
        answer = {"Attributes": asked, "Successful": done, "Failed": failed}
        return 200, {}, json.dumps(answer).encode()


def _config(*types: str, **limits: int) -> Any:
    from nats.js.api import DiscardPolicy, StorageType, StreamConfig

    return StreamConfig(
        name=PLACE,
        subjects=[f"{PLACE}.{each}" for each in types],
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        **limits,
    )
