"""The relay to NATS JetStream, against a real server that refuses, stalls, dies and comes back."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from django_outbox.exceptions import Unrecoverable
from django_outbox.relays import BrokerUnavailable
from tests import brokers, samples
from tests.receiver import certificate
from tests.relay_adapters import Nats, Stream
from tests.relay_messages import kinds, message, messages, opened, publish
from tests.waiting import wait_until

nats = pytest.importorskip("nats")

from django_outbox.relays.backend import Refused  # noqa: E402
from django_outbox.relays.nats import JetStream, NoStream  # noqa: E402

stored = pytest.mark.django_db(transaction=True)  # by way of the table


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[brokers.Nats]:
    with brokers.running(brokers.Nats(tmp_path_factory.mktemp("nats"))) as broker:
        yield broker


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., brokers.Nats]]:
    """Yield a function that starts a server which the test may restart."""
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(brokers.running(brokers.Nats(tmp_path, **given)))


@pytest.fixture
def stream(broker: brokers.Nats) -> Stream:
    return Stream(broker.url)


def check(session: Any) -> None:
    session.run(session.backend.check, timeout=10)


# --- by way of the table --------------------------------------------------------------------------


@stored
def test_the_consumer_of_the_page_handles_a_repeat_once(broker: brokers.Nats) -> None:
    stream = Stream(broker.url, duplicate_window=0.1)
    repeated, handled = stream.message(), list[Any]()
    with opened(stream.backend()) as session:
        assert publish(session, [repeated]) == [None]
        wait_until(lambda: publish(session, [repeated]) == [None] and stream.count() == 2)
    with samples.modules("how-to/relay-to-nats.md") as made:

        async def consume(context: Any) -> None:
            subscription = await context.pull_subscribe("", durable="warehouse", stream=stream.name)
            for each in await subscription.fetch(2, timeout=20):
                await made["warehouse.consumer"].consume(each, handled.append)
            assert (await subscription.consumer_info()).num_ack_pending == 0

        async_to_sync(stream.connected)(consume)
    assert handled == [{"sku": "teapot"}]


# --- acknowledgements -----------------------------------------------------------------------------


def test_a_repeat_is_confirmed_and_stored_once(stream: Stream) -> None:
    batch = stream.messages(50)
    for _ in range(2):
        with opened(stream.backend()) as session:
            assert publish(session, batch) == [None] * 50
    assert stream.count() == 50


def test_a_batch_larger_than_the_clients_buffer(stream: Stream) -> None:
    batch = stream.messages(100, body=b"x" * 90_000)
    with opened(stream.backend()) as session:
        assert publish(session, batch) == [None] * 100


def test_it_opens_one_of_several_servers(stream: Stream) -> None:
    servers = [f"nats://127.0.0.1:{brokers.free_port()}", stream.url]
    for _ in range(5):  # in an order by chance
        with opened(stream.backend(servers=servers)) as session:
            assert publish(session, stream.messages(1)) == [None]


# --- TLS ------------------------------------------------------------------------------------------


class Plain:
    """A server without TLS, which keeps what it is sent."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self.received = self._server.getsockname()[1], b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                with client, suppress(OSError):
                    client.sendall(b'INFO {"server_id":"x","max_payload":9,"nonce":"abc"}\r\n')
                    while data := client.recv(4096):
                        self.received += data
                        client.sendall(b"PONG\r\n")


@pytest.fixture
def plain() -> Iterator[Plain]:
    server = Plain()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("tls://shop:s3cret@", {}),
        ("tls://t0ken@", {}),
        ("tls://", {"user": "shop", "password": "s3cret"}),
        ("tls://", {"token": "t0ken"}),
        ("tls://", {"user_jwt_cb": lambda: bytearray(b"jwt"), "signature_cb": lambda nonce: b"x"}),
        ("tls://", {}),
        ("nats://shop:s3cret@", {"tls": ssl.create_default_context()}),
        ("shop:s3cret@", {"tls": ssl.create_default_context()}),
        ("nats://shop:s3cret@", {"tls_hostname": "nats.example"}),
    ],
    ids="url,token,options,token option,signature,none,context,no scheme,hostname".split(","),
)
def test_nothing_is_sent_without_the_tls_that_was_asked_for(
    plain: Plain, scheme: str, options: dict[str, Any]
) -> None:
    backend = JetStream(servers=f"{scheme}127.0.0.1:{plain.port}", **options)
    with pytest.raises(BrokerUnavailable, match="offers no TLS"), opened(backend):
        pass
    assert plain.received == b""


