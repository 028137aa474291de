"""``Kafka``: the backend of relays that sends events to Apache Kafka, with confluent-kafka.

Which errors mean the cluster, and which a message:

- The cluster (``BrokerUnavailable``): it cannot be reached, the login fails, no message was
  confirmed before the deadline, or the idempotent producer has failed for good (fatal error).
- A message, for good (``Unrecoverable``): it is larger than the client or the topic allows, its
  topic's name is not valid, a header is not text.
- A message, by the retry policy (``Refused``): its topic does not exist or takes nothing from
  this user, and whatever else the broker answers.
- Not known (``Unconfirmed``): others of the batch were confirmed and this one was not in time, as
  when one partition has no leader.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, cast

from confluent_kafka import KafkaError, KafkaException, Producer

from ..exceptions import BrokerUnavailable, Unrecoverable
from ..log import first_line
from ..redaction import Redaction
from .backend import Backend, Message, Outcome, Refused, Together, Unconfirmed
from .envelope import headers_of

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
WAIT: Final = 0.01  # seconds; of two threads that wait, one may get the reports of both
ASK_TIMEOUT: Final = 5.0  # seconds to wait for the cluster's metadata
LAST_REPORTS: Final = 0.2  # seconds to collect the reports of what was purged
TOPIC: Final = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,249}")


def _codes(names: str) -> frozenset[int]:
    return frozenset(getattr(KafkaError, each) for each in names.split())


# The broker refuses a batch of messages, of which perhaps only one is at fault.
OF_BATCH: Final = _codes("MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE INVALID_RECORD")
# Of a single message, another try fails like the first.
FOR_GOOD: Final = _codes("MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE TOPIC_EXCEPTION")
UNKNOWN: Final = _codes("_UNKNOWN_TOPIC UNKNOWN_TOPIC_OR_PART")
# The client remembers these of a topic and refuses further messages without asking the cluster.
REMEMBERED: Final = UNKNOWN | _codes("TOPIC_AUTHORIZATION_FAILED")
# Given up by the client: after a fatal error, or by the other thread at its deadline.
PURGED: Final = _codes("_PURGE_QUEUE _PURGE_INFLIGHT")
# Nothing is said about the message itself: it may have been stored or not.
UNCERTAIN: Final = PURGED | _codes(
    "_MSG_TIMED_OUT _TIMED_OUT _TIMED_OUT_QUEUE _TRANSPORT _ALL_BROKERS_DOWN _DESTROY _FATAL "
    "_STATE REQUEST_TIMED_OUT CLUSTER_AUTHORIZATION_FAILED"
)
NOT_REPORTED: Final = KafkaError(KafkaError._TIMED_OUT)


class Quiet:
    """Takes the client's own log: on its default, stderr, each failed reconnect is a line."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def log(self, level: int, text: str, *values: Any) -> None:
        logger.debug("kafka client text=%s", self._redaction.text(text % values))


