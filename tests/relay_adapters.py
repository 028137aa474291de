"""What differs between brokers for the contract of relays: where messages go, and how to read them.

Kafka's is Tansu, a real broker that speaks its protocol and keeps its records in memory. AWS's is
moto's server; it and the receiver of webhooks run in this process, behind a way that can be cut.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from tests import brokers
from tests.receiver import Receiver, receiving
from tests.relay import Relay
from tests.relay_messages import message, messages
from tests.waiting import wait_until


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A message as a consumer gets it."""

    body: bytes
    headers: Mapping[str, str]
    content_type: str | None


class Adapter:
    """A running broker, the settings of a relay to it, and a consumer."""

    backend: ClassVar[str]
    client: ClassVar[str]  # the module of the client
    prefix: ClassVar[str] = "ce-"  # of CloudEvents attributes
    refusal: ClassVar[str] = ""  # what is said of a message to ``refusing``
    is_logged: ClassVar[bool] = False  # whether the client itself logs an outage
    in_order: ClassVar[bool] = True  # whether messages without a key keep their order
    silence: ClassVar[tuple[str, ...]] = ("Unconfirmed",)  # outcomes if nothing is answered
    many: ClassVar[int] = 500  # messages of a large batch
    # Bytes of answers after which a connection is cut in mid-batch, and of each message's body.
    cut: ClassVar[tuple[int, int] | None] = None
    broker: Any

    def __init__(self, directory: Path) -> None:
        pytest.importorskip(self.client)

    def options(self, name: str) -> dict[str, Any]:
        """Return the OPTIONS of a relay that sends to ``name``."""
        raise NotImplementedError

    def prepare(self, name: str) -> str:
        """Make what messages are stored in; return TO of messages for it."""
        return name

    def refusing(self, name: str) -> str:
        """Return TO of messages that the broker refuses."""
        raise NotImplementedError

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        """Return what makes messages ones that cannot be sent, and what is said of each."""
        raise NotImplementedError

    def stored(self, name: str) -> list[Stored]:
        raise NotImplementedError


class Redis(Adapter):
    backend = "redis.Stream"
    client, refusal = "redis", "WRONGTYPE"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.broker = brokers.Redis(directory)

    def options(self, name: str) -> dict[str, Any]:
        return {"url": self.broker.url}

    def refusing(self, name: str) -> str:
        with self._connected() as client:
            client.set(f"{name}-text", "not a stream")
        return f"{name}-text"

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        return []

    def stored(self, name: str) -> list[Stored]:
        with self._connected() as client:
            entries = [fields for _, fields in client.xrange(name)]
        found = []
        for each in entries:
            headers = {key.decode(): value.decode() for key, value in each.items()}
            body = headers.pop("payload").encode()
            found.append(
                Stored(body=body, headers=headers, content_type=headers.get("content-type"))
            )
        return found

    def _connected(self) -> Any:
        import redis

        return redis.Redis.from_url(self.broker.url)


class Consumer:
    """An exchange of RabbitMQ and a queue, of one test."""

    def __init__(
        self, url: str, key: str = "#", exchange: str = "", kind: str = "topic", **arguments: Any
    ) -> None:
        self.url, self.name = url, exchange or f"test-{uuid4()}"
        self._key, self._kind, self._arguments = key, kind, arguments
        self._run(self._declare)

    def _run(self, work: Callable[[Any], Any]) -> Any:
        import aio_pika

        async def connected() -> Any:
            async with await aio_pika.connect(self.url) as connection:
                return await work(await connection.channel())

        return asyncio.run(connected())

    async def _declare(self, channel: Any) -> None:
        exchange = await channel.declare_exchange(self.name, self._kind, durable=True)
        queue = await channel.declare_queue(self.name, durable=True, arguments=self._arguments)
        await queue.bind(exchange, self._key)

    def count(self) -> int:
        queue = self._run(lambda channel: channel.declare_queue(self.name, passive=True))
        return int(queue.declaration_result.message_count)

    def read(self, count: int = 1) -> list[Any]:
        """Return the next messages; the connection is closed, so they cannot be acknowledged."""

        async def work(channel: Any) -> Any:
            queue = await channel.get_queue(self.name, ensure=False)
            return [await queue.get(no_ack=True, timeout=20) for _ in range(count)]

        found: list[Any] = self._run(work)
        return found

    def delete_exchange(self) -> None:
        self._run(lambda channel: channel.exchange_delete(self.name))

    def backend(self, **options: Any) -> Any:
        from django_outbox.relays.rabbitmq import RabbitMQ as Backend

        return Backend(**{"url": self.url, "exchange": self.name, **options})


