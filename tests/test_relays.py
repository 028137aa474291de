"""Relays of the example project, each tested with a real broker.

RabbitMQ, NATS and Redis must answer on their usual ports of this machine; otherwise their tests are
skipped and say so. For Kafka the tests use the mock broker of librdkafka.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent
from tests import samples
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # not in use anywhere

pytestmark = pytest.mark.django_db(transaction=True)


def answering(port: int, name: str) -> None:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        pytest.skip(f"no {name} at 127.0.0.1:{port}")


@pytest.fixture
def relay(settings: Any) -> Iterator[Callable[[str], Any]]:
    """Yield a function that makes a relay as ``RELAY_URL`` does and registers it as a listener."""
    settings.RELAY_URL, settings.RELAY_SECRET = "", SECRET
    settings.OUTBOX = {"RETRY": {"policy": "fixed", "delay": 3600}}
    from example_project.relay import listeners

    before = {*registry.listeners()}

    def make(url: str) -> Any:
        made = listeners.relay(url)
        outbox.listener("*", name="relay")(made)
        return made

    yield make
    for each in {*registry.listeners()} - before:
        registry.remove(each.call)


def deliver(event_type: str = "order.placed") -> OutboxEvent:
    """Write an event, deliver it twice as a crash in between would, and return its row."""
    with transaction.atomic():
        event_id = outbox.write(
            event_type,
            {"sku": "teapot", "name": "Kännchen"},
            headers={"trace": "t1"},
            aggregate_id="7",
        )
    assert outbox.drain() == 1
    return OutboxEvent.objects.get(pk=event_id)


def again(row: OutboxEvent) -> None:
    OutboxEvent.objects.filter(pk=row.pk).update(status=OutboxEvent.Status.DEAD, progress=None)
    OutboxEvent.objects.filter(pk=row.pk).replay()
    assert outbox.drain() == 1


def expect(headers: dict[str, str], body: bytes | str, row: OutboxEvent) -> None:
    assert headers["event-id"] == row.pk
    assert headers["event-type"] == "order.placed"
    assert headers["occurred-at"] == row.occurred_at.isoformat()
    assert headers["trace"] == "t1"
    assert json.loads(body) == {"sku": "teapot", "name": "Kännchen"}
    assert OutboxEvent.objects.get(pk=row.pk).status == OutboxEvent.Status.DONE


def refused(row: OutboxEvent) -> None:
    """Assert that the broker did not confirm: the event is not delivered and will be retried."""
    assert (row.status, row.attempts) == (OutboxEvent.Status.RETRY, 1)


# --- RabbitMQ and Celery -------------------------------------------------------------------------

AMQP = "amqp://guest:guest@127.0.0.1:5672//"


def test_rabbitmq(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(5672, "RabbitMQ")
    kombu = pytest.importorskip("kombu")
    from example_project.relay import rabbitmq

    events = kombu.Exchange(f"test-{uuid4()}", "topic", auto_delete=True)
    monkeypatch.setattr(rabbitmq, "EVENTS", events)
    made = relay(AMQP)
    with kombu.Connection(AMQP) as connection:
        queue = kombu.Queue("", events, routing_key="order.*", exclusive=True)(connection)
        queue.declare()
        row = deliver()
        again(row)
        found = [wait_until(lambda: queue.get(no_ack=True)) for _ in range(2)]
    for message in found:
        expect(message.headers, message.body, row)
        assert message.properties["message_id"] == row.pk
        assert message.delivery_info["routing_key"] == "order.placed"
        assert message.properties["delivery_mode"] == 2
    assert made.connection.transport_options["confirm_publish"]
    kombu.pools.reset()


def test_rabbitmq_that_refuses(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay waits for the confirm, so a full queue that refuses the event is a failure."""
    answering(5672, "RabbitMQ")
    kombu = pytest.importorskip("kombu")
    from example_project.relay import rabbitmq

    events = kombu.Exchange(f"test-{uuid4()}", "topic", auto_delete=True)
    monkeypatch.setattr(rabbitmq, "EVENTS", events)
    relay(AMQP)
    full = {"x-max-length": 0, "x-overflow": "reject-publish"}
    with kombu.Connection(AMQP) as connection:
        queue = kombu.Queue("", events, "#", exclusive=True, queue_arguments=full)(connection)
        queue.declare()
        refused(deliver())
    kombu.pools.reset()


def test_rabbitmq_that_is_away(relay: Any) -> None:
    kombu = pytest.importorskip("kombu")
    relay("amqp://guest:guest@127.0.0.1:1//")
    refused(deliver())
    kombu.pools.reset()


