"""Relay to Kafka: an event is delivered once all replicas in sync have it."""

from __future__ import annotations

from threading import Event as Answer
from typing import Any

from confluent_kafka import KafkaException, Producer

import django_outbox as outbox
from example_project.relay import envelope

TOPIC = "events"
TIMEOUT = 10  # seconds for the broker to confirm


class Kafka:
    def __init__(self, servers: str, **options: Any) -> None:
        self.options = {
            "bootstrap.servers": servers,
            "acks": "all",
            "enable.idempotence": True,
            "message.timeout.ms": TIMEOUT * 1000,
            "linger.ms": 0,
            **options,
        }
        self._producer: Producer | None = None

    def __call__(self, event: outbox.Event) -> None:
        answer, faults = Answer(), []

        def answered(error: Any, message: Any) -> None:
            faults.append(error)
            answer.set()

        producer = self._connected()
        producer.produce(
            TOPIC,
            value=envelope.body(event),
            key=event.key or event.aggregate_id,  # what decides on the partition
            headers=[*envelope.headers(event).items()],
            on_delivery=answered,
        )
        while not answer.is_set():  # the message's timeout ends this loop
            producer.poll(0.1)
        if faults[0] is not None:
            raise KafkaException(faults[0])

    def _connected(self) -> Producer:
        if self._producer is None:  # librdkafka's threads do not outlive a fork
            self._producer = Producer(self.options)
        return self._producer
