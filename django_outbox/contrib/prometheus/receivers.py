"""Signal receivers that update the Prometheus metrics, connected once per process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.dispatch import Signal
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ... import signals
from ...conf import current
from ...events import Event
from ...listeners import registry as listeners
from ...listeners.queues import queue_of
from ...models.statistics import BOUNDS
from .metrics import COUNTERS, GAUGES, HISTOGRAMS, SIZE_BUCKETS, BacklogCollector

OTHER = "other"  # label of all event types and titles without a listener in this process
OUTCOMES = ("done", "retry", "deferred", "dead", "discarded")
RELAY_OUTCOMES = ("published", "refused", "deferred")  # of messages

Facts = dict[str, Any]  # that a signal has

_installed: Receivers | None = None


def install() -> Receivers:
    """Register the metrics in prometheus_client's registry and count; only the first call does."""
    global _installed  # noqa: PLW0603 - a process has one registry
    if _installed is None:
        _installed = Receivers(current().METRICS_NAMESPACE or "", REGISTRY)
        _installed.connect()
    return _installed


# -- labels, after the database --------------------------------------------------------------------


def no_labels(facts: Facts) -> tuple[str, ...]:
    return ()


def by_type(facts: Facts) -> tuple[str, ...]:
    """Return the event type, or the pattern, of the listener in this process; else ``other``.

    Types are data without a limit, and each would create a time series for ever.
    """
    event: Event = facts["event"]
    route = listeners.route(event.aggregate_type, event.event_type)
    return (route[0].event_type if route else OTHER,)


def by_delivery(facts: Facts) -> tuple[str, ...]:
    """Return the type or pattern and the title of the listener that an event is delivered to."""
    found = listeners.by_title(facts["event"].listener)
    return (*by_type(facts), OTHER) if found is None else (found.event_type, found.title)


def by_listener(facts: Facts) -> tuple[str, ...]:
    """Return a listener's title, and the queue whose threads call it."""
    return facts["listener"].title, queue_of(facts["listener"])


def by_fact(name: str) -> Callable[[Facts], tuple[str, ...]]:
    return lambda facts: (facts[name],)


# By signal: the labels, and the metrics with the fact that is counted or observed; empty: 1.
UPDATES: Final[dict[str, tuple[Callable[[Facts], tuple[str, ...]], dict[str, str]]]] = {
    "event_written": (by_type, {"events_written": ""}),
    "event_queued": (by_type, {"events_queued": ""}),
    "event_dropped": (by_type, {"events_dropped": ""}),
    "events_claimed": (by_fact("source"), {"claims": "", "events_claimed": "count"}),
    "event_started": (by_listener, {"events_started": ""}),
    "event_decided": (by_listener, {"events_decided": "", "listener_seconds": "duration"}),
    "batch_called": (by_listener, {"batch_size": "size"}),
    "listener_overdue": (by_listener, {"listeners_overdue": ""}),
    "event_settled": (by_delivery, {"events_settled": "", "schedule_to_start_seconds": "lag"}),
    "event_rescued": (by_delivery, {"events_rescued": ""}),
    "lease_lost": (no_labels, {"leases_lost": "count"}),
    "events_replayed": (no_labels, {"events_replayed": "count"}),
    "events_discarded": (no_labels, {"events_discarded": "count"}),
    "events_purged": (no_labels, {"events_purged": "count"}),
    "breaker_opened": (by_fact("queue"), {"breakers_opened": ""}),
    "breaker_closed": (by_fact("queue"), {"breakers_closed": ""}),
    "relay_published": (
        by_fact("relay"),
        {**{f"relay_{each}": each for each in RELAY_OUTCOMES}, "relay_seconds": "duration"},
    ),
}


