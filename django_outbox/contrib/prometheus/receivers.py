"""What counts: receivers of our signals, connected once in a process."""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal
from prometheus_client import REGISTRY, CollectorRegistry

from ... import registry as listeners
from ... import signals
from ...conf import current
from ...events import Event
from ...registry import Listener
from .backlog import Backlog
from .metrics import Metrics

OTHER = "other"  # the event type of what nobody here listens to
OUTCOMES = ("done", "retry", "deferred", "dead")

_installed: Receivers | None = None


def install() -> Receivers:
    """Declare the metrics in prometheus_client's registry and count; once, however often called."""
    global _installed  # noqa: PLW0603 - a process has one registry
    if _installed is None:
        _installed = Receivers(current().METRICS_NAMESPACE or "", REGISTRY)
        _installed.connect()
    return _installed


def type_of(event: Event) -> str:
    """Return the type as somebody here listens to it, maybe a pattern; else ``other``.

    Types are data: a program may make up any number of them, and each would be a series for ever.
    """
    route = listeners.route(event.aggregate_type, event.event_type)
    return route[0].event_type if route else OTHER


class Receivers:
    """One set of metrics and what fills it; every ``on_…`` is the receiver of that signal."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self.metrics = Metrics(namespace, registry)
        self.backlog = Backlog(namespace)
        registry.register(self.backlog)
        self._registry = registry
        self._workers: dict[str, Any] = {}  # those running in this process, by alias

    def connect(self) -> None:
        for signal, receiver in self._pairs():
            signal.connect(receiver, weak=False)

    def disconnect(self) -> None:
        """Count no more, and take the metrics out of the registry."""
        for signal, receiver in self._pairs():
            signal.disconnect(receiver)
        for each in (*self.metrics, self.backlog):
            self._registry.unregister(each)

    def _pairs(self) -> list[tuple[Signal, Any]]:
        names = [name for name in vars(type(self)) if name.startswith("on_")]
        return [(getattr(signals, name.removeprefix("on_")), getattr(self, name)) for name in names]

    # -- writing and handing over ----------------------------------------------------------------

    def on_event_written(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("written", sender, type_of(event))
        if event.is_delayed:
            self.metrics.count("delayed", sender, type_of(event))

    def on_event_queued(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("queued", sender, type_of(event))
        self._show_depths(sender)

    def on_event_dropped(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("dropped", sender, type_of(event))

    # -- claiming and delivering -----------------------------------------------------------------

    def on_events_claimed(self, sender: str, count: int, source: str, **kwargs: Any) -> None:
        self.metrics.count("claims", sender, source)
        self.metrics.count("claimed", sender, source, by=count)
        self._show_depths(sender)

    def on_event_started(self, sender: str, listener: Listener, **kwargs: Any) -> None:
        self.metrics.count("started", sender, listener.title)

    def on_event_decided(
        self, sender: str, listener: Listener, outcome: str, duration: float, **kwargs: Any
    ) -> None:
        self.metrics.count("decided", sender, listener.title, outcome)
        self.metrics.observe("run", sender, listener.title, seconds=duration)

    # -- settling --------------------------------------------------------------------------------

    def on_event_settled(
        self, sender: str, event: Event, outcome: str, lag: float, **kwargs: Any
    ) -> None:
        event_type = type_of(event)
        self.metrics.count("settled", sender, event_type, outcome)
        self.metrics.observe("schedule_to_start", sender, event_type, seconds=lag)
        self._show_depths(sender)

    def on_event_rescued(self, sender: str, event: Event, **kwargs: Any) -> None:
        self.metrics.count("rescued", sender, type_of(event))

    def on_lease_lost(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("lost", sender, by=count)

    # -- by people and by the purge --------------------------------------------------------------

    def on_events_replayed(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("replayed", sender, by=count)

    def on_events_discarded(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("discarded", sender, by=count)

    def on_events_purged(self, sender: str, count: int, **kwargs: Any) -> None:
        self.metrics.count("purged", sender, by=count)

    # -- workers ---------------------------------------------------------------------------------

    def on_worker_started(self, sender: str, worker: Any, **kwargs: Any) -> None:
        self._workers[sender] = worker
        self.metrics.show("running", sender, value=1)
        self._show_depths(sender)
        self._begin_at_zero(sender)

    def on_worker_stopped(self, sender: str, **kwargs: Any) -> None:
        """Leave no number of a worker that is gone."""
        self._workers.pop(sender, None)
        self.metrics.show("running", sender, value=0)
        for queue in ("hot", "cold"):
            self.metrics.show("depth", sender, queue, value=0)
        self.metrics.show("held", sender, value=0)

    def _show_depths(self, alias: str) -> None:
        worker = self._workers.get(alias)
        if worker is not None:
            depths = worker.depths()
            self.metrics.show("depth", alias, "hot", value=depths["hot"])
            self.metrics.show("depth", alias, "cold", value=depths["cold"])
            self.metrics.show("held", alias, value=depths["held"])

    def _begin_at_zero(self, alias: str) -> None:
        """Show what alerts look for before it first happens: a rise from nothing is no increase."""
        self.metrics.count("lost", alias, by=0)
        for event_type in {OTHER, *(each.event_type for each in listeners.listeners())}:
            self.metrics.count("dropped", alias, event_type, by=0)
            self.metrics.count("rescued", alias, event_type, by=0)
            for outcome in OUTCOMES:
                self.metrics.count("settled", alias, event_type, outcome, by=0)
