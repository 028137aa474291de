"""Celery and Redis: sent after the commit, as its documentation says; the solo pool."""

from __future__ import annotations

import os
from typing import Any

from django.db import transaction

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant

REDIS = os.environ.get("OUTBOX_BENCH_REDIS", "redis://127.0.0.1:6379/9")
QUEUE = "outbox-benchmark"


class Celery(Contestant):
    def __init__(self) -> None:
        super().__init__()
        from celery import Celery as App

        self._app = App("benchmark", broker=REDIS)
        self._app.conf.update(
            task_ignore_result=True,
            task_default_queue=QUEUE,
            worker_send_task_events=False,
            broker_connection_retry_on_startup=False,
            broker_transport_options={"socket_connect_timeout": 2, "max_retries": 1},
        )

        @self._app.task(name="hear")
        def hear(number: int, payload: dict[str, Any]) -> None:
            self.hear(number)

        self._task = hear

    def enqueue(self, number: int) -> None:
        transaction.on_commit(lambda: self._task.delay(number, PAYLOAD))

    def clear(self) -> None:
        super().clear()
        self._app.control.purge()

    def work(self) -> None:
        worker = self._app.Worker(
            pool="solo",
            quiet=True,
            loglevel="ERROR",
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.start()


CONTESTANT = Celery
