"""Signal receivers that update the Prometheus metrics, connected once per process."""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal
from prometheus_client import REGISTRY, CollectorRegistry

from ... import signals
from ...conf import current
from ...events import Event
from ...listeners import registry as listeners
from ...listeners.queues import queue_of
from ...listeners.registry import Listener
from .collectors import BacklogCollector
from .metrics import Metrics

OTHER = "other"  # label of all event types and titles without a listener in this process
OUTCOMES = ("done", "retry", "deferred", "dead", "discarded")
RELAY_OUTCOMES = ("published", "refused", "deferred")  # of messages

_installed: Receivers | None = None


def install() -> Receivers:
    """Register the metrics in prometheus_client's registry and count; only the first call does."""
    global _installed  # noqa: PLW0603 - a process has one registry
    if _installed is None:
        _installed = Receivers(current().METRICS_NAMESPACE or "", REGISTRY)
        _installed.connect()
    return _installed


def type_of(event: Event) -> str:
    """Return the event type, or the pattern, of the listener in this process; else ``other``.

    Types are data without a limit, and each would create a time series for ever.
    """
    route = listeners.route(event.aggregate_type, event.event_type)
    return route[0].event_type if route else OTHER


def labels_of_delivery(event: Event) -> tuple[str, str]:
    """Return the type or pattern and the title of the listener that an event is delivered to."""
    found = listeners.by_title(event.listener)
    return (type_of(event), OTHER) if found is None else (found.event_type, found.title)


def labels_of(listener: Listener) -> tuple[str, str]:
    """Return a listener's title, and the queue whose threads call it."""
    return listener.title, queue_of(listener)