class RabbitMQ(Adapter):
    backend = "rabbitmq.RabbitMQ"
    client, refusal = "aio_pika", "unroutable: no queue is bound"
    prefix, is_logged, cut = "cloudEvents:", True, (21, 30_000)  # one confirmation
    LARGEST = 200_000  # bytes of a message that the broker takes

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.broker = brokers.RabbitMQ(directory, max_message_size=self.LARGEST)
        self._consumers = dict[str, Consumer]()

    def options(self, name: str) -> dict[str, Any]:
        return {"url": self.broker.url, "exchange": name}

    def prepare(self, name: str) -> str:
        self._consumers[name] = Consumer(self.broker.url, key=name, exchange=name)
        return name

    def refusing(self, name: str) -> str:
        return "nobody.listens"

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        return [
            ({"to": "ä" * 128}, "routing key"),
            ({"event_type": "ä" * 128}, "event type"),
            ({"headers": {"ä" * 65: "x"}}, "header name"),
            ({"headers": {f"n{n}": "x" * 4000 for n in range(40)}}, "frame"),
            ({"body": b"x" * (self.LARGEST + 1)}, "message size"),
        ]

    def stored(self, name: str) -> list[Stored]:
        consumer = self._consumers[name]
        return [
            Stored(body=each.body, headers=each.headers, content_type=each.content_type)
            for each in consumer.read(consumer.count())
        ]


