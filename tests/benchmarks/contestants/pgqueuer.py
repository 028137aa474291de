"""pgqueuer: asyncpg, uvloop, batches of 100, an async listener; enqueues on Django's connection."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.db import connection

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant


class PgQueuer(Contestant):
    def enqueue(self, number: int) -> None:
        self._queries.enqueue("hear", content(number))

    def enqueue_many(self, count: int) -> None:
        self._queries.enqueue(["hear"] * count, [content(0)] * count, [0] * count)

    @cached_property
    def _queries(self) -> Any:
        """The sync half on Django's connection; its maker refuses one in a transaction."""
        from pgqueuer.db import SyncPsycopgDriver
        from pgqueuer.queries import SyncQueries

        connection.ensure_connection()
        return SyncQueries(SyncPsycopgDriver(connection.connection))

    def prepare(self) -> None:
        async def install() -> None:
            from pgqueuer.queries import Queries

            await Queries(await connect()).install()

        asyncio.run(install())

    def clear(self) -> None:
        super().clear()
        self.truncate("pgqueuer", "pgqueuer_log")
        assert self._queries is not None  # made outside a transaction

    def work(self) -> None:
        import uvloop

        uvloop.run(self._work())

    async def _work(self) -> None:
        from pgqueuer import PgQueuer as Worker

        worker = Worker(await connect())

        @worker.entrypoint("hear")
        async def hear(job: Any) -> None:
            self.hear(json.loads(job.payload)["number"])

        await worker.run(batch_size=100, dequeue_timeout=timedelta(seconds=5))


async def connect() -> Any:
    import asyncpg
    from pgqueuer.db import AsyncpgDriver

    settings = json.loads(os.environ["OUTBOX_BENCH_DATABASE"])
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
    given = {name: settings[key] for name, key in names.items() if settings.get(key)}
    return AsyncpgDriver(await asyncpg.connect(database=settings["NAME"], **given))


def content(number: int) -> bytes:
    return json.dumps({"number": number, **PAYLOAD}).encode()


CONTESTANT = PgQueuer
