"""One named listener for every event, if ``RELAY_URL`` says where to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

import django_outbox as outbox
from django_outbox import Exponential

RELAYS = {
    "amqp": "rabbitmq.RabbitMQ",
    "nats": "jetstream.JetStream",
    "redis": "redis_stream.RedisStream",
    "http": "webhook.Webhook",
    "https": "webhook.Webhook",
    "celery+amqp": "celery_task.CeleryTask",
    "celery+redis": "celery_task.CeleryTask",
    "kafka": "kafka.Kafka",
}
# Half a day of an outage: 1, 2, 4 … 600 s apart, 80 times.
PATIENT = Exponential(base=1, cap=600, max_attempts=80)


def relay(url: str) -> Callable[[outbox.Event], Any]:
    """Make the relay that the URL's scheme names."""
    scheme, _, rest = url.partition("://")
    if scheme not in RELAYS:
        expected = ", ".join(RELAYS)
        raise ImproperlyConfigured(f"RELAY_URL begins with {scheme!r}; expected one of {expected}.")
    make = import_string(f"example_project.relay.{RELAYS[scheme]}")
    if scheme == "kafka":
        return make(rest)  # type: ignore[no-any-return]
    if scheme in ("http", "https"):
        return make(url, settings.RELAY_SECRET)  # type: ignore[no-any-return]
    return make(url.removeprefix("celery+"))  # type: ignore[no-any-return]


if settings.RELAY_URL:
    outbox.listener("*", name="relay", retry=PATIENT)(relay(settings.RELAY_URL))
