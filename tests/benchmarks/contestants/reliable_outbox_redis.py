"""django-reliable-outbox with its destination for Redis Streams."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from tests.benchmarks.payload import PAYLOAD

from .reliable_outbox import ReliableOutbox


class ReliableOutboxRedis(ReliableOutbox):
    settings: ClassVar[dict[str, Any]] = {
        "RELIABLE_OUTBOX": {
            "DESTINATIONS": {
                "default": {
                    "BACKEND": "reliable_outbox.destinations.redis.RedisStreamDestination",
                    "OPTIONS": {"url": os.environ["OUTBOX_BENCH_STREAMS"], "stream": "peer"},
                }
            }
        }
    }

    def enqueue(self, number: int) -> None:
        self._publish("benchmark", PAYLOAD)


CONTESTANT = ReliableOutboxRedis
