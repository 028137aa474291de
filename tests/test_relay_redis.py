"""The relay to Redis streams, on private Redis servers."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

import django_outbox as outbox
from django_outbox.exceptions import Unrecoverable
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.relays import BrokerUnavailable, Message, Unconfirmed
from django_outbox.relays.registration import relays
from tests import brokers, samples
from tests.cases import cases
from tests.waiting import wait_until

redis = pytest.importorskip("redis")
if redis:  # after the skip
    from django_outbox.relays.redis import Refused, Stream

PAGE = "how-to/relay-to-redis.md"
on_the_table = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., brokers.Redis]]:
    """Yield a function that starts a server with options; stop all servers at the end."""
    started: list[brokers.Redis] = []

    def start(**options: Any) -> brokers.Redis:
        directory = tmp_path / f"redis-{len(started)}"
        directory.mkdir()
        server = brokers.Redis(directory, **options)
        started.append(server)
        server.start()
        return server

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def server(start: Callable[..., brokers.Redis]) -> brokers.Redis:
    return start()


@pytest.fixture
def opened() -> Iterator[Callable[..., Stream]]:
    """Yield a function that makes and opens a backend; close all of them at the end."""
    made: list[Stream] = []

    def opened(url: str, **options: Any) -> Stream:
        backend = Stream(url=url, **options)
        made.append(backend)
        backend.open()
        return backend

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def client(server: brokers.Redis) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def message(number: int = 0, **given: Any) -> Message:
    fields = {
        "to": "orders",
        "body": b'{"n":%d}' % number,
        "content_type": "application/json",
        "headers": {"event-id": f"e{number}"},
        "event_id": f"e{number}",
        "event_type": "order.placed",
        "key": None,
        "group": None,
        "event": outbox.Event(event_type="order.placed"),
        **given,
    }
    return Message(**fields)


def messages(count: int, **given: Any) -> list[Message]:
    return [message(number, **given) for number in range(count)]


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def stored(client: Any, stream: str = "orders") -> list[bytes]:
    return [fields[b"payload"] for _, fields in client.xrange(stream)]


# -- a batch ---------------------------------------------------------------------------------------


def test_a_batch_is_sent_at_once_and_stored_in_order(server: Any, client: Any, opened: Any) -> None:
    backend = opened(server.url)
    reads = client.info("stats")["total_reads_processed"]
    assert backend.publish(messages(500), within(10)) == [None] * 500
    assert stored(client) == [b'{"n":%d}' % number for number in range(500)]
    assert client.xrange("orders", count=1)[0][1] == {b"event-id": b"e0", b"payload": b'{"n":0}'}
    # No transaction, and far fewer reads of the socket by the server than commands.
    assert client.info("commandstats")["cmdstat_xadd"]["calls"] == 500
    assert "cmdstat_multi" not in client.info("commandstats")
    assert client.info("stats")["total_reads_processed"] - reads < 50


def test_what_redis_refuses_fails_by_itself(server: Any, client: Any, opened: Any) -> None:
    client.set("text", "no stream")
    batch = [message(n, to="text" if n % 2 else "orders") for n in range(500)]
    outcomes = opened(server.url).publish(batch, within(10))
    assert outcomes[::2] == [None] * 250
    assert {type(each) for each in outcomes[1::2]} == {Refused}
    assert "stream 'text'" in str(outcomes[1])
    assert "wrong kind of value" in str(outcomes[1])
    assert client.xlen("orders") == 250


def test_a_header_that_is_not_text_fails_before_it_is_sent(
    server: Any, client: Any, opened: Any
) -> None:
    batch = [message(0), message(1, headers={"name": "\ud800"}), message(2)]
    outcomes = opened(server.url).publish(batch, within(10))
    assert (outcomes[0], outcomes[2]) == (None, None)
    assert isinstance(outcomes[1], Unrecoverable)
    assert stored(client) == [b'{"n":0}', b'{"n":2}']


def test_a_header_called_payload_does_not_hide_the_payload(
    server: Any, client: Any, opened: Any
) -> None:
    batch = [message(0, headers={"payload": "other"})]
    assert opened(server.url).publish(batch, within(10)) == [None]
    [(_, fields)] = client.xrange("orders")
    assert fields == {b"payload": b'{"n":0}'}
    count = "return #redis.call('XRANGE', KEYS[1], '-', '+')[1][2]"
    assert client.eval(count, 1, "orders") == 2  # one name and its value


def test_streams_are_trimmed_to_about_maxlen(server: Any, client: Any, opened: Any) -> None:
    trimming = opened(server.url, maxlen=100)
    for _ in range(4):
        assert trimming.publish(messages(500), within(10)) == [None] * 500
    assert 100 <= client.xlen("orders") < 400  # a node of a stream has 100 entries
    whole = opened(server.url)
    whole.publish(messages(500, to="whole"), within(10))
    assert client.xlen("whole") == 500


def test_two_threads_publish_at_a_time(server: Any, client: Any, opened: Any) -> None:
    backend, outcomes = opened(server.url), list[Any]()
    threads = [
        threading.Thread(
            target=lambda name: outcomes.extend(
                backend.publish(messages(500, to=name, body=b"x" * 5000), within(10))
            ),
            args=(name,),
        )
        for name in ("first", "second")
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert outcomes == [None] * 1000
    assert (client.xlen("first"), client.xlen("second")) == (500, 500)


# -- outages ---------------------------------------------------------------------------------------


def test_a_server_that_is_away(server: Any, client: Any, opened: Any) -> None:
    backend = opened(server.url)
    assert backend.publish(messages(3), within(10)) == [None] * 3
    server.kill()
    with pytest.raises(BrokerUnavailable, match=rf"Redis at 127.0.0.1:{server.port}"):
        backend.publish(messages(3), within(10))
    with pytest.raises(BrokerUnavailable):
        backend.check()
    with pytest.raises(BrokerUnavailable, match="refused"):
        opened(server.url)
    server.restart()
    again = opened(server.url)
    again.check()
    assert again.publish([message(3)], within(10)) == [None]
    assert len(stored(client)) == 4  # confirmed means on disk: the server was killed


def test_a_connection_that_the_server_closed_while_idle_is_no_outage(
    server: Any, client: Any, opened: Any
) -> None:
    backend = opened(server.url)
    backend.publish([message()], within(10))
    client.client_kill_filter(_type="normal", skipme=True)
    assert backend.publish([message()], within(10)) == [None]
    assert client.xlen("orders") == 2


class Cut:
    """Forwards one connection to a server, and cuts it after so many replies to XADD."""

    def __init__(self, port: int, replies: int) -> None:
        self._server, self._replies = port, replies
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        inner, _ = self._listener.accept()
        outer = socket.create_connection(("127.0.0.1", self._server))
        forward = threading.Thread(target=self._forward, args=(inner, outer))
        forward.start()
        seen = b""
        while data := outer.recv(65536):
            seen += data
            ids = [
                place
                for place in range(len(seen))
                if seen.startswith(b"\r\n", place)
                and seen[:place].rpartition(b"\r\n")[2].count(b"-") == 1
            ]
            if len(ids) >= self._replies:
                end = ids[self._replies - 1] + 2 - (len(seen) - len(data))
                inner.sendall(data[: max(end, 0)])
                break
            inner.sendall(data)
        inner.shutdown(socket.SHUT_WR)
        forward.join()
        inner.close()
        outer.close()

    def _forward(self, inner: socket.socket, outer: socket.socket) -> None:
        try:
            while data := inner.recv(65536):
                outer.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def test_what_was_answered_before_a_connection_broke_is_confirmed(server: Any, client: Any) -> None:
    """A proxy passes the batch to the server and cuts the connection after 120 replies."""
    proxy = Cut(server.port, 120)
    backend = Stream(url=proxy.url, driver_info=None, protocol=2)  # no other replies with a dash
    backend.open()
    outcomes = backend.publish(messages(500), within(10))
    backend.close()
    proxy.close()
    assert outcomes[:120] == [None] * 120
    assert {type(each) for each in outcomes[120:]} == {BrokerUnavailable}
    assert client.xlen("orders") > 120  # so the others come twice: their ids tell


def test_a_server_that_does_not_answer(server: Any, client: Any, opened: Any) -> None:
    backend = opened(server.url)
    server.pause()
    outcomes = backend.publish(messages(500), within(0.5))
    assert {type(each) for each in outcomes} == {Unconfirmed}
    server.resume()
    assert backend.publish([message(to="after")], within(10)) == [None]


def test_nothing_is_sent_after_the_deadline(server: Any, client: Any, opened: Any) -> None:
    """A paused server gets what the kernel has passed on, and nothing from the client's buffers."""
    backend = opened(server.url)
    [connection] = backend._idle
    linger = connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
    assert struct.unpack("ii", linger) == (1, 0)  # a close drops what the kernel has not sent
    server.pause()
    outcomes = backend.publish(messages(500, body=b"x" * 100_000), within(0.5))
    assert {type(each) for each in outcomes} == {Unconfirmed}
    server.resume()
    backend.publish([message(to="after")], within(10))
    wait_until(lambda: client.xlen("after") == 1)
    wait_until(lambda: len(client.client_list(_type="normal")) == 2)  # its connection has ended
    assert client.xlen("orders") < 100


