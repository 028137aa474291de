"""Relay to RabbitMQ: an event is delivered once the broker has confirmed it."""

from __future__ import annotations

from kombu import Connection, Exchange
from kombu.pools import producers

import django_outbox as outbox
from example_project.relay import envelope

EVENTS = Exchange("events", "topic", durable=True)


class RabbitMQ:
    def __init__(self, url: str) -> None:
        # Connects when first used, and once for each thread that sends at the same time.
        options = {"confirm_publish": True, "read_timeout": 10, "write_timeout": 10}
        self.connection = Connection(url, connect_timeout=5, transport_options=options)

    def __call__(self, event: outbox.Event) -> None:
        with producers[self.connection].acquire(block=True, timeout=10) as producer:
            producer.publish(
                envelope.body(event),
                exchange=EVENTS,
                declare=[EVENTS],
                routing_key=event.event_type,
                message_id=event.event_id,
                headers=envelope.headers(event),
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode="persistent",
                retry=True,  # reconnect once; what fails then is up to the listener's retries
                retry_policy={"max_retries": 1},
            )