def test_without_tls_it_was_not_asked_for(plain: Plain) -> None:
    with opened(JetStream(servers=f"nats://shop:s3cret@127.0.0.1:{plain.port}")):
        pass
    assert b"s3cret" in plain.received


def test_a_server_with_tls(start: Any, tmp_path: Path) -> None:
    files = certificate(tmp_path, host="127.0.0.1")
    config = f'tls {{ cert_file: "{files[0]}", key_file: "{files[1]}" }}'
    broker = start(config=f"{config}\nauthorization {{ user: shop, password: s3cret }}")
    context = ssl.create_default_context(cafile=files[0])
    own = broker.url.replace("://", "://shop:s3cret@")
    login = {"user": "shop", "password": "s3cret"}
    for url, options in ((own, {}), (own.replace("nats:", "tls:"), {}), (broker.url, login)):
        with opened(JetStream(servers=url, tls=context, **options)) as session:
            check(session)
    for url in (own, broker.url):
        with (
            pytest.raises(BrokerUnavailable, match="certificate"),
            opened(JetStream(servers=url, tls=ssl.create_default_context())),
        ):
            pass


# --- refusals -------------------------------------------------------------------------------------


def test_a_stream_that_is_full_refuses(broker: brokers.Nats) -> None:
    stream = Stream(broker.url, discard="new", max_msgs=10)
    with opened(stream.backend()) as session:
        outcomes = publish(session, stream.messages(100))
        check(session)  # the server itself takes messages
    found = kinds(outcomes)
    assert (found, stream.count()) == ({"": 10, "Refused": 90}, 10)
    assert isinstance(outcomes[-1], Refused)
    assert "maximum" in str(outcomes[-1])


def test_another_stream_than_expected_refuses(stream: Stream) -> None:
    with opened(stream.backend(stream=stream.name)) as session:
        check(session)
        assert publish(session, stream.messages(1)) == [None]
    assert stream.read()[0].headers["Nats-Expected-Stream"] == stream.name
    another = Stream(stream.url)
    with opened(stream.backend(stream=another.name)) as session:
        (outcome,) = publish(session, stream.messages(1))
    assert "expected stream does not match" in str(outcome)
    assert isinstance(outcome, Refused)


def test_the_largest_message_passes(stream: Stream) -> None:
    largest = stream.message(headers={})
    headers = (
        f"NATS/1.0\r\ncontent-type: application/json\r\nNats-Msg-Id: {largest.event_id}\r\n\r\n"
    )
    with opened(stream.backend()) as session:
        body = b"x" * (Nats.LARGEST - len(headers))
        assert publish(session, [stream.message(headers={}, body=body)]) == [None]
        (outcome,) = publish(session, [stream.message(headers={}, body=body + b"x")])
    assert isinstance(outcome, Unrecoverable)


def test_a_message_too_large_for_its_stream_is_dead(broker: brokers.Nats) -> None:
    stream = Stream(broker.url, max_msg_size=500)
    with opened(stream.backend()) as session:
        outcomes = publish(session, [stream.message(), stream.message(body=b"x" * 600)])
    assert kinds(outcomes) == {"": 1, "Unrecoverable": 1}
    assert "message size exceeds maximum" in str(outcomes[1])


# --- permissions, and a server that takes nothing -------------------------------------------------

USERS = """
authorization {
  users = [
    { user: admin, password: admin }
    { user: shop, password: "s3cret", permissions {
        publish: ["*.order.>", "$JS.API.INFO"], subscribe: "_INBOX.>" } }
    { user: deaf, password: "s3cret", permissions { publish: ">", subscribe: "nothing" } }
    { user: asks, password: "s3cret", permissions {
        publish: ["*.order.>", "$JS.API.INFO"], subscribe: "_INBOX.>" } }
    { user: mute, password: "s3cret", permissions { publish: "*.order.>", subscribe: "_INBOX.>" } }
  ]
}
"""


