"""What waits in the table: asked when Prometheus does, at most once per poll interval and alias."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from threading import Lock
from typing import Any

from django.db import connections, router
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ... import dialects
from ...conf import current
from ...models import OutboxEvent, OutboxStream, OutboxWorker, missing_table
from ...models.counts import counts
from ...models.status import MOST
from .metrics import BACKLOG

logger = logging.getLogger("django_outbox")

Sample = tuple[str, tuple[str, ...], float]  # key of BACKLOG, values of its labels, value


class Backlog(Collector):
    """A collector that never breaks a scrape: a database that does not answer gives no samples."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._answers: dict[str, tuple[float, list[Sample]]] = {}  # by alias, with when (monotonic)
        self._failing: set[str] = set()  # aliases whose failure is logged already
        self._asking = Lock()  # one scrape asks, the others use its answer

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Tell the names, for the registry, without asking any database."""
        return [each.family(self._namespace) for each in BACKLOG.values()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = {name: each.family(self._namespace) for name, each in BACKLOG.items()}
        with self._asking:
            for alias in connections:
                if router.allow_migrate_model(alias, OutboxEvent):
                    for name, labels, value in self._answer(alias):
                        families[name].add_metric([alias, *labels], value)
        return families.values()

    def _answer(self, alias: str) -> list[Sample]:
        asked_at, samples = self._answers.get(alias, (float("-inf"), []))
        if time.monotonic() - asked_at < current().POLL_INTERVAL:
            return samples
        samples = self._ask(alias)
        self._answers[alias] = time.monotonic(), samples
        return samples

    def _ask(self, alias: str) -> list[Sample]:
        """Ask on this thread's connection, and leave it as it was: a scrape has its own thread."""
        connection = connections[alias]
        was_open = connection.connection is not None
        try:
            samples = [] if missing_table(alias) else [*look(alias)]
            self._failing.discard(alias)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other metrics are shown
            if alias not in self._failing:
                logger.error("backlog not asked alias=%s error=%s", alias, type(error).__name__)
            self._failing.add(alias)
            return []
        else:
            return samples
        finally:
            if not was_open:
                connection.close()


def look(alias: str) -> Iterator[Sample]:
    """Ask the database, at a cost that does not grow with the table."""
    events, streams = OutboxEvent.objects.using(alias), OutboxStream.objects.using(alias)
    for status, count in counts(alias).numbers.items():
        yield "events", (status,), count
    yield "due", (), _capped(events.due())
    ages = [each for each in (events.oldest_pending_age(), streams.oldest_due_age()) if each]
    yield "lag", (), max(ages, default=0.0)
    for state in ("due", "leased", "blocked"):
        yield "streams", (state,), _capped(getattr(streams, state)())
    connection = connections[alias]
    since = dialects.of(connection).clock(connection) - timedelta(seconds=current().LEASE)
    yield "workers", (), OutboxWorker.objects.using(alias).filter(heartbeat_at__gte=since).count()


def _capped(rows: Any) -> int:
    return int(rows.order_by()[:MOST].count())