class Receivers:
    """The metrics of this process, and the receivers that update them."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        given: Facts = {"namespace": namespace, "registry": registry}
        self._metrics: dict[str, Any] = {
            name: Counter(name, each.help, each.labels, **given) for name, each in COUNTERS.items()
        }
        for name, each in HISTOGRAMS.items():
            bounds = SIZE_BUCKETS if name == "batch_size" else BOUNDS  # events, seconds
            self._metrics[name] = Histogram(name, each.help, each.labels, buckets=bounds, **given)
        self._metrics |= {
            name: Gauge(name, each.help, each.labels, multiprocess_mode="livesum", **given)
            for name, each in GAUGES.items()
        }
        self.backlog = BacklogCollector(namespace)
        registry.register(self.backlog)
        self._registry = registry
        self._workers: dict[str, Any] = {}  # workers running in this process, by alias
        self._receivers: list[tuple[Signal, Callable[..., None]]] = [
            *((getattr(signals, name), self._updating(*each)) for name, each in UPDATES.items()),
            (signals.event_written, self._count_delayed),
            (signals.event_queued, self._update_gauges),
            (signals.events_claimed, self._update_gauges),
            (signals.event_settled, self._update_gauges),
            (signals.worker_started, self._on_worker_started),
            (signals.worker_stopped, self._on_worker_stopped),
        ]

    def connect(self) -> None:
        for signal, receiver in self._receivers:
            signal.connect(receiver, weak=False)

    def disconnect(self) -> None:
        """Stop counting, and remove the metrics from the registry."""
        for signal, receiver in self._receivers:
            signal.disconnect(receiver)
        for each in (*self._metrics.values(), self.backlog):
            self._registry.unregister(each)

    def _updating(
        self, labels_of: Callable[[Facts], tuple[str, ...]], facts_by_metric: dict[str, str]
    ) -> Callable[..., None]:
        """Return a receiver that updates these metrics."""
        specs = {**COUNTERS, **HISTOGRAMS}
        updates = [
            (self._metrics[name], name in HISTOGRAMS, "outcome" in specs[name].labels, fact)
            for name, fact in facts_by_metric.items()
        ]

        def receive(sender: str, **facts: Any) -> None:
            labels = (sender, *labels_of(facts))
            for metric, is_observed, has_outcome, fact in updates:
                child = metric.labels(*labels, *((facts["outcome"],) if has_outcome else ()))
                value = facts[fact] if fact else 1
                (child.observe if is_observed else child.inc)(value)

        return receive

    def _count_delayed(self, sender: str, event: Event, **kwargs: Any) -> None:
        if event.is_delayed and current().MODE != "writer_only":  # it offers nothing hot
            self._metrics["events_delayed"].labels(sender, *by_type({"event": event})).inc()

    # -- workers ---------------------------------------------------------------------------------

    def _on_worker_started(self, sender: str, worker: Any, **kwargs: Any) -> None:
        self._workers[sender] = worker
        self._metrics["workers_running"].labels(sender).set(1)
        self._update_gauges(sender)
        self._start_counters_at_zero(sender)

    def _on_worker_stopped(self, sender: str, **kwargs: Any) -> None:
        """Reset the gauges of a worker that has stopped."""
        self._workers.pop(sender, None)
        self._metrics["workers_running"].labels(sender).set(0)
        self._set_gauges(sender, {"hot": 0, "cold": 0, "held": 0})

    def _update_gauges(self, sender: str, **kwargs: Any) -> None:
        if (worker := self._workers.get(sender)) is not None:
            self._set_gauges(sender, worker.depths())

    def _set_gauges(self, alias: str, depths: dict[str, int]) -> None:
        for queue in ("hot", "cold"):
            self._metrics["queue_depth"].labels(alias, queue).set(depths[queue])
        self._metrics["leases_held"].labels(alias).set(depths["held"])

    def _start_counters_at_zero(self, alias: str) -> None:
        """Start the counters of alerts at 0: ``increase()`` does not see a series' first value."""
        known = [(each.event_type, each.title) for each in listeners.listeners()]
        deliveries = [(OTHER, OTHER), *known]
        queues = [(each.name,) for each in current().queues.values() if each.BREAKER is not None]
        series: dict[str, Sequence[tuple[str, ...]]] = {
            "leases_lost": [()],
            "breakers_opened": queues,
            "breakers_closed": queues,
            **{f"relay_{each}": [(name,) for name in current().relays] for each in RELAY_OUTCOMES},
            "events_dropped": [each[:1] for each in deliveries],
            "events_rescued": deliveries,
            "events_settled": [(*each, outcome) for each in deliveries for outcome in OUTCOMES],
        }
        for name, labels in series.items():
            for each in labels:
                self._metrics[name].labels(alias, *each)