def test_permissions(start: Any) -> None:
    broker = start(config=USERS)
    stream = Stream(broker.url.replace("://", "://admin:admin@"))

    def backend(user: str) -> JetStream:
        return JetStream(servers=broker.url, user=user, password="s3cret")

    with opened(backend("shop")) as session:
        check(session)
        batch = [stream.message("order.placed"), stream.message("invoice.sent")] * 50
        outcomes = publish(session, batch, within=600)  # no answer to the refused ones comes
        assert kinds(outcomes) == {"": 50, "Refused": 50}
        assert "permissions violation" in str(outcomes[1])
    with opened(backend("mute")) as session:  # it may not ask JetStream anything
        check(session)
        outcomes = publish(session, [stream.message("order.placed"), message("no.order.x")])
        assert kinds(outcomes) == {"": 1, "NoStream": 1}
    named = backend("asks")  # it may not ask for the stream of a subject
    named.to = f"{stream.name}.order.placed"
    with opened(named) as session:
        check(session)
    missing = JetStream(servers=broker.url, user="asks", password="s3cret", stream="x")
    with opened(missing) as session:
        check(session)
    denied = "permissions violation for subscription"
    with opened(backend("deaf")) as session, pytest.raises(BrokerUnavailable, match=denied):
        check(session)
    with (
        pytest.raises(BrokerUnavailable, match="refused the login") as raised,
        opened(JetStream(servers=broker.url, user="shop", password="wr0ng")),
    ):
        pass
    assert "wr0ng" not in str(raised.value)


ACCOUNT = "accounts {A {users: [{user: a, password: a}], limits: {max_conn: 1}}}"


@pytest.mark.parametrize("limit", ["", ACCOUNT], ids=["server", "account"])
def test_a_server_that_takes_no_more_connections_is_quoted(start: Any, limit: str) -> None:
    broker = start(jetstream=False, config=limit or "max_connections: 1")
    said = "refused the connection: maximum .*connections exceeded"
    options = {"user": "a", "password": "a"} if limit else {}
    with opened(JetStream(servers=broker.url, **options)):
        for _ in range(5):
            with (
                pytest.raises(BrokerUnavailable, match=said),
                opened(JetStream(servers=broker.url, **options)),
            ):
                pass


def test_a_server_without_jetstream(start: Any) -> None:
    """Its answer to a message is the same as that of one whose stream is missing."""
    broker = start(jetstream=False)
    with opened(JetStream(servers=broker.url)) as session:
        with pytest.raises(BrokerUnavailable, match="has no JetStream; enable it"):
            publish(session, messages(10))
        with pytest.raises(BrokerUnavailable, match="has no JetStream"):
            check(session)


HUB = """
jetstream {{ store_dir: "{directory}", domain: hub }}
leafnodes {{ host: "127.0.0.1", port: {port} }}
"""


def test_a_leaf_node_of_a_server_with_jetstream(tmp_path: Path) -> None:
    """What answers is another server, in a domain of JetStream."""
    port, directories = brokers.free_port(), [tmp_path / "hub", tmp_path / "leaf"]
    for each in directories:
        each.mkdir()
    hub = brokers.Nats(
        directories[0], jetstream=False, config=HUB.format(directory=tmp_path / "data", port=port)
    )
    remotes = f'leafnodes {{ remotes: [ {{ url: "nats://127.0.0.1:{port}" }} ] }}'
    leaf = brokers.Nats(directories[1], jetstream=False, config=remotes)
    with brokers.running(hub), brokers.running(leaf):
        stream = Stream(hub.url)
        with opened(JetStream(servers=leaf.url, domain="hub")) as session:
            session.backend.to = f"{stream.name}.order.placed"
            wait_until(lambda: kinds(publish(session, stream.messages(1))) == {"": 1})
            check(session)
            assert kinds(publish(session, messages(1, "nobody.listens"))) == {"NoStream": 1}
        with opened(JetStream(servers=leaf.url, domain="other")) as session:
            with pytest.raises(BrokerUnavailable, match="domain"):
                check(session)
            batch = [stream.message(), message("nobody.listens")]
            assert kinds(publish(session, batch)) == {"": 1, "NoStream": 1}


def test_a_disk_that_is_full(start: Any, tmp_path: Path) -> None:
    """The server's own limit concerns every message."""
    broker = start(
        jetstream=False,
        config=f'jetstream {{ store_dir: "{tmp_path / "limited"}", max_file_store: 100KB }}',
    )
    stream = Stream(broker.url)
    with opened(stream.backend()) as session:
        found: list[Any] = []
        with pytest.raises(BrokerUnavailable, match=r"insufficient|exceeded"):
            for _ in range(20):
                found += publish(session, stream.messages(1, body=b"x" * 20_000))
    assert set(found) == {None}


def test_a_check_names_what_is_missing(stream: Stream) -> None:
    with (
        opened(stream.backend(stream="missing")) as session,
        pytest.raises(NoStream, match="no stream 'missing'"),
    ):
        check(session)
    fixed = stream.backend()
    fixed.to = "nobody.listens"
    with opened(fixed) as session, pytest.raises(NoStream, match=r"'nobody\.listens'"):
        check(session)
    for to in (f"{stream.name}.fixed", "{event_type}"):
        with opened(stream.backend()) as session:
            session.backend.to = to
            check(session)