class Stream:
    """A stream of JetStream, of one test; unless told, it takes what begins with its name."""

    def __init__(self, url: str, name: str = "", **config: Any) -> None:
        self.url, self.name = url, name or f"test-{uuid4()}"
        config = {"subjects": [f"{self.name}.>"], **config}
        self.run(lambda context: context.add_stream(name=self.name, **config))

    def run(self, work: Callable[[Any], Any]) -> Any:
        return asyncio.run(self.connected(work))

    async def connected(self, work: Callable[[Any], Any]) -> Any:
        import nats

        client = await nats.connect(self.url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    def count(self) -> int:
        return int(self.run(lambda context: context.stream_info(self.name)).state.messages)

    def read(self) -> list[Any]:
        async def work(context: Any) -> Any:
            count = (await context.stream_info(self.name)).state.messages
            subscription = await context.pull_subscribe("", stream=self.name)
            found: list[Any] = []
            while len(found) < count:
                found += await subscription.fetch(count - len(found), timeout=20)
            return found

        found: list[Any] = self.run(work)
        return found

    def message(self, subject: str = "order.placed", **given: Any) -> Any:
        return message(f"{self.name}.{subject}", **given)

    def messages(self, count: int, subject: str = "order.placed", **given: Any) -> list[Any]:
        return messages(count, f"{self.name}.{subject}", **given)

    def backend(self, **options: Any) -> Any:
        from django_outbox.relays.nats import JetStream

        return JetStream(**{"servers": self.url, **options})


class Nats(Adapter):
    backend = "nats.JetStream"
    client, refusal = "nats", "add it to a stream"
    cut = (5000, 15)  # some thirty acknowledgements
    LARGEST = 102_400  # bytes of a message that the server takes

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.broker, self._streams = brokers.Nats(directory), dict[str, Stream]()

    def options(self, name: str) -> dict[str, Any]:
        return {"servers": self.broker.url}

    def prepare(self, name: str) -> str:
        self._streams[name] = Stream(self.broker.url, name, subjects=[name])
        return name

    def refusing(self, name: str) -> str:
        return "nobody.listens"

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        subjects = [
            "a b",
            "a\r\nPUB b 0",
            "a\0b",
            *"a.* a.> a..b .a a. $JS.API.STREAM.INFO".split(),
        ]
        headers = {"trace": "a\r\nNats-Rollup: all", "a:b": "x", "ä": "x", "": "x", "x": "a\nb"}
        return [
            *(({"to": each}, "not a subject") for each in subjects),
            *(({"headers": {each: headers[each]}}, "cannot be sent") for each in headers),
            ({"to": "a" * 2049}, "more than 2048 bytes"),
            ({"body": b"x" * (self.LARGEST + 1)}, "max_payload"),
            ({"body": b"x" * (self.LARGEST - 100)}, "max_payload"),  # with the headers
            ({"headers": {"long": "x" * self.LARGEST}}, "max_payload"),
        ]

    def stored(self, name: str) -> list[Stored]:
        return [
            Stored(body=each.data, headers=each.headers, content_type=each.headers["content-type"])
            for each in self._streams[name].read()
        ]


class Kafka(Adapter):
    backend = "kafka.Kafka"
    client, prefix = "confluent_kafka", "ce_"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.broker = brokers.Tansu(directory)

    def options(self, name: str) -> dict[str, Any]:
        return {"bootstrap.servers": self.broker.url}

    def prepare(self, name: str) -> str:
        create(self.broker.url, name)
        return name

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        return [
            *(({"to": each}, "not a name of a Kafka topic") for each in ("a b", "..", "x" * 250)),
            ({"body": b"x" * 1_100_000}, "more than the client's message.max.bytes"),
        ]

    def stored(self, name: str) -> list[Stored]:
        found = []
        for each in records(self.broker.url, name):
            headers = {key: value.decode() for key, value in each.headers()}
            found.append(
                Stored(body=each.value(), headers=headers, content_type=headers.get("content-type"))
            )
        return found


def create(servers: str, topic: str, partitions: int = 1) -> None:
    """Create a topic of Kafka."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for done in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        done.result(20)


def records(servers: str, topic: str = "orders") -> list[Any]:
    """Return what a topic of Kafka holds, partition by partition."""
    import confluent_kafka as confluent

    # Without its own limit a fetch waits half a second for more records, at each end.
    options = {"group.id": "test", "enable.partition.eof": True, "fetch.wait.max.ms": 20}
    consumer = confluent.Consumer({"bootstrap.servers": servers, "log_level": 0, **options})
    found: list[Any] = []
    try:
        left = {*consumer.list_topics(topic, timeout=20).topics[topic].partitions}
        consumer.assign([confluent.TopicPartition(topic, number, 0) for number in left])
        while left:
            found.append(each := wait_until(lambda: consumer.poll(0.1)))
            if (error := each.error()) is not None:
                assert error.code() == confluent.KafkaError._PARTITION_EOF, error
                left.remove(found.pop().partition())
    finally:
        consumer.close()
    return sorted(found, key=lambda each: each.partition())


class Way:
    """The broker of an adapter: the way to a server in this process."""

    def __init__(self, port: int) -> None:
        self._way = Relay(lambda: socket.create_connection(("127.0.0.1", port)))
        self.port = self._way.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.start = self.restart = self._way.open
        self.kill, self.pause, self.resume = self._way.cut, self._way.hold, self._way.release
        self.end: Callable[[], Any] = lambda: None

    def stop(self) -> None:
        self.kill()
        self.end()


class Webhook(Adapter):
    backend = "http.Webhook"
    client, refusal = "httpx", "answered 400"
    in_order, silence = False, ("Refused", "Defer", "BrokerUnavailable")
    OWN = ("host", "user-agent", "accept-encoding", "content-length")  # headers of any request

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        running = receiving()
        self._receiver: Receiver = running.__enter__()
        self._receiver.answer = lambda path, body: (400 if path == "/no" else 204, {}, b"")
        self.broker = Way(self._receiver.port)
        self.broker.end = lambda: running.__exit__(None, None, None)

    def options(self, name: str) -> dict[str, Any]:
        from django_outbox.relays.http_hosts import hosts

        hosts.clear()  # of this process, which other tests share
        return {"allow_http": True, "allow_private": True}

    def prepare(self, name: str) -> str:
        return f"{self.broker.url}/{name}"

    def refusing(self, name: str) -> str:
        return f"{self.broker.url}/no"

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        return [
            *(({"headers": {"x": each}}, "control char") for each in ("a\r\nb: c", "a\nb", "a\0b")),
            *(
                ({"headers": {each: "a"}}, "a name has ASCII letters")
                for each in ("x y", "x\r\nx-evil", "x:", "", "größe")
            ),
            *(({"event_id": each}, "webhook-id has to be") for each in ("ä", "a\nb")),
        ]

    def stored(self, name: str) -> list[Stored]:
        found = []
        for path, sent, body in self._receiver.received:
            headers = {
                each: value.encode("latin-1").decode()
                for each, value in sent.items()
                if each not in self.OWN and not each.startswith("webhook-")
            }
            if name.endswith(path):
                kind = headers["content-type"]
                found.append(Stored(body=body, headers=headers, content_type=kind))
        return found


class SQS(Adapter):
    backend = "aws.SQS"
    client, refusal = "boto3", "NonExistentQueue|QueueDoesNotExist"
    in_order, many = False, 30  # moto is slow
    silence = ("Unconfirmed", "BrokerUnavailable", "Defer")
    ACCESS: ClassVar = {
        "region_name": "eu-central-1",
        "aws_access_key_id": "AKIATESTING",
        "aws_secret_access_key": "open-sesame",
    }

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        moto = pytest.importorskip("moto.server")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        self.endpoint = "http://{}:{}".format(*server.get_host_and_port())
        self.broker, self._queues = Way(server.get_host_and_port()[1]), dict[str, str]()
        self.broker.end = server.stop

    def asked(self, service: str = "sqs") -> Any:
        """Return a client that reaches moto whatever becomes of the way."""
        import boto3

        return boto3.client(service, endpoint_url=self.endpoint, **self.ACCESS)

    def options(self, name: str) -> dict[str, Any]:
        return {"endpoint_url": self.broker.url, **self.ACCESS}

    def prepare(self, name: str) -> str:
        self._queues[name] = self.asked().create_queue(QueueName=name)["QueueUrl"]
        return name

    def refusing(self, name: str) -> str:
        return "missing"

    def impossible(self, name: str) -> list[tuple[dict[str, Any], str]]:
        return [
            ({"body": '"\ufffe"'.encode()}, "U+FFFE"),
            ({"body": b"x" * 1_048_577}, "1048"),
            ({"to": "no queue"}, "TO is 'no queue'; expected the"),
        ]

    def stored(self, name: str) -> list[Stored]:
        client, url, found = self.asked(), self._queues[name], list[Stored]()
        while some := client.receive_message(
            QueueUrl=url, MessageAttributeNames=["All"], MaxNumberOfMessages=10
        ).get("Messages", ()):
            for each in some:
                client.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
                given = each["MessageAttributes"]
                headers = {key: value["StringValue"] for key, value in given.items()}
                headers |= json.loads(headers.pop("headers", "{}"))
                kind = headers["content-type"]
                found.append(Stored(body=each["Body"].encode(), headers=headers, content_type=kind))
        return found


class SNS(SQS):
    backend, refusal = "aws.SNS", "NotFound"

    def prepare(self, name: str) -> str:
        super().prepare(name)
        topic = self.asked("sns").create_topic(Name=name)["TopicArn"]
        self._queues[topic] = self._queues[name]
        self.asked("sns").subscribe(
            TopicArn=topic,
            Protocol="sqs",
            Endpoint=topic.replace(":sns:", ":sqs:"),
            Attributes={"RawMessageDelivery": "true"},
        )
        return str(topic)

    def refusing(self, name: str) -> str:
        return f"{name}-missing"


ADAPTERS = {
    "redis": Redis,
    "rabbitmq": RabbitMQ,
    "nats": Nats,
    "kafka": Kafka,
    "webhook": Webhook,
    "sqs": SQS,
    "sns": SNS,
}
