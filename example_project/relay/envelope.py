"""What is sent: the payload as JSON, and the rest in headers."""

from __future__ import annotations

import json

import django_outbox as outbox


def body(event: outbox.Event) -> bytes:
    return json.dumps(event.payload).encode()


def headers(event: outbox.Event) -> dict[str, str]:
    """Return the event's own headers, and those by which a consumer knows it again."""
    return {
        **event.headers,
        "event-id": event.event_id,  # the same at every delivery: drop what you have seen
        "event-type": event.event_type,
        "occurred-at": event.occurred_at.isoformat(),
    }