def test_an_outage_is_not_logged_by_the_client(
    server: Any, opened: Any, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    backend = opened(server.url)
    with caplog.at_level(logging.INFO):
        server.kill()
        with pytest.raises(BrokerUnavailable):
            backend.publish(messages(3), within(10))
        with pytest.raises(BrokerUnavailable):
            opened(server.url)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


# -- a server that takes no writes -----------------------------------------------------------------


def test_a_full_server_is_an_outage_until_there_is_room(start: Any, opened: Any) -> None:
    server = start(maxmemory="6mb", maxmemory_policy="noeviction")
    backend = opened(server.url)
    backend.check()
    outcomes = backend.publish(messages(200, body=b"x" * 100_000), within(10))
    taken = outcomes.count(None)
    assert 0 < taken < 200
    assert outcomes[:taken] == [None] * taken
    assert {type(each) for each in outcomes[taken:]} == {BrokerUnavailable}
    with redis.Redis.from_url(server.url) as client:
        assert client.xlen("orders") == taken
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BrokerUnavailable, match="maxmemory"):
            backend.publish(messages(3), within(10))
        with pytest.raises(BrokerUnavailable, match=r"takes no writes.*maxmemory"):
            backend.check()
        client.config_set("maxmemory", "0")
        backend.check()
        assert backend.publish([message()], within(10)) == [None]
        assert client.keys("*check*") == []


