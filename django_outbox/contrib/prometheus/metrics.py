"""Declarations of all Prometheus metrics; a test compares the reference page with them.

Labels have few values: databases, queues, listeners, relays, and event types with a listener in
this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily

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