@pytest.mark.parametrize(
    ("broker", "port"),
    [(AMQP, 5672), ("redis://127.0.0.1:6379/9", 6379)],
    ids=["rabbitmq", "redis"],
)
def test_celery(relay: Any, broker: str, port: int) -> None:
    answering(port, broker.partition(":")[0])
    kombu = pytest.importorskip("kombu")
    pytest.importorskip("celery")
    made = relay(f"celery+{broker}")
    made.app.conf.task_default_queue = f"test-{uuid4()}"
    row = deliver()
    with kombu.Connection(broker) as connection:
        queue = connection.SimpleQueue(made.app.conf.task_default_queue)
        message = queue.get(timeout=10)
        message.ack()
        queue.queue.delete()
    expect(message.headers, json.dumps(message.decode()[1]["payload"]), row)
    assert message.headers["id"] == row.pk
    assert message.headers["task"] == "shop.order.placed"
    made.app.close()
    kombu.pools.reset()


# --- NATS ----------------------------------------------------------------------------------------

NATS = "nats://127.0.0.1:4222"


def test_nats_jetstream(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JetStream itself drops the second message with the same id."""
    answering(4222, "NATS")
    nats = pytest.importorskip("nats")
    from example_project.relay import jetstream

    name = f"test-{uuid4()}"
    monkeypatch.setattr(jetstream, "SUBJECT", name)

    async def in_stream(work: Any) -> Any:
        client = await nats.connect(NATS)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    async def read(context: Any) -> Any:
        subscription = await context.pull_subscribe(f"{name}.>", stream=name)
        info = await context.stream_info(name)
        return (await subscription.fetch(1, timeout=10))[0], info.state.messages

    asyncio.run(in_stream(lambda context: context.add_stream(name=name, subjects=[f"{name}.>"])))
    try:
        made = relay(NATS)
        row = deliver()
        again(row)
        made.close()
        message, count = asyncio.run(in_stream(read))
        expect(message.headers, message.data, row)
        assert (message.subject, count) == (f"{name}.order.placed", 1)
    finally:
        asyncio.run(in_stream(lambda context: context.delete_stream(name)))


def test_nats_without_a_stream(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream stores the event, so nothing acknowledges it."""
    answering(4222, "NATS")
    pytest.importorskip("nats")
    from example_project.relay import jetstream

    monkeypatch.setattr(jetstream, "SUBJECT", f"test-{uuid4()}")
    made = relay(NATS)
    refused(deliver())
    made.close()


# --- Redis ---------------------------------------------------------------------------------------


def test_redis_stream(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(6379, "Redis")
    pytest.importorskip("redis")
    from example_project.relay import redis_stream

    monkeypatch.setattr(redis_stream, "STREAM", f"test-{uuid4()}")
    made = relay("redis://127.0.0.1:6379/9")
    row = deliver()
    again(row)
    entries = [entry for _, entry in made.client.xrange(redis_stream.STREAM)]
    made.client.delete(redis_stream.STREAM)
    made.client.close()
    assert len(entries) == 2  # consumers drop the second by its event-id
    for entry in entries:
        expect(json.loads(entry[b"headers"]), entry[b"payload"], row)
        assert entry[b"event-id"].decode() == row.pk


def test_redis_that_is_away(relay: Any) -> None:
    pytest.importorskip("redis")
    relay("redis://127.0.0.1:1/0")
    refused(deliver())


# --- Kafka ---------------------------------------------------------------------------------------


def confluent_kafka() -> Any:
    why = "confluent-kafka is not installed; it has no wheel for Python 3.15 yet"
    return pytest.importorskip("confluent_kafka", reason=why)


def test_kafka(relay: Any) -> None:
    confluent = confluent_kafka()
    made = relay("kafka://127.0.0.1:1")
    # librdkafka's mock cluster, which runs in this process and speaks the protocol.
    made.options = {**made.options, "test.mock.num.brokers": 1}
    row = deliver()
    brokers = made._producer.list_topics(timeout=10).brokers.values()
    servers = ",".join(f"{each.host}:{each.port}" for each in brokers)
    consumer = confluent.Consumer(
        {"bootstrap.servers": servers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe(["events"])
        message = wait_until(lambda: consumer.poll(0.1))
    finally:
        consumer.close()
    headers = {name: value.decode() for name, value in message.headers()}
    expect(headers, message.value(), row)
    assert message.key() == b"7"


def test_kafka_that_is_away(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    confluent_kafka()
    made = relay("kafka://127.0.0.1:1")
    made.options = {**made.options, "message.timeout.ms": 500, "log_level": 0}
    refused(deliver())


# --- a webhook -----------------------------------------------------------------------------------


class Receiver:
    """An HTTP endpoint that stores the requests it gets and answers with ``status``."""

    def __init__(self) -> None:
        self.status, self.headers = 204, {}
        self.received: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Endpoint(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.received.append((dict(self.headers.items()), body))
                self.send_response(receiver.status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Endpoint)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("requests")
    pytest.importorskip("standardwebhooks")
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


def test_19_webhook_is_signed_and_repeats_its_id(relay: Any, receiver: Receiver) -> None:
    from standardwebhooks import Webhook, WebhookVerificationError

    relay(receiver.url)
    row = deliver()
    again(row)
    assert [headers["webhook-id"] for headers, _ in receiver.received] == [row.pk] * 2
    headers, body = receiver.received[0]
    assert Webhook(SECRET).verify(body, headers) == {"sku": "teapot", "name": "Kännchen"}
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body.replace(b"teapot", b"gold"), headers)
    assert OutboxEvent.objects.get().status == OutboxEvent.Status.DONE


@pytest.mark.parametrize(
    ("status", "headers", "expected", "attempts"),
    [
        (200, {}, "DONE", 0),
        (500, {}, "RETRY", 1),
        (429, {"retry-after": "1800"}, "RETRY", 1),
        (503, {"retry-after": "in 1800 s, as a date"}, "RETRY", 1),
        (503, {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, "RETRY", 1),
        (503, {"retry-after": "soon"}, "RETRY", 1),
        (503, {}, "RETRY", 1),
        (400, {}, "DEAD", 0),
        (302, {"location": "http://127.0.0.1:1/"}, "DEAD", 0),
        (410, {}, "DEAD", 0),
    ],
    ids=lambda each: str(each) if isinstance(each, int) else None,
)
def test_19_webhook_answers(
    relay: Any, receiver: Receiver, status: int, headers: Any, expected: str, attempts: int
) -> None:
    said = headers.get("retry-after", "")
    if said.startswith("in 1800 s"):
        headers = {"retry-after": formatdate(time.time() + 1800, usegmt=True)}
    receiver.status, receiver.headers = status, headers
    relay(receiver.url)
    row = deliver()
    assert (row.Status(row.status).name, row.attempts) == (expected, attempts)
    if said:  # without a valid time in the future the retry policy decides
        assert ("RetryAfter" in row.last_error) == ("1800" in said)
    if "1800" in said:
        waits = (row.available_at - row.created_at).total_seconds()
        assert 1700 < waits < 1900
    if expected == "DEAD":
        assert f"said {status}" in row.last_error


# --- chosen by the setting -----------------------------------------------------------------------


def test_an_unknown_scheme_is_told_with_the_known_ones(relay: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="begins with 'ftp'; expected one of amqp, nats"):
        relay("ftp://localhost")


ORDER = """
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("seed")
from example_project.shop.models import Product
from example_project.shop.ordering import place
place("Ada", {Product.objects.get(sku="teapot"): 1})
call_command("outbox_worker", "--once")
from django_outbox.models import OutboxEvent
print(*(f"{event.event_type} {event.progress}" for event in OutboxEvent.objects.all()), sep="\\n")
"""


@pytest.mark.parametrize("url", ["", "redis://127.0.0.1:6379/9"], ids=["off", "redis"])
def test_the_example_relays_if_it_is_told_to(tmp_path: Path, url: str) -> None:
    """Off by default; with ``RELAY_URL`` every event goes to the relay and its other listeners."""
    if url:
        answering(6379, "Redis")
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE_URL": f"sqlite:///{tmp_path / 'example.sqlite3'}",
        "RELAY_URL": url,
    }
    done = subprocess.run(
        [sys.executable, "-c", ORDER], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("relay") == (3 if url else 0), done.stdout
    if url:
        import redis

        with redis.Redis.from_url(url) as client:
            sent = [entry for _, entry in client.xrange("events")]
            client.delete("events")
        assert {entry[b"event-type"] for entry in sent} >= {b"order.placed", b"parcel.requested"}


# --- the documentation ---------------------------------------------------------------------------


def test_473_the_pages_show_what_is_tested_here() -> None:
    shown = {
        title: code
        for page in samples.pages()
        for title, code in samples.blocks(page).items()
        if title.startswith("example_project/")
    }
    assert len(shown) > 6
    for title, code in shown.items():
        assert code.strip() in (ROOT / title).read_text(), title
