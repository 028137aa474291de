"""django-reliable-outbox: LISTEN, batches of 500."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant


class ReliableOutbox(Contestant):
    apps = ("reliable_outbox",)

    def __init__(self) -> None:
        super().__init__()
        from reliable_outbox import handler, publish

        self._publish = publish

        @handler("benchmark")
        def handle(envelope: Any) -> None:
            self.hear(envelope.payload["number"])

    def enqueue(self, number: int) -> None:
        self._publish("benchmark", {"number": number, **PAYLOAD})

    def work(self) -> None:
        call_command("outbox_worker", batch_size=500)


CONTESTANT = ReliableOutbox
