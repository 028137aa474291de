"""The mock cluster of librdkafka, which speaks Kafka's protocol and answers what a test asks for.

The client's Python package has no way to make it err, so this calls librdkafka itself, the copy
that the package carries. It keeps what is produced, and a consumer can read it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

PRODUCE, INIT_PRODUCER_ID = 0, 22  # API keys of the protocol
# Error codes of the protocol.
UNKNOWN_TOPIC, MESSAGE_TOO_LARGE, NOT_ENOUGH_REPLICAS, TOPIC_FORBIDDEN = 3, 10, 19, 29
CLUSTER_FORBIDDEN = 31


def librdkafka() -> Any:
    why = "confluent-kafka is not installed; it has no wheel for Python 3.15 yet"
    package = Path(pytest.importorskip("confluent_kafka", reason=why).__file__).parent
    found = sorted(package.parent.glob("confluent_kafka.libs/librdkafka*"))
    if not found:
        pytest.skip("this build of confluent-kafka carries no librdkafka of its own")
    library = ctypes.CDLL(str(found[0]))
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    size, short, numbers = ctypes.c_size_t, ctypes.c_int16, ctypes.POINTER(ctypes.c_int)
    for name, result, arguments in (
        ("conf_new", pointer, []),
        ("new", pointer, [number, pointer, text, size]),
        ("conf_set", number, [pointer, text, text, text, size]),
        ("destroy", None, [pointer]),
        ("mock_cluster_new", pointer, [pointer, number]),
        ("mock_cluster_destroy", None, [pointer]),
        ("mock_cluster_bootstraps", text, [pointer]),
        ("mock_topic_create", number, [pointer, text, number, number]),
        ("mock_topic_set_error", None, [pointer, text, number]),
        ("mock_partition_set_leader", number, [pointer, text, number, number]),
        ("mock_broker_set_down", number, [pointer, number]),
        ("mock_broker_set_up", number, [pointer, number]),
        ("mock_broker_set_rtt", number, [pointer, number, number]),
        ("mock_push_request_errors_array", None, [pointer, short, size, numbers]),
    ):
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class MockCluster:
    """A mock cluster of brokers 1 to ``count``; ``servers`` are its bootstrap servers."""

    def __init__(self, count: int = 1) -> None:
        self._library, self._all = librdkafka(), range(1, count + 1)
        why = ctypes.create_string_buffer(512)
        configuration = self._library.rd_kafka_conf_new()
        self._library.rd_kafka_conf_set(configuration, b"log_level", b"0", why, 512)
        self._handle = self._library.rd_kafka_new(0, configuration, why, 512)
        assert self._handle, why.value
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._handle, count)
        self.servers = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._handle)

    def create(self, topic: str, partitions: int = 4) -> None:
        self._check(self._library.rd_kafka_mock_topic_create, topic.encode(), partitions, 1)

    def answer(self, api: int, *errors: int) -> None:
        """Answer the next requests of an API with these error codes."""
        codes = (ctypes.c_int * len(errors))(*errors)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, api, len(errors), codes
        )

    def fail_topic(self, topic: str, error: int) -> None:
        """Answer requests about a topic with an error; 0 ends that."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), error)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition."""
        name = topic.encode()
        self._check(self._library.rd_kafka_mock_partition_set_leader, name, partition, broker)

    def down(self, *brokers: int) -> None:
        """Cut the connections of brokers, or of all, and refuse new ones."""
        for broker in brokers or self._all:
            self._check(self._library.rd_kafka_mock_broker_set_down, broker)

    def up(self) -> None:
        """Let all brokers accept connections again."""
        for broker in self._all:
            self._check(self._library.rd_kafka_mock_broker_set_up, broker)

    def delay(self, milliseconds: int, *brokers: int) -> None:
        """Have each answer of brokers, or of all, take this long."""
        for broker in brokers or self._all:
            self._check(self._library.rd_kafka_mock_broker_set_rtt, broker, milliseconds)

    def _check(self, function: Any, *arguments: Any) -> None:
        error = function(self._cluster, *arguments)
        assert error == 0, f"{function.__name__}{arguments} answered {error}"
