"""The page of relays shows what is sent; its backend keeps the contract."""

from __future__ import annotations

import inspect
import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from django.utils.module_loading import import_string

import django_outbox as outbox
from django_outbox import BrokerUnavailable, Unrecoverable
from django_outbox.checks.queues import EXTRAS
from django_outbox.queue_settings import FIELDS, FORMATS, RelaySettings
from django_outbox.relays import Backend, Message
from django_outbox.relays.envelope import message_of
from django_outbox.testing import make_event
from tests import brokers, samples
from tests.cases import cases
from tests.relay_messages import Client
from tests.waiting import wait_until

PAGE = "reference/relays.md#Write a backend"


class Server(socketserver.ThreadingTCPServer):
    """Answers each line; what is asked of it is in the body."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lines: list[dict[str, Any]] = []


class Handler(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        for line in self.rfile:
            found = json.loads(line)
            if found["body"] == '"hang up"':
                return
            if found["body"] != '"silence"':
                self.server.lines.append(found)
                answer = "no such topic" if found["body"] == '"refuse"' else "ok"
                self.wfile.write(f"{answer}\n".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, args=(0.02,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def lines() -> Iterator[type[Backend]]:
    with samples.modules(PAGE) as made:
        yield made["shop.lines"].Lines


def message(payload: Any = None) -> Message:
    event = make_event("order.placed", payload, key="k")
    settings = RelaySettings(name="x", BACKEND="x.Y", EVENTS=("*",))
    return message_of(event, settings, Backend)


@pytest.fixture
def backend(server: Server, lines: Any) -> Iterator[Any]:
    found = Client(lines(host="127.0.0.1", port=server.server_address[1]))
    yield found
    found.close()


def test_each_message_has_its_own_outcome(backend: Any, server: Server) -> None:
    messages = [message(1), message("refuse"), message("x" * 70_000), message(2)]
    first, second, third, fourth = backend.publish(messages)
    assert (first, fourth) == (None, None)
    assert str(second) == "no such topic"
    assert isinstance(third, Unrecoverable)
    assert [each["id"] for each in server.lines] == [messages[n].event_id for n in (0, 1, 3)]
    assert server.lines[0]["headers"]["event-type"] == "order.placed"


def test_a_connection_that_breaks_in_mid_batch_keeps_what_was_confirmed(backend: Any) -> None:
    first, second, third = backend.publish([message(1), message("hang up"), message(2)])
    assert first is None
    assert isinstance(second, BrokerUnavailable)
    assert isinstance(third, BrokerUnavailable)
    with pytest.raises(BrokerUnavailable):  # of another thread that waited for the lock
        backend.publish([message(3)])


def test_a_server_that_does_not_answer_is_not_awaited_beyond_the_deadline(backend: Any) -> None:
    with pytest.raises(BrokerUnavailable, match="timed out"):
        backend.publish([message("silence")], 0.2)


def test_a_server_that_is_not_there(lines: Any) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=rf"^127\.0\.0\.1:{port}: "):
            lines(host="127.0.0.1", port=port).open()


# -- the how-to pages ------------------------------------------------------------------------------


@contextmanager
def relaying(page: str, broker: Any, port: int, settings: Any) -> Iterator[None]:
    """Have the relay of a page, whose broker has a port, send to another."""
    with samples.modules(page) as made:
        (relay,) = made["settings"].OUTBOX["RELAYS"].values()
    options = {
        name: value.replace(f"localhost:{port}", f"127.0.0.1:{broker.port}")
        for name, value in relay["OPTIONS"].items()
        if isinstance(value, str)
    }
    settings.OUTBOX = {"RELAYS": {"orders": {**relay, "OPTIONS": options}}}
    with samples.run(page, only="outbox.write"):
        outbox.drain()
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("name", "make", "port", "client"),
    [
        ("rabbitmq", brokers.RabbitMQ, 5672, "aio_pika"),
        ("nats", brokers.Nats, 4222, "nats"),
        ("kafka", brokers.Tansu, 9092, "confluent_kafka"),
    ],
)
def test_the_page_ends_with_a_message_on_the_screen(
    name: str, make: Any, port: int, client: str, settings: Any, tmp_path: Path
) -> None:
    pytest.importorskip(client)
    page, script, screen = f"how-to/relay-to-{name}.md", tmp_path / "watch.py", tmp_path / "screen"
    shown = re.findall(r'^(?:Waiting|\S+ \{").*\n', samples.section(page), re.MULTILINE)
    with brokers.running(make(tmp_path)) as broker:
        script.write_text(samples.files(page)["watch.py"].replace(f":{port}", f":{broker.port}"))
        watching = brokers.Child(screen)
        try:
            watching.start([sys.executable, "-u", str(script)])
            watching.wait_for(lambda: screen.read_text() == shown[0])
            with relaying(page, broker, port, settings):
                wait_until(lambda: screen.read_text() == "".join(shown))
        finally:
            watching.stop()


@pytest.mark.django_db(transaction=True)
def test_the_page_of_redis_ends_with_an_entry_on_the_screen(settings: Any, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    page = "how-to/relay-to-redis.md"
    found = re.search(r"^\$ redis-cli (X.*)\n((?:.*\n)*?)```$", samples.section(page), re.MULTILINE)
    assert found
    with brokers.running(brokers.Redis(tmp_path)) as broker, relaying(page, broker, 6379, settings):
        command = [brokers.program("redis-cli"), "--no-raw", "-p", str(broker.port)]
        screen = subprocess.check_output([*command, *found[1].split()], text=True, timeout=20)
    own = r'"\d{13}-0"|"01\w{24}"|"2.*:00"'  # the entry's id, the event's, and the time
    assert re.sub(own, "…", screen) == re.sub(own, "…", found[2])


# -- the reference ---------------------------------------------------------------------------------


def reference() -> str:
    return (samples.DOCS / "reference" / "relays.md").read_text()


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_as_the_reference_shows(form: str) -> None:
    event = make_event(
        "order.placed",
        {"order": 42, "total": "19.90"},
        event_id="01K8Z3V9QX6J0T5N2M4R7W8YAB",
        occurred_at=datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc),
        key="order-42",
        aggregate_type="shop.Order",
        aggregate_id="42",
        tenant_id="acme",
        headers={
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "x-shop": "north",
        },
    )
    settings = RelaySettings(
        name="x", BACKEND="x.Y", EVENTS=("*",), FORMAT=form, SOURCE="/shops/{tenant_id}"
    )
    sent = message_of(event, settings, Backend)
    lines = [f"{name}: {value}" for name, value in sent.headers.items()]
    text = "\n".join([f"content-type: {sent.content_type}", *lines, "", sent.body.decode(), ""])
    assert f'```text title="{form}"\n{text}```' in reference()


def test_every_setting_of_a_relay_is_in_the_reference_with_its_default() -> None:
    section = reference().partition("## Settings of a relay")[2].partition("\n###")[0]
    rows = dict(re.findall(r'^\| `"([A-Z]+)"` \| (.*?) \|', section, re.MULTILINE))
    assert {*rows} == {each for each in RelaySettings.__dataclass_fields__ if each.isupper()}
    plain = RelaySettings(name="x", BACKEND="x.Y", EVENTS=("*",))
    for name, shown in rows.items():
        if shown != "required":
            assert eval(shown.strip("`")) == getattr(plain, name), name


def test_every_field_is_in_the_reference() -> None:
    section = reference().partition("### Fields")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `\{(\w+)", section, re.MULTILINE)
    assert {*named} == {*FIELDS, "headers"}


SHOWN_ONCE = "django_outbox.relays.aws.SNS"  # its options are those of SQS


@cases("path", EXTRAS)
def test_a_backend_of_the_package_is_in_the_reference_with_its_options(path: str) -> None:
    _, _, section = reference().partition(f"\n`{path}`, extra `{EXTRAS[path]}`")
    assert section
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    try:
        found = import_string(path)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    assert f"prefix `{found.attribute_prefix}`" in section or path == SHOWN_ONCE
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section, re.MULTILINE))
    taken = {
        name: "required" if each.default is each.empty else str(each.default)
        for name, each in inspect.signature(found).parameters.items()
        if each.kind is each.KEYWORD_ONLY and name != "timeout"
    }
    assert path == SHOWN_ONCE or {name: each.strip('"') for name, each in rows.items()} == taken
