"""django_outbox, asked for the same as the others: defaults everywhere."""

from __future__ import annotations

from django.core.management import call_command

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant


class Ours(Contestant):
    apps = ("django_outbox",)

    def __init__(self) -> None:
        super().__init__()
        import django_outbox as outbox

        self._outbox = outbox
        outbox.listener("benchmark")(self._listen)

    def _listen(self, event: object) -> None:
        number = event.aggregate_id  # type: ignore[attr-defined]
        self.hear(int(number) if number else 0)

    def enqueue(self, number: int) -> None:
        self._outbox.write("benchmark", PAYLOAD, aggregate_id=str(number) if number else None)

    def enqueue_many(self, count: int) -> None:
        self._outbox.write_many(
            [self._outbox.Event(event_type="benchmark", payload=PAYLOAD) for _ in range(count)]
        )

    def work(self) -> None:
        call_command("outbox_worker", "--no-purge")


CONTESTANT = Ours
