"""The relay to RabbitMQ, against a real broker that refuses, stalls, dies and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

import django_outbox as outbox
from django_outbox.relays import BrokerUnavailable
from tests import brokers, samples
from tests.relay_adapters import Consumer
from tests.relay_messages import kinds, message, messages, opened, publish, use_relay, write
from tests.waiting import wait_until

aio_pika = pytest.importorskip("aio_pika")

from django_outbox.relays.rabbitmq import RabbitMQ  # noqa: E402

stored = pytest.mark.django_db(transaction=True)  # by way of the table


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[brokers.RabbitMQ]:
    with brokers.running(brokers.RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))) as broker:
        yield broker


@pytest.fixture
def consumer(broker: brokers.RabbitMQ) -> Consumer:
    return Consumer(broker.url)


# --- by way of the table --------------------------------------------------------------------------


@stored
def test_an_event_becomes_a_persistent_message(consumer: Consumer, settings: Any) -> None:
    own = {"url": consumer.url, "exchange": consumer.name}
    use_relay(settings, "rabbitmq.RabbitMQ", "{event_type}", own)
    row = write()
    assert outbox.drain() == 1
    (found,) = consumer.read()
    assert (found.message_id, found.type, found.routing_key) == (row.pk, row.event_type, found.type)
    assert found.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert found.timestamp == row.occurred_at.replace(microsecond=0)


@stored
def test_the_consumer_of_the_page_handles_a_repeat_once(consumer: Consumer) -> None:
    kombu = pytest.importorskip("kombu")
    repeated = message()
    with opened(consumer.backend()) as session:
        assert publish(session, [repeated, repeated]) == [None] * 2
    handled: list[Any] = []
    with samples.modules("how-to/relay-to-rabbitmq.md") as made:
        consume = made["warehouse.consumer"].consume
        with kombu.Connection(consumer.url) as connection:
            queue = kombu.Queue(consumer.name)(connection)
            for _ in range(2):
                consume(wait_until(queue.get), handled.append)
            assert queue.get() is None
    assert handled == [{"sku": "teapot"}]


# --- refusals -------------------------------------------------------------------------------------


def test_a_queue_that_is_full_refuses(broker: brokers.RabbitMQ) -> None:
    consumer = Consumer(broker.url, **{"x-max-length": 10, "x-overflow": "reject-publish"})
    with opened(consumer.backend()) as session:
        outcomes = publish(session, messages(100))
        found = kinds(outcomes)
        assert found[""] >= 10
        assert found == {"": found[""], "Refused": 100 - found[""]}
        assert "is full" in str(next(each for each in outcomes if each))
        assert kinds(publish(session, messages(3))) == {"Refused": 3}
        session.run(session.backend.check, timeout=10)  # the broker itself takes messages
    assert consumer.count() == found[""]


def test_a_routing_key_without_permission_fails_alone(broker: brokers.RabbitMQ) -> None:
    """The broker closes the channel for it, and does not say which message it was."""
    consumer = Consumer(broker.url, exchange=broker.limited_exchange)
    batch = [message("secret.x" if n in (3, 60, 61) else "order.x") for n in range(100)]
    with opened(consumer.backend(url=broker.user_url("limited"), declare=False)) as session:
        outcomes = publish(session, batch)
    assert kinds(outcomes) == {"": 97, "Refused": 3}
    assert all("'secret.x'" in str(outcomes[index]) for index in (3, 60, 61))
    confirmed = {each.event_id for each, got in zip(batch, outcomes, strict=True) if got is None}
    assert {each.message_id for each in consumer.read(consumer.count())} == confirmed


def test_the_longest_names_pass(consumer: Consumer) -> None:
    batch = messages(2, "ä" * 127, headers={"ä" * 64: "x", "long": "x" * 60_000})
    with opened(consumer.backend()) as session:
        assert publish(session, batch) == [None, None]
    assert consumer.read()[0].headers["ä" * 64] == "x"


# --- a broker that takes nothing ------------------------------------------------------------------


def test_a_memory_alarm(broker: brokers.RabbitMQ, consumer: Consumer) -> None:
    """The broker still accepts connections and answers all but a publish."""
    with opened(consumer.backend()) as session:
        assert publish(session, messages(1)) == [None]
        broker.control("set_vm_memory_high_watermark", "0.00001")
        try:
            with pytest.raises(BrokerUnavailable, match="memory or disk alarm"):
                for _ in range(1000):  # the alarm is raised a moment later
                    publish(session, messages(10), within=2)
            with (
                opened(consumer.backend()) as another,
                pytest.raises(BrokerUnavailable, match="memory or disk alarm"),
            ):
                another.run(another.backend.check, timeout=10)
        finally:
            broker.control("set_vm_memory_high_watermark", "0.4")
    with opened(consumer.backend()) as session:
        session.run(session.backend.check, timeout=10)
        assert publish(session, messages(10)) == [None] * 10


def test_a_user_without_permission_to_write(broker: brokers.RabbitMQ, consumer: Consumer) -> None:
    with opened(consumer.backend(url=broker.user_url("reader"))) as session:
        with pytest.raises(BrokerUnavailable, match="refused 'reader' a permission"):
            publish(session, messages(10))
        with pytest.raises(BrokerUnavailable, match=consumer.name):
            session.run(session.backend.check, timeout=10)


@pytest.mark.parametrize(
    ("password", "vhost", "options", "said"),
    [
        ("secret", "", {}, "refused the login of 'guest'"),
        ("guest", "nowhere", {}, "NOT_ALLOWED - vhost nowhere not found"),
        ("guest", "few", {}, "closed the connection: .*NOT_ALLOWED - .* connection limit"),
        ("guest", "", {"exchange": "missing", "declare": False}, "'missing'; declare it"),
    ],
    ids=["login", "vhost", "limit", "exchange"],
)
def test_what_is_missing_is_named(
    broker: brokers.RabbitMQ, password: str, vhost: str, options: dict[str, Any], said: str
) -> None:
    if vhost == "few":
        broker.control("add_vhost", vhost)
        broker.control("set_permissions", "--vhost", vhost, "guest", ".*", ".*", ".*")
        broker.control("set_vhost_limits", "--vhost", vhost, '{"max-connections": 0}')
    url = broker.url.replace("guest:guest", f"guest:{password}") + vhost
    with pytest.raises(BrokerUnavailable, match=said) as raised:
        opened(RabbitMQ(url=url, **options)).__enter__()
    assert "secret" not in str(raised.value)


def test_a_user_with_one_connection_and_channel(
    broker: brokers.RabbitMQ, consumer: Consumer
) -> None:
    """The check needs no more than a batch does; one that may have no channel says so."""
    limits = '{"max-connections": 1, "max-channels": %d}'
    backend = consumer.backend(url=broker.user_url("limited"))
    try:
        broker.control("set_user_limits", "limited", limits % 1)
        with opened(backend) as session:
            session.run(session.backend.check, timeout=10)
            assert publish(session, messages(1)) == [None]
        broker.control("set_user_limits", "limited", limits % 0)
        said = "closed the connection: NOT_ALLOWED - number of channels .* limit"
        with pytest.raises(BrokerUnavailable, match=said):
            opened(consumer.backend(url=broker.user_url("limited"))).__enter__()
    finally:
        broker.control("clear_user_limits", "limited", "all")


# --- the exchange ---------------------------------------------------------------------------------


def test_the_exchange_is_declared(broker: brokers.RabbitMQ) -> None:
    name = f"test-{uuid4()}"
    with opened(RabbitMQ(url=broker.url, exchange=name)):
        pass
    # It accepts a declaration of the same kind only.
    consumer = Consumer(broker.url, exchange=name)
    with pytest.raises(Exception, match="inequivalent arg 'type'"):
        Consumer(broker.url, exchange=name, kind="fanout")
    assert consumer.count() == 0


def test_an_exchange_that_is_deleted_in_use(consumer: Consumer) -> None:
    with opened(consumer.backend(declare=False)) as session:
        assert publish(session, messages(1)) == [None]
        consumer.delete_exchange()
        with pytest.raises(BrokerUnavailable, match="no exchange"):
            publish(session, messages(500))
        with pytest.raises(BrokerUnavailable, match="no exchange"):
            session.run(session.backend.check, timeout=10)


def test_an_exchange_of_another_type(broker: brokers.RabbitMQ) -> None:
    consumer = Consumer(broker.url, kind="fanout")
    with pytest.raises(BrokerUnavailable, match="declare=False"), opened(consumer.backend()):
        pass
    with opened(consumer.backend(declare=False)) as session:
        assert publish(session, messages(1)) == [None]
    assert consumer.count() == 1


def test_the_default_exchange_takes_names_of_queues(
    broker: brokers.RabbitMQ, consumer: Consumer
) -> None:
    with opened(RabbitMQ(url=broker.url, exchange="")) as session:
        outcomes = publish(session, [message(consumer.name), message("no such queue")])
        session.run(session.backend.check, timeout=10)
    assert kinds(outcomes) == {"": 1, "Refused": 1}


def test_a_check_leaves_nothing_behind(consumer: Consumer) -> None:
    with opened(consumer.backend()) as session:
        for _ in range(3):
            session.run(session.backend.check, timeout=10)
        assert publish(session, messages(1)) == [None]
    assert consumer.count() == 1


# --- options --------------------------------------------------------------------------------------


def test_arguments_of_the_client_replace_the_url(broker: brokers.RabbitMQ) -> None:
    login = {"host": "127.0.0.1", "port": broker.port, "login": "guest", "password": "guest"}
    with opened(RabbitMQ(**login, client_properties={"connection_name": "shop"})) as session:
        assert "shop" in broker.control("list_connections", "client_properties")
        session.run(session.backend.check, timeout=10)
