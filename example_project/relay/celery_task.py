"""Hand events to Celery: nothing is lost between the commit and the broker."""

from __future__ import annotations

from celery import Celery

import django_outbox as outbox
from example_project.relay import envelope


class CeleryTask:
    def __init__(self, url: str) -> None:
        self.app = Celery("shop", broker=url, set_as_current=False)
        self.app.conf.broker_transport_options = {"confirm_publish": True}  # RabbitMQ

    def __call__(self, event: outbox.Event) -> None:
        self.app.send_task(
            f"shop.{event.event_type}",
            kwargs={"event_id": event.event_id, "payload": event.payload},
            task_id=event.event_id,
            headers=envelope.headers(event),
        )