class Kafka(Backend):
    """Sends each batch through an idempotent producer and waits for all its delivery reports.

    ``OPTIONS`` are librdkafka's configuration properties, of which ``bootstrap.servers`` is
    required, and ``timeout``. The key of a record, which chooses its partition, is the event's
    key, or else the aggregate's id.
    """

    attribute_prefix = "ce_"  # CloudEvents' binding for Kafka

    def __init__(self, *, timeout: Any = 10.0, **options: Any) -> None:
        super().__init__(timeout=timeout)
        self._options = configuration(self.timeout, options)
        self._producer: Any = None
        self._missing: set[str] = set()  # topics whose state the client remembers
        self._fault, self._faulty_at = "", -inf  # the last broken connection, and when (monotonic)
        self._gave_up = ""  # why the producer must not be used any more

    def open(self) -> None:
        """Start the client's threads and fetch the cluster's metadata."""
        quiet = Quiet(Redaction(self._options))
        self._producer = Producer({"logger": quiet, **self._options, "error_cb": self._on_error})
        self.check()

    def prepare(self, message: Message) -> Message:
        """Return a message whose topic may exist."""
        if not TOPIC.fullmatch(message.to):
            raise Unrecoverable(
                f"{message.to[:300]!r} is not a name of a Kafka topic; expected 1 to 249 ASCII "
                "letters, digits, '.', '_' or '-'. Change TO of the relay."
            )
        return message

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send a batch; return when every message is reported, or purge the rest at the deadline.

        The broker refuses a produce request as a whole.
        """
        began = monotonic()
        if self._gave_up:
            raise BrokerUnavailable(self._gave_up)
        self._forget_missing({each.to for each in messages}, deadline)
        return self._outcomes(messages, self._send(messages, deadline), began)

    def check(self) -> None:
        """Fetch the cluster's metadata; ``BrokerUnavailable`` says why that failed."""
        if self._gave_up:
            raise BrokerUnavailable(self._gave_up)
        began = monotonic()
        try:
            self._producer.list_topics(timeout=min(self.timeout, ASK_TIMEOUT))
        except KafkaException as error:
            self._collect(self._producer.poll, 0)  # the client says why
            raise BrokerUnavailable(self._away(began, error.args[0].str())) from None

    def close(self) -> None:
        """Drop what is unsent and end the client's threads."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            if hasattr(producer, "close"):  # before it came, the last reference ended the threads
                with suppress(KafkaException):  # a fatal error that no poll has reported
                    producer.close()

    # --- one batch ---

    def _send(self, messages: Sequence[Message], deadline: float) -> list[Any]:
        """Return what was reported of each message: None, a ``KafkaError`` or an exception."""
        found: list[Any] = [NOT_REPORTED] * len(messages)
        if self._gave_up or monotonic() >= deadline:
            return found

        def report(index: int, error: Any, _: object = None) -> None:
            found[index] = error

        for index, message in enumerate(messages):
            if error := self._enqueue(message, partial(report, index), deadline):
                found[index] = error
        self._await_reports(found, deadline)
        return found[:]  # a report that comes later is of no use any more

    def _enqueue(self, message: Message, report: Any, deadline: float) -> Any:
        """Hand a message to the client, once its queue has room; return why that failed."""
        while True:
            try:
                self._producer.produce(
                    message.to,
                    message.body,
                    message.group,
                    headers=headers_of(message, "ce_specversion"),
                    on_delivery=report,
                )
            except BufferError:
                if monotonic() < deadline:
                    self._collect(self._producer.flush, WAIT)
                    continue
            except KafkaException as error:
                return error.args[0]
            return None

    def _await_reports(self, found: Sequence[Any], deadline: float) -> None:
        """Wait until all messages are reported; at the deadline, purge the others.

        The producer's sequence has a gap then, so it is not used again.
        """
        while not self._gave_up and (left := deadline - monotonic()) > 0:
            # Those of the other thread are waited for, too; the client sends instead of lingering.
            waiting = self._collect(self._producer.flush, min(left, WAIT))
            if not waiting or _is_complete(found):
                break
        end = monotonic() + LAST_REPORTS
        if not _is_complete(found):
            self._gave_up = self._gave_up or "The Kafka producer was given up at a deadline"
            self._producer.purge()
            while not _is_complete(found) and monotonic() < end:
                self._collect(self._producer.poll, WAIT)
        elif any(isinstance(each, KafkaError) and each.code() in PURGED for each in found):
            # The client reports a fatal error after the messages that it has purged for it.
            while not self._gave_up and monotonic() < end:
                self._collect(self._producer.poll, WAIT)

    def _collect(self, method: Any, seconds: float) -> int:
        """Collect reports; return how many messages the client still has, or how many it had."""
        try:
            return int(method(seconds))
        except KafkaException as error:  # a fatal error of the producer
            self._on_error(error.args[0])
            return 0

    def _forget_missing(self, topics: set[str], deadline: float) -> None:
        """Have the client ask again for topics that it takes for missing or forbidden."""
        for topic in self._missing & topics:
            if (left := deadline - monotonic() - UNKNOWN_AFTER) > 0:
                self._missing.discard(topic)
                try:
                    self._producer.list_topics(topic, timeout=min(left, UNKNOWN_AFTER))
                except KafkaException as error:
                    logger.debug("topic not refreshed topic=%s error=%s", topic, first_line(error))

    # --- what it means ---

    def _outcomes(
        self, messages: Sequence[Message], found: Sequence[Any], began: float
    ) -> list[Outcome]:
        away = ""  # what to say of the cluster, if it is taken for away
        if self._faulty_at >= began or all(report is not None for report in found):
            away = self._away(began, "it confirmed nothing before the deadline")
        return [
            self._outcome(message, report, away)
            for message, report in zip(messages, found, strict=True)
        ]

    def _outcome(self, message: Message, report: Any, away: str) -> Outcome:
        """Return the outcome of a message: ``report`` is None, an exception or a ``KafkaError``."""
        if not isinstance(report, KafkaError):
            return cast("Outcome", report)
        code, topic = report.code(), message.to
        if code in REMEMBERED:
            self._missing.add(topic)
        if code in UNCERTAIN or report.fatal() or report.retriable():
            if away:
                return BrokerUnavailable(away)
            return Unconfirmed(f"Kafka did not confirm the message for {topic!r}: {report.str()}")
        text = f"Kafka refused the message for {topic!r}: {report.str()}"
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            text += (
                f". It has {len(message.body)} bytes, more than the client's message.max.bytes or "
                "the topic's max.message.bytes; raise both."
            )
        if code in UNKNOWN:
            text = (
                f"The topic {topic!r} does not exist, or this user may not see it; create it, or "
                "grant the permission to describe it."
            )
        outcome = (Unrecoverable if code in FOR_GOOD else Refused)(text)
        return Together(outcome) if code in OF_BATCH else outcome

    def _away(self, began: float, otherwise: str) -> str:
        why = self._fault if self._faulty_at >= began else otherwise
        return f"Kafka at {self._options['bootstrap.servers']} is not available: {why}"

    def _on_error(self, error: Any) -> None:
        """Remember what the client says about its connections; it reconnects by itself."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._fault:
            self._fault = error.str()
        self._faulty_at = monotonic()
        if error.fatal():
            self._gave_up = f"The Kafka producer has failed: {error.str()}"


def _is_complete(found: Sequence[Any]) -> bool:
    return all(each is not NOT_REPORTED for each in found)


# --- options -------------------------------------------------------------------------------------


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
        "socket.timeout.ms": milliseconds,
        "topic.metadata.propagation.max.ms": min(int(UNKNOWN_AFTER * 1000), milliseconds // 2),
    }
    if "delivery.timeout.ms" not in options:  # an alias
        found["message.timeout.ms"] = milliseconds
    if not {"debug", "log_level", "logger"} & options.keys():
        found["log_level"] = 0
    return found
