"""Declarations of all Prometheus metrics; a test compares the reference page with them.

Labels have few values: databases, queues, listeners, relays, and event types with a listener in
this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from ...models.statistics import BOUNDS

BY_DATABASE: Final = ("database",)
BY_TYPE: Final = ("database", "event_type")
BY_LISTENER: Final = ("database", "listener", "queue")  # a listener has one queue
BY_QUEUE: Final = ("database", "queue")
BY_RELAY: Final = ("database", "relay")

SIZE_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)  # events


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The declaration of a metric, without a registry."""

    name: str  # without the namespace
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds in seconds

    def family(self, namespace: str) -> GaugeMetricFamily:
        """Return an empty gauge, to be filled during a scrape."""
        name = f"{namespace}_{self.name}" if namespace else self.name
        return GaugeMetricFamily(name, self.help, labels=self.labels)


# The keys are the names that the receivers use.
COUNTERS: Final = {
    "written": MetricSpec(
        "events_written", "Events inserted; their transaction may still be rolled back.", BY_TYPE
    ),
    "delayed": MetricSpec(
        "events_delayed", "Events inserted with a delay, which are not offered hot.", BY_TYPE
    ),
    "queued": MetricSpec(
        "events_queued", "Committed events that the worker of the same process took hot.", BY_TYPE
    ),
    "dropped": MetricSpec(
        "events_dropped", "Committed events that found the hot queue full; they come cold.", BY_TYPE
    ),
    "claims": MetricSpec(
        "claims", "Claims, empty ones included, by route (hot, cold).", (*BY_DATABASE, "source")
    ),
    "claimed": MetricSpec(
        "events_claimed", "Events leased, by route (hot, cold).", (*BY_DATABASE, "source")
    ),
    "started": MetricSpec("events_started", "Calls of a listener begun.", BY_LISTENER),
    "decided": MetricSpec(
        "events_decided", "Calls of a listener ended, by outcome.", (*BY_LISTENER, "outcome")
    ),
    "overdue": MetricSpec(
        "listeners_overdue", "Calls of a listener that ran longer than its timeout.", BY_LISTENER
    ),
    "settled": MetricSpec(
        "events_settled",
        "Deliveries settled, by outcome (done, retry, deferred, dead; lost: work undone).",
        (*BY_TYPE, "outcome"),
    ),
    "rescued": MetricSpec("events_rescued", "Events rescued from a lost worker.", BY_TYPE),
    "lost": MetricSpec(
        "leases_lost", "Leases that another worker took over from this one.", BY_DATABASE
    ),
    "replayed": MetricSpec("events_replayed", "Dead events replayed.", BY_DATABASE),
    "discarded": MetricSpec("events_discarded", "Dead events discarded.", BY_DATABASE),
    "purged": MetricSpec("events_purged", "Old events purged.", BY_DATABASE),
    "breakers_opened": MetricSpec(
        "breakers_opened",
        "Circuit breakers opened by this process, or kept open by a failed probe.",
        BY_QUEUE,
    ),
    "breakers_closed": MetricSpec(
        "breakers_closed", "Circuit breakers closed by this process.", BY_QUEUE
    ),
    "relay_published": MetricSpec(
        "relay_published", "Messages that a relay's broker has confirmed.", BY_RELAY
    ),
    "relay_refused": MetricSpec(
        "relay_refused", "Messages that a relay's broker refused, or that cannot be sent.", BY_RELAY
    ),
    "relay_deferred": MetricSpec(
        "relay_deferred", "Messages of a relay that wait, because their host is down.", BY_RELAY
    ),
}

HISTOGRAMS: Final = {
    "run": MetricSpec(
        "listener_seconds", "Time in a listener, and in its fallback.", BY_LISTENER, BOUNDS
    ),
    "schedule_to_start": MetricSpec(
        "schedule_to_start_seconds", "Time from an event's due time to its start.", BY_TYPE, BOUNDS
    ),
    "batch_size": MetricSpec(
        "batch_size", "Events in a call of a batch listener.", BY_LISTENER, SIZE_BUCKETS
    ),
    "relay": MetricSpec(
        "relay_seconds", "Time to send a batch of a relay to its broker.", BY_RELAY, BOUNDS
    ),
}

GAUGES: Final = {  # of live processes
    "depth": MetricSpec(
        "queue_depth",
        "Events waiting in this process, hot to be claimed, cold for a thread.",
        (*BY_DATABASE, "queue"),
    ),
    "held": MetricSpec("leases_held", "Events that the workers of this process hold.", BY_DATABASE),
    "running": MetricSpec("workers_running", "Workers running in this process.", BY_DATABASE),
}

BACKLOG_GAUGES: Final = {  # gauges that are queried from the database
    "events": MetricSpec(
        "events",
        "Events by status (NEW, RETRY, DONE, DEAD); of many, DONE is estimated.",
        (*BY_DATABASE, "status"),
    ),
    "due": MetricSpec(
        "events_due", "Events without a key that are due; at most 10,000.", BY_DATABASE
    ),
    "lag": MetricSpec(
        "lag_seconds", "How long the oldest due event or stream has waited.", BY_DATABASE
    ),
    "streams": MetricSpec(
        "streams",
        "Streams due, leased, or blocked by their head; at most 10,000 of each.",
        (*BY_DATABASE, "state"),
    ),
    "workers": MetricSpec("workers", "Workers that were alive within the last lease.", BY_DATABASE),
    "queue_due": MetricSpec(
        "queue_due",
        "Events without a key and streams that are due; at most 10,000 of each.",
        BY_QUEUE,
    ),
    "queue_oldest": MetricSpec(
        "queue_oldest_due_age_seconds",
        "How long the oldest due event or stream has waited.",
        BY_QUEUE,
    ),
    "queue_workers": MetricSpec(
        "queue_workers", "Workers alive within the last lease that serve the queue.", BY_QUEUE
    ),
    "breaker_open": MetricSpec(
        "breaker_open", "1 while the queue's circuit breaker is open, else 0.", BY_QUEUE
    ),
}


class Metrics:
    """The metrics of this process. Only the receivers update them."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        registered: dict[str, Any] = {"namespace": namespace, "registry": registry}
        self.counters = {
            key: Counter(each.name, each.help, each.labels, **registered)
            for key, each in COUNTERS.items()
        }
        self.histograms = {
            key: Histogram(each.name, each.help, each.labels, buckets=each.buckets, **registered)
            for key, each in HISTOGRAMS.items()
        }
        self.gauges = {
            key: Gauge(each.name, each.help, each.labels, multiprocess_mode="livesum", **registered)
            for key, each in GAUGES.items()
        }

    def __iter__(self) -> Iterator[Counter | Histogram | Gauge]:
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from self.gauges.values()

    def count(self, key: str, *labels: str, by: float = 1) -> None:
        self.counters[key].labels(*labels).inc(by)

    def observe(self, key: str, *labels: str, value: float) -> None:
        self.histograms[key].labels(*labels).observe(value)

    def set_gauge(self, key: str, *labels: str, value: float) -> None:
        self.gauges[key].labels(*labels).set(value)
