"""procrastinate: an async task, ten at a time, jobs deleted at once, uvloop."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant


class Procrastinate(Contestant):
    apps = ("procrastinate.contrib.django",)

    def __init__(self) -> None:
        super().__init__()
        from procrastinate.contrib.django import app

        self._app = app

        @app.task(name="hear")
        async def hear(number: int, payload: dict[str, Any]) -> None:
            self.hear(number)

        self._task = hear

    def enqueue(self, number: int) -> None:
        self._task.defer(number=number, payload=PAYLOAD)

    def enqueue_many(self, count: int) -> None:
        self._task.batch_defer(*[{"number": 0, "payload": PAYLOAD}] * count)

    def work(self) -> None:
        import uvloop

        uvloop.run(self._work())

    async def _work(self) -> None:
        app = self._app.with_connector(self._app.connector.get_worker_connector())
        async with app.open_async():
            await app.run_worker_async(concurrency=10, delete_jobs="always")


CONTESTANT = Procrastinate