class Receivers:
    """A set of metrics and its receivers; each ``on_…`` method receives the signal of that name."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self.metrics = Metrics(namespace, registry)
        self.backlog = BacklogCollector(namespace)
        registry.register(self.backlog)
        self._registry = registry
        self._workers: dict[str, Any] = {}  # workers running in this process, by alias

    def connect(self) -> None:
        for signal, receiver in self._receivers():
            signal.connect(receiver, weak=False)

    def disconnect(self) -> None:
        """Stop counting, and remove the metrics from the registry."""
        for signal, receiver in self._receivers():
            signal.disconnect(receiver)
        for each in (*self.metrics, self.backlog):
            self._registry.unregister(each)

    def _receivers(self) -> list[tuple[Signal, Any]]:
        names = [name for name in vars(type(self)) if name.startswith("on_")]
        return [(getattr(signals, name.removeprefix("on_")), getattr(self, name)) for name in names]

    # -- writing and handing over ----------------------------------------------------------------

    def on_event_written(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("events_written", sender, type_of(event))
        if event.is_delayed and current().MODE != "writer_only":  # it offers nothing hot
            self.metrics.count("events_delayed", sender, type_of(event))

    def on_event_queued(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("events_queued", sender, type_of(event))
        self._update_queue_gauges(sender)

    def on_event_dropped(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("events_dropped", sender, type_of(event))

    # -- claiming and delivering -----------------------------------------------------------------

    def on_events_claimed(self, sender: str, count: int, source: str, **kwargs: Any) -> None:
        self.metrics.count("claims", sender, source)
        self.metrics.count("events_claimed", sender, source, by=count)
        self._update_queue_gauges(sender)

    def on_event_started(self, sender: str, listener: Listener, **kwargs: Any) -> None:
        self.metrics.count("events_started", sender, *labels_of(listener))

    def on_event_decided(
        self, sender: str, listener: Listener, outcome: str, duration: float, **kwargs: Any
    ) -> None:
        self.metrics.count("events_decided", sender, *labels_of(listener), outcome)
        self.metrics.observe("listener_seconds", sender, *labels_of(listener), value=duration)

    def on_batch_called(self, sender: str, listener: Listener, size: int, **kwargs: Any) -> None:
        self.metrics.observe("batch_size", sender, *labels_of(listener), value=size)

    def on_listener_overdue(self, sender: str, listener: Listener, **kwargs: Any) -> None:
        self.metrics.count("listeners_overdue", sender, *labels_of(listener))

    # -- settling --------------------------------------------------------------------------------

    def on_event_settled(
        self, sender: str, event: Event, outcome: str, lag: float, **kwargs: Any
    ) -> None:
        labels = labels_of_delivery(event)
        self.metrics.count("events_settled", sender, *labels, outcome)
        self.metrics.observe("schedule_to_start_seconds", sender, *labels, value=lag)
        self._update_queue_gauges(sender)

    def on_event_rescued(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("events_rescued", sender, *labels_of_delivery(event))

    def on_lease_lost(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("leases_lost", sender, by=count)

    # -- replay, discard and purge ---------------------------------------------------------------

    def on_events_replayed(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("events_replayed", sender, by=count)

    def on_events_discarded(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("events_discarded", sender, by=count)

    def on_events_purged(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("events_purged", sender, by=count)

    # -- circuit breakers ------------------------------------------------------------------------

    def on_breaker_opened(self, sender: str, queue: str, **kwargs: Any) -> None:
        self.metrics.count("breakers_opened", sender, queue)

    def on_breaker_closed(self, sender: str, queue: str, **kwargs: Any) -> None:
        self.metrics.count("breakers_closed", sender, queue)

    # -- relays ----------------------------------------------------------------------------------

    def on_relay_published(self, sender: str, relay: str, duration: float, **facts: Any) -> None:
        for each in RELAY_OUTCOMES:
            self.metrics.count(f"relay_{each}", sender, relay, by=facts[each])
        self.metrics.observe("relay_seconds", sender, relay, value=duration)

    # -- workers ---------------------------------------------------------------------------------

    def on_worker_started(self, sender: str, worker: Any, **kwargs: Any) -> None:
        self._workers[sender] = worker
        self.metrics.set_gauge("workers_running", sender, value=1)
        self._update_queue_gauges(sender)
        self._start_counters_at_zero(sender)

    def on_worker_stopped(self, sender: str, **kwargs: Any) -> None:
        """Reset the gauges of a worker that has stopped."""
        self._workers.pop(sender, None)
        self.metrics.set_gauge("workers_running", sender, value=0)
        for queue in ("hot", "cold"):
            self.metrics.set_gauge("queue_depth", sender, queue, value=0)
        self.metrics.set_gauge("leases_held", sender, value=0)

    def _update_queue_gauges(self, alias: str) -> None:
        worker = self._workers.get(alias)
        if worker is not None:
            depths = worker.depths()
            self.metrics.set_gauge("queue_depth", alias, "hot", value=depths["hot"])
            self.metrics.set_gauge("queue_depth", alias, "cold", value=depths["cold"])
            self.metrics.set_gauge("leases_held", alias, value=depths["held"])

    def _start_counters_at_zero(self, alias: str) -> None:
        """Start the counters of alerts at 0: ``increase()`` does not see a series' first value."""
        self.metrics.count("leases_lost", alias, by=0)
        for queue in current().queues.values():
            if queue.BREAKER is not None:
                self.metrics.count("breakers_opened", alias, queue.name, by=0)
                self.metrics.count("breakers_closed", alias, queue.name, by=0)
        for relay in current().relays:
            for each in RELAY_OUTCOMES:
                self.metrics.count(f"relay_{each}", alias, relay, by=0)
        known = [(each.event_type, each.title) for each in listeners.listeners()]
        for labels in [(OTHER, OTHER), *known]:
            self.metrics.count("events_dropped", alias, labels[0], by=0)
            self.metrics.count("events_rescued", alias, *labels, by=0)
            for outcome in OUTCOMES:
                self.metrics.count("events_settled", alias, *labels, outcome, by=0)
