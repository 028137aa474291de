"""Relay to a Redis stream: an event is delivered once Redis has answered with its place."""

from __future__ import annotations

import json

import redis

import django_outbox as outbox
from example_project.relay import envelope

STREAM = "events"
KEPT = 1_000_000  # entries of the stream, about


class RedisStream:
    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)

    def __call__(self, event: outbox.Event) -> None:
        entry = {
            "event-id": event.event_id,
            "event-type": event.event_type,
            "headers": json.dumps(envelope.headers(event)),
            "payload": envelope.body(event),
        }
        self.client.xadd(STREAM, entry, maxlen=KEPT, approximate=True)
