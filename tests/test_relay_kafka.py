"""The relay to Kafka.

What a broker stores and gives to consumers, outages and kills: on Tansu, a real broker that speaks
Kafka's protocol and keeps its records in memory. Errors that a test has to choose: on librdkafka's
mock cluster, as the names of those tests say. None of them runs on Apache Kafka itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_outbox.exceptions import Unrecoverable
from django_outbox.relays import BrokerUnavailable, Unconfirmed
from django_outbox.relays.backend import Refused
from tests import brokers, mock_kafka
from tests.mock_kafka import MockCluster
from tests.relay_adapters import create, records
from tests.relay_messages import Client, opener
from tests.relay_messages import numbered as message
from tests.relay_messages import several as messages
from tests.waiting import wait_until

WHY = "confluent-kafka is not installed; it has no wheel for Python 3.15 yet"
confluent = pytest.importorskip("confluent_kafka", reason=WHY)
if confluent:  # after the skip
    from django_outbox.relays.kafka import Kafka


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[brokers.Tansu]:
    """Start a real broker."""
    with brokers.running(brokers.Tansu(tmp_path)) as broker:
        yield broker


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    """Start a mock cluster with the topic ``orders``."""
    mock = MockCluster()
    mock.create("orders", partitions=1)
    yield mock
    mock.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., Client]]:
    with opener(lambda servers, **own: Kafka(**{"bootstrap.servers": servers, **own})) as opened:
        yield opened


# -- a batch ---------------------------------------------------------------------------------------


def test_a_group_goes_to_one_partition_in_order(broker: Any, opened: Any) -> None:
    create(broker.url, "orders", partitions=3)
    batch = [message(n, group=f"g{n % 10}") for n in range(300)]
    assert opened(broker.url).publish([*batch, message(group=None)], 10) == [None] * 301
    found = records(broker.url)
    assert [each.value() for each in found if each.key() is None] == [b'{"n":0}']
    for n in range(10):
        own = [each for each in found if each.key() == b"g%d" % n]
        assert len({each.partition() for each in own}) == 1
        assert [json.loads(each.value())["n"] for each in own] == [*range(n, 300, 10)]


def test_half_a_batch_refused_by_the_mock(mock: Any, opened: Any) -> None:
    mock.fail_topic("missing", mock_kafka.UNKNOWN_TOPIC)
    batch = [message(n, to="missing" if n % 2 else "orders") for n in range(500)]
    backend = opened(mock.servers)
    outcomes = backend.publish(batch, 10)
    assert outcomes[::2] == [None] * 250
    assert {type(each) for each in outcomes[1::2]} == {Refused}
    assert "The topic 'missing' does not exist" in str(outcomes[1])
    assert len(records(mock.servers)) == 250


@pytest.mark.parametrize("error", [mock_kafka.UNKNOWN_TOPIC, mock_kafka.TOPIC_FORBIDDEN])
def test_a_topic_that_the_mock_forgets_is_asked_for_again(
    mock: Any, opened: Any, error: int
) -> None:
    """The client itself goes on refusing what it takes for missing or forbidden."""
    mock.fail_topic("orders", error)
    backend = opened(mock.servers)
    for _ in range(2):
        [outcome] = backend.publish([message()], 10)
        assert isinstance(outcome, Refused)
    mock.fail_topic("orders", 0)
    assert backend.publish([message()], 10) == [None]


def test_only_the_message_that_is_too_large_for_the_topic_is_dead(mock: Any, opened: Any) -> None:
    """The mock refuses the batch, its first half, and the first message of that."""
    backend = opened(mock.servers)
    too_large = mock_kafka.MESSAGE_TOO_LARGE
    mock.answer(mock_kafka.PRODUCE, too_large, too_large, too_large)
    outcomes = backend.publish(messages(4), 10)
    assert isinstance(outcomes[0], Unrecoverable)
    assert outcomes[1:] == [None] * 3
    stored = sorted(each.value() for each in records(mock.servers))
    assert stored == [b'{"n":%d}' % n for n in (1, 2, 3)]
    assert backend.publish([message(0)], 10) == [None]


def test_a_queue_of_the_client_that_is_full_is_waited_for(broker: Any, opened: Any) -> None:
    backend = opened(broker.url, **{"queue.buffering.max.messages": 20})
    assert backend.publish(messages(500), 20) == [None] * 500


# -- outages ---------------------------------------------------------------------------------------


def test_nothing_is_sent_after_the_deadline_on_a_real_broker(broker: Any, opened: Any) -> None:
    """The client connects again and again; what it had to send has been purged."""
    create(broker.url, "orders")
    backend = opened(broker.url)
    broker.kill()
    with pytest.raises(BrokerUnavailable):
        backend.publish(messages(500), 0.5)
    broker.restart()
    create(broker.url, "orders")
    backend.backend._producer.list_topics(timeout=20)  # the client is connected again
    backend.backend._producer.flush(2)
    assert records(broker.url) == []


@pytest.fixture
def mocks() -> Iterator[MockCluster]:
    """Start a mock cluster of two brokers, each of which leads one topic."""
    mocks = MockCluster(2)
    for broker, topic in ((1, "orders"), (2, "parcels")):
        mocks.create(topic, partitions=1)
        mocks.lead(topic, 0, broker)
    yield mocks
    mocks.close()


def test_what_the_mock_confirmed_before_a_broker_went_down_is_confirmed(
    mocks: Any, opened: Any
) -> None:
    """One topic answers after a second, the other would after five; in between all is down."""
    backend, outcomes = opened(mocks.servers), list[Any]()
    assert backend.publish([message(), message(to="parcels")], 10) == [None] * 2
    mocks.delay(1000, 1)
    mocks.delay(5000, 2)
    batch = [message(), message(to="parcels")]
    thread = threading.Thread(target=lambda: outcomes.extend(backend.publish(batch, 3)))
    thread.start()
    wait_until(lambda: len(backend.backend._producer) == 2)
    wait_until(lambda: len(backend.backend._producer) == 1)
    mocks.down()
    thread.join()
    assert outcomes[0] is None
    assert isinstance(outcomes[1], BrokerUnavailable)


def test_what_one_broker_of_the_mock_does_not_confirm_is_not_known(mocks: Any, opened: Any) -> None:
    """The cluster is there, and so is the connection."""
    backend = opened(mocks.servers)
    assert backend.publish([message(), message(to="parcels")], 10) == [None] * 2
    mocks.delay(5000, 2)
    outcomes = backend.publish([message(to="parcels"), message()], 1)
    assert isinstance(outcomes[0], Unconfirmed)
    assert outcomes[1] is None


def test_replicas_missing_in_the_mock_are_waited_for(mock: Any, opened: Any) -> None:
    backend = opened(mock.servers)
    backend.publish([message()], 10)
    mock.answer(mock_kafka.PRODUCE, *[mock_kafka.NOT_ENOUGH_REPLICAS] * 2)
    assert backend.publish(messages(5), 10) == [None] * 5
    mock.answer(mock_kafka.PRODUCE, *[mock_kafka.NOT_ENOUGH_REPLICAS] * 200)
    with pytest.raises(BrokerUnavailable, match="confirmed nothing before the deadline"):
        backend.publish(messages(5), 0.7)


def test_a_fatal_error_of_the_producer_in_the_mock(
    mock: Any, opened: Any, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(mock.servers, **{"enable.gapless.guarantee": True})
    backend.publish([message()], 10)
    mock.answer(mock_kafka.PRODUCE, mock_kafka.MESSAGE_TOO_LARGE)
    with caplog.at_level(logging.INFO), pytest.raises(BrokerUnavailable):
        backend.publish(messages(5), 5)
    with pytest.raises(BrokerUnavailable, match="The Kafka producer has failed"):
        backend.publish(messages(5), 5)
    with pytest.raises(BrokerUnavailable):
        backend.check()
    backend.close()
    assert opened(mock.servers).publish(messages(5), 10) == [None] * 5
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_an_idempotent_write_that_the_mock_forbids(mock: Any, opened: Any) -> None:
    mock.answer(mock_kafka.INIT_PRODUCER_ID, *[mock_kafka.CLUSTER_FORBIDDEN] * 5)
    backend = opened(mock.servers)
    with pytest.raises(BrokerUnavailable, match=r"[Cc]luster authorization failed"):
        backend.publish(messages(5), 10)


# -- options ---------------------------------------------------------------------------------------


def test_options_of_librdkafka_are_passed_on(mock: Any, opened: Any, capfd: Any) -> None:
    Kafka(**{"bootstrap.servers": "127.0.0.1:1"})  # connects to nothing
    Kafka(**{"bootstrap.servers": "127.0.0.1:1", "timeout": 0.05})
    Kafka(**{"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 50})
    own = {"enable.idempotence": False, "acks": "1", "delivery.timeout.ms": 3000, "linger.ms": 0}
    assert opened(mock.servers, **own).publish([message()], 10) == [None]
    lines = logging.getLogger("tests.kafka")
    opened(mock.servers, debug="broker", logger=lines)
    assert capfd.readouterr() == ("", "")
