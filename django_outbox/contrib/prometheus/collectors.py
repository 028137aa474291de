"""What a scrape collects: gauges of the backlog, and the metrics of all processes of a directory.

The backlog is queried at most once per POLL_INTERVAL and alias.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from django.db import connections, router
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from ...conf import current
from ...inspection import call_with_timeout
from ...inspection.counts import capped_count, counts
from ...inspection.holds import KINDS, longest
from ...inspection.queues import lag, load_backlog
from ...inspection.workers import clock_and_workers
from ...models import OutboxEvent, OutboxStream, missing_table
from .metrics import BACKLOG_GAUGES

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
TIMEOUT = 5.0  # seconds that a scrape waits for a database; Prometheus waits for 10

logger = logging.getLogger("django_outbox")

Sample = tuple[str, tuple[str, ...], float]  # key of BACKLOG_GAUGES, values of its labels, value


class BacklogCollector(Collector):
    """Collector that never fails a scrape: a database that does not answer has no samples."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._cache: dict[str, tuple[float, list[Sample]]] = {}  # by alias, with monotonic time
        self._failing: set[str] = set()  # aliases whose failure is already logged
        self._lock = Lock()  # one scrape queries, the others use its samples

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the names for the registry, without querying a database."""
        return [each.family(self._namespace) for each in BACKLOG_GAUGES.values()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = {name: each.family(self._namespace) for name, each in BACKLOG_GAUGES.items()}
        with self._lock:
            for alias in connections:
                if router.allow_migrate_model(alias, OutboxEvent):
                    for name, labels, value in self._samples(alias):
                        families[name].add_metric([alias, *labels], value)
        return families.values()

    def _samples(self, alias: str) -> list[Sample]:
        queried_at, samples = self._cache.get(alias, (float("-inf"), []))
        if time.monotonic() - queried_at < current().POLL_INTERVAL:
            return samples
        samples = self._query(alias)
        self._cache[alias] = time.monotonic(), samples
        return samples

    def _query(self, alias: str) -> list[Sample]:
        try:
            samples = call_with_timeout(TIMEOUT, lambda each: [*query_samples(each)], alias)
        except Exception as error:  # noqa: BLE001 - the other metrics are shown after any error
            if alias not in self._failing:
                logger.error("backlog not queried alias=%s error=%s", alias, type(error).__name__)
            self._failing.add(alias)
            return []
        self._failing.discard(alias)
        return samples


def query_samples(alias: str) -> Iterator[Sample]:
    """Query the backlog, at a cost that does not grow with the table."""
    if missing_table(alias):
        return
    streams = OutboxStream.objects.using(alias)
    now, known = clock_and_workers(alias)
    queues, holds, _listeners = load_backlog(alias, now, known)
    for status, count in counts(alias).numbers.items():
        yield "events", (status,), count
    yield "events_due", (), sum(each.events for each in queues)
    yield "lag_seconds", (), lag(queues)
    held = {kind: each.age for kind, each in longest(holds).items()}
    for kind in KINDS:
        yield "held_seconds", (kind,), held.get(kind, 0.0)
    yield "streams", ("due",), sum(each.streams for each in queues)
    yield "streams", ("leased",), capped_count(streams.leased())
    yield "streams", ("blocked",), capped_count(streams.blocked())
    yield "workers", (), sum(not each.is_silent for each in known)
    for queue in queues:
        yield "queue_due", (queue.name,), queue.due
        yield "queue_oldest_due_age_seconds", (queue.name,), queue.oldest_due_age or 0.0
        yield "queue_workers", (queue.name,), queue.workers
        yield "breaker_open", (queue.name,), int("breaker" in queue.holds)


# -- worker processes ------------------------------------------------------------------------------


def registry(backlog: BacklogCollector) -> CollectorRegistry:
    """Return the registry to serve; with a multi-process directory it sums all processes."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return REGISTRY
    shared = CollectorRegistry()
    shared.register(LiveProcesses(directory))
    shared.register(backlog)
    return shared


class LiveProcesses(Collector):
    """Collects the metrics of all processes, after removing the gauges of killed ones."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._collector: Collector = MultiProcessCollector(None, directory)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        for path in Path(self._directory).glob("gauge_live*_*.db"):
            pid = path.stem.rpartition("_")[2]
            if pid.isdecimal() and not _is_alive(int(pid)):
                with suppress(FileNotFoundError):  # another scrape has deleted it
                    mark_process_dead(int(pid), self._directory)  # type: ignore[no-untyped-call]
        return self._collector.collect()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
