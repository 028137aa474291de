"""Declarations of all Prometheus metrics, and what a scrape collects: gauges of the backlog.

Labels have few values: databases, queues, listeners, relays, and event types with a listener in
this process. The backlog is queried at most once per POLL_INTERVAL and alias.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from django.db import connections, router
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from ...conf import current
from ...inspection import call_with_timeout
from ...inspection.counts import capped_count, counts
from ...inspection.holds import KINDS
from ...inspection.queues import lag, load_backlog
from ...inspection.workers import clock_and_workers
from ...models import OutboxEvent, OutboxStream, missing_table

BY_DATABASE: Final = ("database",)
BY_TYPE: Final = ("database", "event_type")
BY_DELIVERY: Final = ("database", "event_type", "listener")  # a listener has one type or pattern
BY_LISTENER: Final = ("database", "listener", "queue")  # a listener has one queue
BY_QUEUE: Final = ("database", "queue")
BY_RELAY: Final = ("database", "relay")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The declaration of a metric, without a registry."""

    name: str  # without the namespace
    help: str
    labels: tuple[str, ...]

    def family(self, namespace: str) -> GaugeMetricFamily:
        """Return an empty gauge, to be filled during a scrape."""
        name = f"{namespace}_{self.name}" if namespace else self.name
        return GaugeMetricFamily(name, self.help, labels=self.labels)


def _specs(by_labels: dict[tuple[str, ...], dict[str, str]]) -> dict[str, MetricSpec]:
    """Return the metrics by name; given are their help texts by labels and name."""
    return {
        name: MetricSpec(name, text, labels)
        for labels, texts in by_labels.items()
        for name, text in texts.items()
    }


COUNTERS: Final = _specs(
    {
        BY_TYPE: {
            "events_written": "Events inserted; their transaction may still be rolled back.",
            "events_delayed": "Events inserted with a delay, which are not offered hot.",
            "events_queued": "Committed events that the worker of the same process took hot.",
            "events_dropped": "Committed events that found the hot queue full; they come cold.",
        },
        BY_DELIVERY: {"events_rescued": "Deliveries rescued from a lost worker."},
        (*BY_DELIVERY, "outcome"): {
            "events_settled": (
                "Deliveries settled, by outcome (done, retry, deferred, dead; discarded: no worker "
                "has the listener; lost: work undone)."
            )
        },
        (*BY_DATABASE, "source"): {
            "claims": "Claims, empty ones included, by route (hot, cold).",
            "events_claimed": "Deliveries leased, by route (hot, cold).",
        },
        BY_LISTENER: {
            "events_started": "Calls of a listener begun.",
            "listeners_overdue": "Calls of a listener that ran longer than its timeout.",
        },
        (*BY_LISTENER, "outcome"): {"events_decided": "Calls of a listener ended, by outcome."},
        BY_DATABASE: {
            "leases_lost": "Leases that another worker took over from this one.",
            "events_replayed": "Dead deliveries replayed.",
            "events_discarded": "Dead deliveries discarded.",
            "events_purged": "Old deliveries purged.",
        },
        BY_QUEUE: {
            "breakers_opened": (
                "Circuit breakers opened by this process, or kept open by a failed probe."
            ),
            "breakers_closed": "Circuit breakers closed by this process.",
        },
        BY_RELAY: {
            "relay_published": "Messages that a relay's broker has confirmed.",
            "relay_refused": "Messages that a relay's broker refused, or that cannot be sent.",
            "relay_deferred": "Messages of a relay that wait, because their host is down.",
        },
    }
)

HISTOGRAMS: Final = _specs(
    {
        BY_DELIVERY: {"schedule_to_start_seconds": "Time from a delivery's due time to its start."},
        BY_LISTENER: {
            "listener_seconds": "Time in a listener, and in its fallback.",
            "batch_size": "Events in a call of a batch listener.",
        },
        BY_RELAY: {"relay_seconds": "Time to send a batch of a relay to its broker."},
    }
)
SIZE_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # events

GAUGES: Final = _specs(  # of live processes
    {
        BY_QUEUE: {
            "queue_depth": "What waits in this process, hot for a claim, cold for a thread."
        },
        BY_DATABASE: {
            "leases_held": "Deliveries that the workers of this process hold.",
            "workers_running": "Workers running in this process.",
        },
    }
)

BACKLOG_GAUGES: Final = _specs(  # that are queried from the database
    {
        (*BY_DATABASE, "status"): {
            "events": "Deliveries by status (NEW, RETRY, DONE, DEAD); of many, DONE is estimated."
        },
        (*BY_DATABASE, "state"): {
            "streams": "Streams due, leased, or blocked by their head; at most 10,000 of each."
        },
        (*BY_DATABASE, "kind"): {
            "held_seconds": "How long the oldest delivery has been held, without a planned end."
        },
        BY_DATABASE: {
            "events_due": "Deliveries without a key that are due; at most 10,000.",
            "lag_seconds": "How long the oldest due delivery or stream has waited.",
            "workers": "Workers that were alive within the last lease.",
        },
        BY_QUEUE: {
            "queue_due": "Deliveries without a key and streams due; at most 10,000 of each.",
            "queue_oldest_due_age_seconds": "How long the oldest of them has waited.",
            "queue_workers": "Workers alive within the last lease that serve the queue.",
            "breaker_open": "1 while the queue's circuit breaker is open, else 0.",
        },
    }
)


# -- what a scrape collects ------------------------------------------------------------------------


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
    for kind in KINDS:
        ages = (each.age for each in holds if each.kind == kind and not each.planned)
        yield "held_seconds", (kind,), max(ages, default=0.0)
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
