"""The options of the relay to Kafka: librdkafka's configuration, checked without connecting."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from ..redaction import Redaction

logger = logging.getLogger("django_outbox")

LINGER: Final = 100  # milliseconds in which a batch is certainly queued; then it is flushed
# Seconds after which a topic that the cluster does not know is taken for missing.
UNKNOWN_AFTER: Final = 2.0
TIMEOUTS: Final = ("message.timeout.ms", "delivery.timeout.ms")  # two names of one property
OURS: Final = {
    "error_cb": "the relay reports errors itself",
    "on_delivery": "the relay collects the reports itself",
    "transactional.id": "the relay uses no transactions; each event is confirmed by itself",
}


class Quiet:
    """Takes the client's own log: on its default, stderr, each failed reconnect is a line."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def log(self, level: int, text: str, *values: Any) -> None:
        logger.debug("kafka client text=%s", self._redaction.text(text % values))


def configuration(timeout: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return librdkafka's configuration; ``ValueError`` says what is wrong with the options."""
    if not options.get("bootstrap.servers"):
        raise ValueError("bootstrap.servers is missing; expected host:port, separated by commas.")
    for name in OURS.keys() & options.keys():
        raise ValueError(f"{name} cannot be set: {OURS[name]}.")
    milliseconds = max(int(timeout * 1000), 10)
    for name in TIMEOUTS:
        if name in options and not 0 < float(options[name]) <= milliseconds:
            raise ValueError(
                f"{name} is {options[name]!r}; expected at most timeout, {milliseconds} ms."
            )
    found = {**_defaults(milliseconds, options), **options}
    try:
        # The client has no other check of its options. It connects to nothing: no servers.
        Producer({"log_level": 0} | {k: v for k, v in found.items() if k != "bootstrap.servers"})
    except KafkaException as error:
        raise ValueError(f"{error.args[0].str()}; expected librdkafka's properties.") from None
    return found


def _defaults(milliseconds: int, options: Mapping[str, Any]) -> dict[str, Any]:
    shortest = int(min(float(options.get(name, milliseconds)) for name in TIMEOUTS))
    found: dict[str, Any] = {
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": min(LINGER, shortest // 2),  # the client wants it below the timeout
        "socket.timeout.ms": max(milliseconds, 10),
        "topic.metadata.propagation.max.ms": min(int(UNKNOWN_AFTER * 1000), milliseconds // 2),
    }
    if "delivery.timeout.ms" not in options:  # an alias
        found["message.timeout.ms"] = milliseconds
    if not {"debug", "log_level", "logger"} & options.keys():
        found["log_level"] = 0
    return found
