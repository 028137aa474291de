"""The relay of the shop's events: one entry of ``OUTBOX["RELAYS"]`` from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

RABBITMQ = "django_outbox.relays.rabbitmq.RabbitMQ"
WEBHOOK = "django_outbox.relays.http.Webhook"
# By the URL's scheme: the backend, where it sends to, and the option that takes the URL.
BROKERS = {
    "amqp": (RABBITMQ, "{event_type}", "url"),
    "amqps": (RABBITMQ, "{event_type}", "url"),
    "nats": ("django_outbox.relays.nats.JetStream", "events.{event_type}", "servers"),
    "redis": ("django_outbox.relays.redis.Stream", "events", "url"),
    "kafka": ("django_outbox.relays.kafka.Kafka", "events", "bootstrap.servers"),
}


def relays_from(url: str, *, secret: str = "") -> dict[str, Any]:
    """Return the setting ``RELAYS`` that sends every event to ``url``; empty if there is no URL.

    ``secret`` signs webhooks. ``ImproperlyConfigured`` for an unknown scheme.
    """
    if not url:
        return {}
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        # The shop is for trying out, so it may call your own machine.
        options: dict[str, Any] = {"allow_http": True, "allow_private": True}
        if secret:
            options["secret"] = secret
        backend, to = WEBHOOK, url.replace("{", "{{").replace("}", "}}")
    elif scheme in BROKERS:
        backend, to, option = BROKERS[scheme]
        options = {option: url.removeprefix("kafka://")}
    else:
        expected = ", ".join([*BROKERS, "http", "https"])
        raise ImproperlyConfigured(f"RELAY_URL begins with {scheme!r}; expected one of {expected}.")
    return {"broker": {"BACKEND": backend, "EVENTS": ["*"], "TO": to, "OPTIONS": options}}
