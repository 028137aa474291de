"""Declarations of all Prometheus metrics; a test compares the reference page with them.

Labels have few values: databases, listeners, and event types with a listener in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

DATABASE: Final = ("database",)
TYPE: Final = ("database", "event_type")
LISTENER: Final = ("database", "listener")

# Seconds. STARTS: from a wakeup via a poll to an outage. RUNS: from a query to a slow remote API.
STARTS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 1800)
RUNS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)


@dataclass(frozen=True, slots=True)
class Declared:
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
    "written": Declared(
        "events_written", "Events inserted; their transaction may still be rolled back.", TYPE
    ),
    "delayed": Declared(
        "events_delayed", "Events inserted with a delay, which are not offered hot.", TYPE
    ),
    "queued": Declared(
        "events_queued", "Committed events that the worker of the same process took hot.", TYPE
    ),
    "dropped": Declared(
        "events_dropped", "Committed events that found the hot queue full; they come cold.", TYPE
    ),
    "claims": Declared(
        "claims", "Claims, empty ones included, by route (hot, cold).", (*DATABASE, "source")
    ),
    "claimed": Declared(
        "events_claimed", "Events leased, by route (hot, cold).", (*DATABASE, "source")
    ),
    "started": Declared("events_started", "Calls of a listener begun.", LISTENER),
    "decided": Declared(
        "events_decided", "Calls of a listener ended, by outcome.", (*LISTENER, "outcome")
    ),
    "overdue": Declared(
        "listeners_overdue", "Calls of a listener that ran longer than its timeout.", LISTENER
    ),
    "settled": Declared(
        "events_settled",
        "Deliveries settled, by outcome (done, retry, deferred, dead; lost: work undone).",
        (*TYPE, "outcome"),
    ),
    "rescued": Declared("events_rescued", "Events rescued from a lost worker.", TYPE),
    "lost": Declared(
        "leases_lost", "Leases that another worker took over from this one.", DATABASE
    ),
    "replayed": Declared("events_replayed", "Dead events replayed.", DATABASE),
    "discarded": Declared("events_discarded", "Dead events discarded.", DATABASE),
    "purged": Declared("events_purged", "Old events purged.", DATABASE),
}

HISTOGRAMS: Final = {
    "run": Declared("listener_seconds", "Time in a listener, and in its fallback.", LISTENER, RUNS),
    "schedule_to_start": Declared(
        "schedule_to_start_seconds", "Time from an event's due time to its start.", TYPE, STARTS
    ),
}

GAUGES: Final = {  # of live processes
    "depth": Declared(
        "queue_depth", "Events waiting in this process, hot to be claimed, cold for a thread.",
        (*DATABASE, "queue"),
    ),
    "held": Declared("leases_held", "Events that the workers of this process hold.", DATABASE),
    "running": Declared("workers_running", "Workers running in this process.", DATABASE),
}  # fmt: skip

BACKLOG: Final = {  # gauges that are queried from the database
    "events": Declared(
        "events", "Events by status (NEW, RETRY, DONE, DEAD); of many, DONE is estimated.",
        (*DATABASE, "status"),
    ),
    "due": Declared("events_due", "Events without a key that are due; at most 10,000.", DATABASE),
    "lag": Declared(
        "lag_seconds", "How long the oldest due event or stream has waited.", DATABASE
    ),
    "streams": Declared(
        "streams", "Streams due, leased, or blocked by their head; at most 10,000 of each.",
        (*DATABASE, "state"),
    ),
    "workers": Declared("workers", "Workers that were alive within the last lease.", DATABASE),
}  # fmt: skip


class Metrics:
    """The metrics of this process. Only the receivers update them."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        place: dict[str, Any] = {"namespace": namespace, "registry": registry}
        self.counters = {
            word: Counter(each.name, each.help, each.labels, **place)
            for word, each in COUNTERS.items()
        }
        self.histograms = {
            word: Histogram(each.name, each.help, each.labels, buckets=each.buckets, **place)
            for word, each in HISTOGRAMS.items()
        }
        self.gauges = {
            word: Gauge(each.name, each.help, each.labels, multiprocess_mode="livesum", **place)
            for word, each in GAUGES.items()
        }

    def __iter__(self) -> Iterator[Counter | Histogram | Gauge]:
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from self.gauges.values()

    def count(self, word: str, *labels: str, by: float = 1) -> None:
        self.counters[word].labels(*labels).inc(by)

    def observe(self, word: str, *labels: str, seconds: float) -> None:
        self.histograms[word].labels(*labels).observe(seconds)

    def show(self, word: str, *labels: str, value: float) -> None:
        self.gauges[word].labels(*labels).set(value)
