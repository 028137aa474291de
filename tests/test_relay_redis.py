"""The relay to Redis streams, on private Redis servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.relays import BrokerUnavailable
from tests import brokers, samples
from tests.relay_messages import Client, opener, write
from tests.relay_messages import numbered as message
from tests.relay_messages import several as messages
from tests.waiting import wait_until

redis = pytest.importorskip("redis")
if redis:  # after the skip
    from django_outbox.relays.backend import Refused
    from django_outbox.relays.redis import Stream

PAGE = "how-to/relay-to-redis.md"
on_the_table = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., brokers.Redis]]:
    """Yield a function that starts a server with options; stop all servers at the end."""
    with ExitStack() as stack:

        def start(**options: Any) -> brokers.Redis:
            directory = tmp_path / f"redis-{len([*tmp_path.iterdir()])}"
            directory.mkdir()
            return stack.enter_context(brokers.running(brokers.Redis(directory, **options)))

        yield start


@pytest.fixture
def server(start: Callable[..., brokers.Redis]) -> brokers.Redis:
    return start()


@pytest.fixture
def opened() -> Iterator[Callable[..., Client]]:
    with opener(lambda url, **options: Stream(url=url, **options)) as opened:
        yield opened


@pytest.fixture
def client(server: brokers.Redis) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


# -- a batch ---------------------------------------------------------------------------------------


def test_a_header_called_payload_does_not_hide_the_payload(
    server: Any, client: Any, opened: Any
) -> None:
    batch = [message(0, headers={"payload": "other"})]
    assert opened(server.url).publish(batch, 10) == [None]
    [(_, fields)] = client.xrange("orders")
    assert fields == {b"payload": b'{"n":0}'}
    count = "return #redis.call('XRANGE', KEYS[1], '-', '+')[1][2]"
    assert client.eval(count, 1, "orders") == 2  # one name and its value


def test_streams_are_trimmed_to_about_maxlen(server: Any, client: Any, opened: Any) -> None:
    trimming = opened(server.url, maxlen=100)
    for _ in range(4):
        assert trimming.publish(messages(500), 10) == [None] * 500
    assert 100 <= client.xlen("orders") < 400  # a node of a stream has 100 entries
    whole = opened(server.url)
    whole.publish(messages(500, to="whole"), 10)
    assert client.xlen("whole") == 500


# -- outages ---------------------------------------------------------------------------------------


def test_a_connection_that_the_server_closed_while_idle_is_no_outage(
    server: Any, client: Any, opened: Any
) -> None:
    backend = opened(server.url)
    backend.publish([message()], 10)
    client.client_kill_filter(_type="normal", skipme=True)
    assert backend.publish([message()], 10) == [None]
    assert client.xlen("orders") == 2


# -- a server that takes no writes -----------------------------------------------------------------


def test_a_full_server_is_an_outage_until_there_is_room(start: Any, opened: Any) -> None:
    server = start(maxmemory="6mb", maxmemory_policy="noeviction")
    backend = opened(server.url)
    backend.check()
    outcomes = backend.publish(messages(200, body=b"x" * 100_000), 10)
    taken = outcomes.count(None)
    assert 0 < taken < 200
    # The server frees buffers between two commands, so a message may be taken after a refused one.
    assert {type(each) for each in outcomes} == {type(None), BrokerUnavailable}
    with redis.Redis.from_url(server.url) as client:
        assert client.xlen("orders") == taken
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BrokerUnavailable, match="maxmemory"):
            backend.publish(messages(3), 10)
        with pytest.raises(BrokerUnavailable, match=r"takes no writes.*maxmemory"):
            backend.check()
        client.config_set("maxmemory", "0")
        backend.check()
        assert backend.publish([message()], 10) == [None]
        assert client.keys("*check*") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicaof": "127.0.0.1 {}"}, "read only replica"),
        ({"min_replicas_to_write": "1"}, "Not enough good replicas"),
        ({"rename_command": 'XADD ""'}, "unknown command 'XADD'$"),  # as of a Sentinel
    ],
    ids=["replica", "no replicas", "no streams"],
)
def test_a_server_that_takes_no_writes(
    server: Any, start: Any, opened: Any, options: dict[str, str], said: str
) -> None:
    given = {name: value.format(server.port) for name, value in options.items()}
    backend = opened(start(**given).url)
    with pytest.raises(BrokerUnavailable, match=said):
        backend.publish(messages(3), 10)
    with pytest.raises(BrokerUnavailable, match=said):
        backend.check()


def test_a_replica_that_takes_writes_is_not_the_master(
    server: Any, start: Any, opened: Any
) -> None:
    """Its master would overwrite what it takes."""
    replica = start(replicaof=f"127.0.0.1 {server.port}", replica_read_only="no")
    with pytest.raises(BrokerUnavailable, match="is a replica; give the address of its master"):
        opened(replica.url).check()


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
        backend.publish(messages(3), 10)

    def takes_writes() -> bool:
        try:
            return bool(opened(server.url).publish([message()], 10) == [None])
        except BrokerUnavailable:
            return False

    wait_until(takes_writes)


def test_a_login_that_fails(start: Any, opened: Any) -> None:
    server = start(requirepass="sesame")
    address = f"127.0.0.1:{server.port}/0"
    for url in (f"redis://{address}", f"redis://:wrongpass@{address}"):
        with pytest.raises(BrokerUnavailable) as caught:
            opened(url).publish([message()], 10)
        assert "wrongpass" not in str(caught.value)
    backend = opened(f"redis://:sesame@{address}")
    assert backend.publish([message()], 10) == [None]
    server.kill()
    with pytest.raises(BrokerUnavailable) as caught:
        backend.publish([message()], 10)
    assert "sesame" not in str(caught.value)


def test_a_user_without_permissions(server: Any, client: Any, opened: Any) -> None:
    client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+role"])
    client.acl_setuser("writer", enabled=True, nopass=True, keys=["order*"], commands=["+xadd"])
    address = f"127.0.0.1:{server.port}/0"
    reader = opened(f"redis://reader:x@{address}")
    with pytest.raises(Refused, match="grant the permission \\+xadd"):
        reader.check()
    assert {type(each) for each in reader.publish(messages(3), 10)} == {Refused}
    writer = opened(f"redis://writer:x@{address}")
    writer.check()  # neither ROLE nor a key of our own is needed
    outcomes = writer.publish([message(), message(to="parcels")], 10)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Refused)


def test_a_cluster_is_named_by_the_check_and_by_its_messages(start: Any, opened: Any) -> None:
    nodes = [start(cluster_enabled="yes") for _ in range(2)]
    with redis.Redis.from_url(nodes[0].url) as first, redis.Redis.from_url(nodes[1].url) as second:
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", str(nodes[1].port))
        wait_until(lambda: first.cluster("INFO")["cluster_state"] == "ok")
    backend, said = opened(nodes[0].url), "is a Redis Cluster, which is not supported"
    with pytest.raises(Refused, match=said):
        backend.check()
    batch = [message(n, to=f"orders-{n}") for n in range(20)]
    refused = [str(each) for each in backend.publish(batch, 10) if each is not None]
    assert refused
    assert all(said in each for each in refused)


# -- options ---------------------------------------------------------------------------------------


def test_options_of_redis_are_passed_on(server: Any, client: Any, opened: Any) -> None:
    Stream(url="redis://127.0.0.1:1/0")  # connects to nothing
    opened(server.url, client_name="relay-of-the-shop")
    assert "relay-of-the-shop" in [each["name"] for each in client.client_list()]


# -- the page --------------------------------------------------------------------------------------


@on_the_table
def test_the_samples_of_the_page(server: Any, client: Any, settings: Any) -> None:
    with samples.modules(PAGE) as made:
        own = made["settings"].OUTBOX["RELAYS"]["orders"]
        own["OPTIONS"] |= {"url": server.url}
        settings.OUTBOX = made["settings"].OUTBOX
        client.xgroup_create("orders", "warehouse", mkstream=True)
        write(), write()
        outbox.drain()
        OutboxEvent.objects.update(status=OutboxEvent.Status.DEAD)
        OutboxEvent.objects.all().replay()
        outbox.drain()
        assert client.xlen("orders") == 4
        handled: list[Any] = []
        made["warehouse.consumer"].consume(client, handled.append)
    assert [each["sku"] for each in handled] == ["teapot"] * 2  # each event once
    assert client.xpending("orders", "warehouse")["pending"] == 0