def test_a_replica_takes_no_writes(server: Any, start: Any, opened: Any) -> None:
    replica = start(replicaof=f"127.0.0.1 {server.port}")
    backend = opened(replica.url)
    with pytest.raises(BrokerUnavailable, match="read only replica"):
        backend.publish(messages(3), within(10))
    with pytest.raises(BrokerUnavailable, match="read only replica"):
        backend.check()


def test_a_replica_that_takes_writes_is_not_the_master(
    server: Any, start: Any, opened: Any
) -> None:
    """Its master would overwrite what it takes."""
    replica = start(replicaof=f"127.0.0.1 {server.port}", replica_read_only="no")
    with pytest.raises(BrokerUnavailable, match="is a replica; give the address of its master"):
        opened(replica.url).check()


def test_a_master_without_its_replicas_takes_no_writes(start: Any, opened: Any) -> None:
    server = start(min_replicas_to_write=1)
    with pytest.raises(BrokerUnavailable, match="Not enough good replicas"):
        opened(server.url).publish(messages(3), within(10))
    with pytest.raises(BrokerUnavailable, match="Not enough good replicas"):
        opened(server.url).check()


def test_a_server_that_is_loading_its_data(start: Any, opened: Any) -> None:
    server = start(appendonly="no")
    with redis.Redis.from_url(server.url) as client:
        client.mset({f"key{n}": n for n in range(1000)})
        client.save()
    server.kill()
    server._config.write_text(
        server._config.read_text()
        + "key-load-delay 5000\nloading-process-events-interval-bytes 1024\n"
    )
    server.restart()  # for five seconds it loads
    with pytest.raises(BrokerUnavailable, match="loading"):
        backend = opened(server.url)
        backend.publish(messages(3), within(10))

    def takes_writes() -> bool:
        try:
            return bool(opened(server.url).publish([message()], within(10)) == [None])
        except BrokerUnavailable:
            return False

    wait_until(takes_writes)


def test_a_login_that_fails(start: Any, opened: Any) -> None:
    server = start(requirepass="sesame")
    address = f"127.0.0.1:{server.port}/0"
    for url in (f"redis://{address}", f"redis://:wrongpass@{address}"):
        with pytest.raises(BrokerUnavailable) as caught:
            opened(url).publish([message()], within(10))
        assert "wrongpass" not in str(caught.value)
    backend = opened(f"redis://:sesame@{address}")
    assert backend.publish([message()], within(10)) == [None]
    server.kill()
    with pytest.raises(BrokerUnavailable) as caught:
        backend.publish([message()], within(10))
    assert "sesame" not in str(caught.value)


def test_a_user_without_permissions(server: Any, client: Any, opened: Any) -> None:
    client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+role"])
    client.acl_setuser("writer", enabled=True, nopass=True, keys=["order*"], commands=["+xadd"])
    address = f"127.0.0.1:{server.port}/0"
    reader = opened(f"redis://reader:x@{address}")
    with pytest.raises(Refused, match="grant the permission \\+xadd"):
        reader.check()
    assert {type(each) for each in reader.publish(messages(3), within(10))} == {Refused}
    writer = opened(f"redis://writer:x@{address}")
    writer.check()  # neither ROLE nor a key of our own is needed
    outcomes = writer.publish([message(), message(to="parcels")], within(10))
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Refused)


def test_a_cluster_is_named_by_the_check_and_by_its_messages(tmp_path: Any, opened: Any) -> None:
    nodes = [brokers.Redis(tmp_path / name, cluster_enabled="yes") for name in _made(tmp_path)]
    try:
        for each in nodes:
            each.start()
        with (
            redis.Redis.from_url(nodes[0].url) as first,
            redis.Redis.from_url(nodes[1].url) as second,
        ):
            first.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
            second.execute_command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", str(nodes[1].port))
            wait_until(lambda: first.cluster("INFO")["cluster_state"] == "ok")
        backend = opened(nodes[0].url)
        with pytest.raises(Refused, match="is a Redis Cluster, which is not supported"):
            backend.check()
        batch = [message(n, to=f"orders-{n}") for n in range(20)]
        refused = [each for each in backend.publish(batch, within(10)) if each is not None]
        assert refused
        for each in refused:
            assert "is a Redis Cluster, which is not supported" in str(each)
    finally:
        for each in nodes:
            each.stop()


def _made(directory: Path) -> list[str]:
    names = ["first", "second"]
    for each in names:
        (directory / each).mkdir()
    return names


# -- options ---------------------------------------------------------------------------------------


@cases(
    ("options", "expected"),
    [
        ({}, "url"),
        ({"url": "redis://localhost", "max_len": 5}, "max_len"),
        ({"url": "redis://localhost", "maxlen": 0}, "maxlen is 0; expected a number of entries"),
        ({"url": "redis://localhost", "timeout": -1}, "timeout is -1; expected seconds"),
        ({"url": "redis://localhost", "retry": None}, "retry cannot be set"),
        ({"url": "localhost:6379"}, "expected redis://user:password@host:port/database"),
        ({"url": "redis://:se/same@localhost"}, "url cannot be read"),
    ],
    ids=["no url", "unknown", "maxlen", "timeout", "retry", "no scheme", "password"],
)
def test_options_that_are_wrong(options: dict[str, Any], expected: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Stream(**options)
    assert expected in str(caught.value)
    assert "same" not in str(caught.value)


def test_options_of_redis_are_passed_on(server: Any, client: Any, opened: Any) -> None:
    Stream(url="redis://127.0.0.1:1/0")  # connects to nothing
    opened(server.url, client_name="relay-of-the-shop")
    assert "relay-of-the-shop" in [each["name"] for each in client.client_list()]


# -- by settings -----------------------------------------------------------------------------------


@pytest.fixture
def relay(settings: Any, server: brokers.Redis) -> Iterator[Callable[..., None]]:
    """Yield a function that configures a relay to the server."""

    def relay(**own: Any) -> None:
        settings.OUTBOX = {
            "RELAYS": {
                "orders": {
                    "BACKEND": "django_outbox.relays.redis.Stream",
                    "EVENTS": ["order.*"],
                    "TO": "orders",
                    "OPTIONS": {"url": server.url},
                    **own,
                }
            },
            "RETRY": {"policy": "fixed", "delay": 3600},
        }

    yield relay
    for each in relays():
        each.close()
        registry.remove(each)


def write(event_type: str = "order.placed", **fields: Any) -> OutboxEvent:
    given = {
        "payload": {"sku": "teapot", "name": "Kännchen", "n": 1.10},
        "aggregate_type": "shop.Order",
        "aggregate_id": "7",
        "headers": {"trace": "t1"},
        **fields,
    }
    with transaction.atomic():
        event_id = outbox.write(event_type, given.pop("payload"), **given)
    return OutboxEvent.objects.get(pk=event_id)


def text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


@on_the_table
def test_plain_entries(relay: Any, client: Any) -> None:
    relay()
    row = write(key="order-7", tenant_id="acme")
    assert outbox.drain() == 1
    [(_, fields)] = client.xrange("orders")
    assert text(fields) == {
        "payload": row.payload,
        "trace": "t1",
        "event-id": row.pk,
        "event-type": "order.placed",
        "occurred-at": row.occurred_at.isoformat(),
        "aggregate-type": "shop.Order",
        "aggregate-id": "7",
        "tenant-id": "acme",
        "event-key": "order-7",
    }
    row.refresh_from_db()
    assert (row.status, row.attempts) == (OutboxEvent.Status.DONE, 0)


@on_the_table
def test_cloud_events(relay: Any, client: Any) -> None:
    relay(FORMAT="cloudevents", SOURCE="/shop")
    row = write()
    assert outbox.drain() == 1
    [(_, fields)] = client.xrange("orders")
    found = text(fields)
    assert found.pop("ce-time")[:19] == row.occurred_at.isoformat()[:19]
    assert found == {
        "payload": row.payload,
        "content-type": "application/json",
        "trace": "t1",
        "ce-specversion": "1.0",
        "ce-id": row.pk,
        "ce-source": "/shop",
        "ce-type": "order.placed",
        "ce-subject": "7",
        "ce-partitionkey": "7",
        "ce-trace": "t1",
    }


@on_the_table
def test_structured_cloud_events(relay: Any, client: Any) -> None:
    relay(FORMAT="cloudevents-structured")
    row = write()
    assert outbox.drain() == 1
    [(_, fields)] = client.xrange("orders")
    found = text(fields)
    assert found.pop("content-type") == "application/cloudevents+json; charset=utf-8"
    body = found.pop("payload")
    assert json.loads(body)["id"] == row.pk
    assert f'"data":{row.payload}}}' in body
    assert found == {"trace": "t1"}


@on_the_table
def test_the_stream_comes_from_to(relay: Any, client: Any) -> None:
    relay(TO="{tenant_id}:{event_type}")
    write(tenant_id="acme")
    write(tenant_id="acme", event_type="order.sent")
    lacking = write()
    outbox.drain()
    assert sorted(client.keys()) == [b"acme:order.placed", b"acme:order.sent"]
    lacking.refresh_from_db()
    assert lacking.status == OutboxEvent.Status.DEAD


@on_the_table
def test_a_refused_event_follows_the_retry_policy(relay: Any, client: Any) -> None:
    relay(TO="{event_type}")
    client.set("order.refused", "no stream")
    refused, good = write("order.refused"), write()
    outbox.drain()
    refused.refresh_from_db()
    good.refresh_from_db()
    assert (refused.status, refused.attempts) == (OutboxEvent.Status.RETRY, 1)
    assert "wrong kind of value" in refused.last_error
    assert good.status == OutboxEvent.Status.DONE


@on_the_table
def test_an_outage_costs_no_attempts(relay: Any, server: Any, client: Any) -> None:
    relay()
    write()
    outbox.drain()
    server.kill()
    rows = [write() for _ in range(20)]
    with outbox.Worker():
        wait_until(lambda: OutboxPause.objects.filter(kind="breaker").exists())
        server.restart()
        wait_until(lambda: client.xlen("orders") == 21)
        wait_until(lambda: not OutboxEvent.objects.exclude(status=OutboxEvent.Status.DONE).exists())
    for row in rows:
        row.refresh_from_db()
        assert row.attempts == 0
    ids = [fields[b"event-id"].decode() for _, fields in client.xrange("orders")]
    assert {*ids} >= {row.pk for row in rows}
    assert len(ids) == 21


@on_the_table
def test_events_of_a_key_keep_their_order(relay: Any, client: Any) -> None:
    relay()
    rows = [write(key=f"k{n % 5}") for n in range(50)]
    with outbox.Worker():
        wait_until(lambda: client.xlen("orders") == 50)
    ids = [fields[b"event-id"].decode() for _, fields in client.xrange("orders")]
    for n in range(5):
        expected = [row.pk for row in rows[n::5]]
        assert [each for each in ids if each in expected] == expected


def test_wrong_options_are_found_without_connecting(relay: Any) -> None:
    relay(OPTIONS={"url": "redis://127.0.0.1:1", "nope": 1})
    [each] = [each for each in relays() if each.settings.name == "orders"]
    with pytest.raises(ImproperlyConfigured, match=r"OPTIONS.*nope"):
        each.new_backend()


# -- the page --------------------------------------------------------------------------------------


@on_the_table
def test_the_samples_of_the_page(relay: Any, server: Any, client: Any, settings: Any) -> None:
    with samples.modules(PAGE) as made:
        own = made["settings"].OUTBOX["RELAYS"]["orders"]
        relay(**{**own, "OPTIONS": {**own["OPTIONS"], "url": server.url}})
        client.xgroup_create("orders", "warehouse", mkstream=True)
        write(), write()
        outbox.drain()
        OutboxEvent.objects.update(status=OutboxEvent.Status.DEAD, progress=None)
        OutboxEvent.objects.all().replay()
        outbox.drain()
        assert client.xlen("orders") == 4
        handled: list[Any] = []
        made["warehouse.consumer"].consume(client, handled.append)
    assert [each["sku"] for each in handled] == ["teapot"] * 2  # each event once
    assert client.xpending("orders", "warehouse")["pending"] == 0
