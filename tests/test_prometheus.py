"""Prometheus metrics: counters, gauges, and the queries that a scrape makes."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock, patch

import pytest
from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import django_outbox as outbox
from django_outbox.contrib import prometheus
from django_outbox.contrib.prometheus import metrics
from django_outbox.contrib.prometheus.metrics import BacklogCollector
from django_outbox.contrib.prometheus.receivers import Receivers
from django_outbox.models import OutboxEvent, OutboxWorker
from tests.table import PLACED, in_thread, insert, keyed, listening, now, statuses, steal, write
from tests.waiting import MovedClock, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class Shown:
    """A registry for one test; call it to get the value of a sample."""

    def __init__(self, namespace: str = "outbox") -> None:
        self.registry = CollectorRegistry()
        self.receivers = Receivers(namespace, self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples that have these labels, among others; None without any."""
        asked = {"database": "default", **labels}.items()
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        found = [
            each.value for each in samples if each.name == name and asked <= each.labels.items()
        ]
        return sum(found) if found else None


@pytest.fixture
def shown() -> Iterator[Shown]:
    found = Shown()
    found.receivers.connect()
    yield found
    found.receivers.disconnect()


def nothing(event: outbox.Event) -> None:
    """Do nothing."""


def deliver(count: int, status: str = "DONE") -> None:
    with outbox.Worker():
        wait_until(lambda: statuses().get(status, 0) == count, what=f"{count} {status}")


# -- writing and handing over ----------------------------------------------------------------------


def test_423_written_delayed_queued_and_claimed_are_counted_by_type(shown: Shown) -> None:
    with listening(nothing), outbox.Worker():
        write(3)
        write(1, deliver_after=60)
        wait_until(lambda: statuses().get("DONE") == 3)
    kind = {"event_type": PLACED}
    assert shown("outbox_events_written_total", **kind) == 4
    assert shown("outbox_events_delayed_total", **kind) == 1
    assert shown("outbox_events_queued_total", **kind) == 3
    routes = ("hot", "cold")  # the worker's first poll may be faster than the offers
    claimed = {each: shown("outbox_events_claimed_total", source=each) or 0 for each in routes}
    assert sum(claimed.values()) == 3
    used = [each for each in routes if claimed[each]]
    assert all(shown("outbox_claims_total", source=each) for each in used)


def test_280_in_writer_only_nothing_is_skipped(shown: Shown, settings: Any) -> None:
    """No event is offered to a worker, so none counts as dropped or late."""
    settings.OUTBOX = {"MODE": "writer_only"}
    insert(2, due=-3600)
    with listening(nothing):
        write(2)
        write(1, deliver_after=60)
    kind = {"event_type": PLACED}
    assert shown("outbox_events_written_total", **kind) == 3
    for name in ("delayed", "queued", "dropped"):
        assert not shown(f"outbox_events_{name}_total", **kind)
    assert shown("outbox_lag_seconds") == 0
    assert shown("outbox_events_due") == 0
    assert shown("outbox_events", status="NEW") == 5


def test_423_a_full_hot_queue_counts_what_it_drops(shown: Shown, settings: Any) -> None:
    """The worker's only thread is in a listener, so new events fill its queues."""
    settings.OUTBOX = {"HOT_QUEUE_CAPACITY": 1, "COLD_QUEUE_CAPACITY": 1, "WORKERS": 1}
    release: list[bool] = []

    def slow(event: outbox.Event) -> None:
        wait_until(lambda: release)

    with listening(slow), outbox.Worker():
        write(1)
        wait_until(lambda: shown("outbox_events_started_total", listener=PLACED))
        # Write until the claimer is too busy to have taken the previous event.
        wait_until(lambda: write(1) and shown("outbox_events_dropped_total", event_type=PLACED))
        release.append(True)
        wait_until(lambda: [*statuses()] == ["DONE"])


def test_the_sizes_of_batches_are_counted(shown: Shown) -> None:
    insert(5)
    with listening(lambda events: None, batch=3):
        assert outbox.drain() == 5
    assert shown("outbox_batch_size_count", listener=PLACED) == 2
    assert shown("outbox_batch_size_sum", listener=PLACED) == 5


# -- outcomes --------------------------------------------------------------------------------------


def answer_of(event: outbox.Event) -> outbox.Dead | None:
    if event.payload == "retry" and not event.attempts:
        raise outbox.RetryAfter(0)
    return outbox.Dead("no") if event.payload == "dead" else None


def test_429_a_retry_is_counted_apart_from_dead(shown: Shown) -> None:
    for said in ("done", "retry", "dead"):
        write(1, payload=said)
    with listening(answer_of, name="asked"), outbox.Worker():
        wait_until(lambda: statuses() == {"DONE": 2, "DEAD": 1})
        wait_until(lambda: shown("outbox_leases_held") == 0)

    def settled(outcome: str) -> float | None:
        return shown("outbox_events_settled_total", event_type=PLACED, outcome=outcome)

    assert {each: settled(each) for each in ("done", "retry", "dead", "deferred")} == {
        "done": 2,
        "retry": 1,
        "dead": 1,
        "deferred": 0,
    }
    assert settled("dead") == 1
    by_listener = {
        each: shown("outbox_events_decided_total", listener=f"{PLACED} asked", outcome=each)
        for each in ("done", "retry", "dead")
    }
    assert by_listener == {"done": 2, "retry": 1, "dead": 1}


def test_schedule_to_start_counts_from_the_due_time_to_the_thread(
    shown: Shown, settings: Any
) -> None:
    """The wait for a thread counts: the second event waits for the listener of the first."""
    settings.OUTBOX = {"WORKERS": 1}

    def slow(event: outbox.Event) -> None:
        began = now()
        wait_until(lambda: (now() - began).total_seconds() > 0.4)

    insert(2, due=-100)
    with listening(slow):
        deliver(2)
    total = shown("outbox_schedule_to_start_seconds_sum", event_type=PLACED)
    assert shown("outbox_schedule_to_start_seconds_count", event_type=PLACED) == 2
    assert total is not None
    assert total > 200.4


# -- labels ----------------------------------------------------------------------------------------


def test_types_that_nobody_listens_to_share_a_label(shown: Shown) -> None:
    """An event type is data and must not become a label."""
    with listening(nothing, "order.*"), listening(nothing):
        for name in ("order.placed", "order.paid", "unknown_name.1", "unknown_name.2"):
            write(1, name)
    labels = {
        each: shown("outbox_events_written_total", event_type=each)
        for each in (PLACED, "order.*", "other", "order.paid", "unknown_name.1")
    }
    assert labels == {
        "order.placed": 1,
        "order.*": 1,
        "other": 2,
        "order.paid": None,
        "unknown_name.1": None,
    }


def test_a_delivery_is_counted_for_its_listener(shown: Shown, settings: Any) -> None:
    """A listener that this process does not have shares a label with all such listeners."""
    settings.OUTBOX = {"UNROUTABLE_GRACE": 0}
    with listening(nothing), listening(answer_of, name="mail"):
        write(2, payload="dead")
        insert(1, listener="gone", routes="")
        outbox.drain()
    titles = PLACED, f"{PLACED} mail", "other", "gone"

    def settled(outcome: str) -> list[float | None]:
        name = "outbox_events_settled_total"
        return [shown(name, event_type=PLACED, listener=each, outcome=outcome) for each in titles]

    assert settled("done") == [3, 1, None, None]
    assert settled("dead") == [None, 2, None, None]
    assert settled("discarded") == [None, None, 1, None]
    name = "outbox_schedule_to_start_seconds_count"
    assert [shown(name, listener=each) for each in titles] == [3, 3, 1, None]


# -- rescues, lost leases and administration -------------------------------------------------------


def test_430_rescues_and_lost_leases_are_counted(shown: Shown) -> None:
    insert(1, locked_by="lost", locked_at=now())

    def stolen(event: outbox.Event) -> None:
        steal(event.event_id)

    with listening(stolen), outbox.Worker():
        wait_until(lambda: shown("outbox_leases_lost_total"))
    assert shown("outbox_events_rescued_total", event_type=PLACED, listener=PLACED) == 1
    assert shown("outbox_leases_lost_total") == 1


def test_replays_discards_and_purges_are_counted(shown: Shown, settings: Any) -> None:
    settings.OUTBOX = {"RETENTION_DEAD": 0}
    insert(5, due=None, status=3, done_at=now())
    dead = OutboxEvent.objects.dead()
    assert dead[:2].replay() == 2
    assert OutboxEvent.objects.dead()[:1].discard() == 1
    assert OutboxEvent.objects.purge() == 2
    names = ("replayed", "discarded", "purged")
    assert [shown(f"outbox_events_{name}_total") for name in names] == [2, 1, 2]


# -- queues and leases of a worker -----------------------------------------------------------------


def test_424_depths_are_shown_and_none_is_left_by_a_worker_that_is_gone(
    shown: Shown, settings: Any
) -> None:
    """A second worker of the process starts from zero."""
    settings.OUTBOX = {"WORKERS": 2}  # as many events may wait in the cold queue
    release: list[bool] = []

    def slow(event: outbox.Event) -> None:
        wait_until(lambda: release)

    def cold_after_a_claim(worker: outbox.Worker) -> float | None:
        worker.poll()  # the gauges change with claims and settles
        return shown("outbox_queue_depth", queue="cold")

    for done in (4, 8):
        release.clear()
        with listening(slow), outbox.Worker() as worker:
            assert shown("outbox_workers_running") == 1
            insert(4)
            wait_until(lambda: shown("outbox_leases_held") == 4)
            wait_until(lambda: cold_after_a_claim(worker) == 2)
            assert shown("outbox_queue_depth", queue="hot") == 0
            release.append(True)
            wait_until(lambda: statuses().get("DONE") == done)  # noqa: B023
        assert shown("outbox_workers_running") == 0
        assert shown("outbox_leases_held") == 0
        assert shown("outbox_queue_depth", queue="cold") == 0


def test_calls_past_their_timeouts_are_counted_by_listener(shown: Shown, clock: MovedClock) -> None:
    gate, together = threading.Event(), threading.Barrier(2)

    def hangs_at_first(event: outbox.Event) -> None:
        if not event.attempts:
            together.wait(30)
            clock.advance(6)
            assert gate.wait(60)

    retry = outbox.Fixed(0.01)
    with listening(hangs_at_first, name="stats", timeout=5, retry=retry), outbox.Worker():
        try:
            write(2)
            wait_until(lambda: statuses() == {"DONE": 2}, what="DONE")
        finally:
            gate.set()
    assert shown("outbox_listeners_overdue_total", listener=f"{PLACED} stats") == 2


def test_what_alerts_look_for_begins_at_zero(shown: Shown) -> None:
    """A counter that appears only with its first fault would show no increase."""
    with listening(nothing), outbox.Worker():
        kind = {"event_type": PLACED}
        assert shown("outbox_leases_lost_total") == 0
        assert shown("outbox_events_dropped_total", **kind) == 0
        assert shown("outbox_events_rescued_total", **kind) == 0
        listener = {**kind, "listener": PLACED}
        assert shown("outbox_events_settled_total", **listener, outcome="dead") == 0


# -- the backlog -----------------------------------------------------------------------------------


def test_430_workers_are_seen_by_their_heartbeat(shown: Shown, settings: Any) -> None:
    settings.OUTBOX = {"POLL_INTERVAL": 0.001}
    with outbox.Worker():
        wait_until(lambda: shown("outbox_workers") == 1)
        OutboxWorker.objects.create(
            id="lost", pid=1, started_at=now(), heartbeat_at=now() - timedelta(seconds=60)
        )
        assert shown("outbox_workers") == 1
    wait_until(lambda: shown("outbox_workers") == 0)


def test_430_counts_lag_and_streams_are_right(shown: Shown) -> None:
    insert(2, due=-50)
    insert(1, due=60, status=2)
    insert(3, due=None, status=3, done_at=now())
    keyed("waiting", 2, due=-70)
    keyed("blocked", 1, due=60)
    counts = {
        each: shown("outbox_events", status=each) for each in ("NEW", "RETRY", "DEAD", "DONE")
    }
    assert counts == {"NEW": 5, "RETRY": 1, "DEAD": 3, "DONE": 0}
    assert shown("outbox_events_due") == 2
    states = {each: shown("outbox_streams", state=each) for each in ("due", "leased", "blocked")}
    assert states == {"due": 1, "leased": 0, "blocked": 1}
    lag = shown("outbox_lag_seconds")
    assert lag is not None
    assert 70 <= lag < 300


def asked(calls: list[str], answer: Callable[[], Any]) -> Any:
    """Have ``answer`` called in place of the queries of a scrape; note each alias."""

    def ask(alias: str) -> Any:
        calls.append(alias)
        return answer() if alias == "default" else []

    return patch.object(metrics, "query_samples", ask)


def test_425_scrapes_share_one_look_per_poll_interval(shown: Shown, settings: Any) -> None:
    calls: list[str] = []
    with asked(calls, lambda: [("events_due", (), 7)]):
        for interval, times in ((60, 1), (60, 1), (1e-9, 2)):
            settings.OUTBOX = {"POLL_INTERVAL": interval}
            assert shown("outbox_events_due") == 7
            assert calls.count("default") == times


def test_a_database_that_fails_breaks_no_scrape(
    shown: Shown, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The other metrics are shown; the reason is logged once, not at every scrape."""
    settings.OUTBOX = {"POLL_INTERVAL": 0.001}
    write(1)
    fails = Mock(side_effect=OperationalError("secret@host is down"))
    with asked([], fails):
        first = generate_latest(shown.registry).decode()
        generate_latest(shown.registry)
    assert "outbox_events_written_total" in first
    assert 'outbox_lag_seconds{database="default"}' not in first
    lines = [each.getMessage() for each in caplog.records if "backlog" in each.getMessage()]
    assert [each for each in lines if "alias=default" in each] == [
        "backlog not queried alias=default error=OperationalError"
    ]
    wait_until(lambda: shown("outbox_lag_seconds") is not None, what="samples again")


def test_a_database_that_does_not_answer_costs_one_thread_and_no_scrape(
    shown: Shown, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.OUTBOX = {"POLL_INTERVAL": 0.001}
    monkeypatch.setattr(metrics, "TIMEOUT", 0.05)
    gate, calls = threading.Event(), list[str]()
    with asked(calls, lambda: gate.wait(60) and []):
        for _ in range(3):
            assert shown("outbox_lag_seconds") is None
        assert calls.count("default") == 1
        gate.set()
        wait_until(lambda: shown("outbox_lag_seconds") or calls.count("default") > 1)


def test_a_scrape_leaves_no_connection_open_that_it_opened(shown: Shown) -> None:
    """A metrics port answers each scrape from a new thread."""

    def scrape() -> list[bool]:
        generate_latest(shown.registry)
        return [each.connection is None for each in connections.all(initialized_only=True)]

    assert all(in_thread(scrape).result())


def test_an_alias_without_the_table_is_left_out(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "missing_table", lambda alias: "no table")
    families = [*BacklogCollector("outbox").collect()]
    assert families
    assert [each.samples for each in families] == [[]] * len(families)
    assert caplog.records == []


# -- names, registry, start and stop ---------------------------------------------------------------


def test_427_the_namespace_prefixes_every_name() -> None:
    for namespace, prefix in (("shop", "shop_"), ("", "")):
        registry = CollectorRegistry()
        Receivers(namespace, registry)
        names = [each.name for each in registry.collect()]
        assert len(names) > 15
        assert all(name.startswith(prefix) for name in names)
        assert f"{prefix}events_settled" in names


def test_201_without_the_app_nobody_listens() -> None:
    """Nothing is imported, no receiver is connected, and the signals are skipped."""
    from django_outbox import signals

    named = {name: each for name, each in vars(signals).items() if isinstance(each, signals.Signal)}
    assert {name for name, each in named.items() if each.receivers} == set()


def test_unfit_settings_are_left_to_the_checks(settings: Any) -> None:
    settings.OUTBOX = {"WORKRES": 3}
    AppConfig.create("django_outbox.contrib.prometheus").ready()


# -- the port --------------------------------------------------------------------------------------


def test_a_port_without_the_app_says_what_to_do() -> None:
    with pytest.raises(ImproperlyConfigured, match="not in INSTALLED_APPS"):
        prometheus.serve(0, "127.0.0.1")


def test_432_a_port_shows_the_default_registry(settings: Any) -> None:
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "django_outbox.contrib.prometheus"]
    from django_outbox.contrib.prometheus import receivers

    server, thread = prometheus.serve(0, "127.0.0.1")
    try:
        with listening(nothing):
            write(2)
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        assert receivers._installed is not None
        receivers._installed.disconnect()
        receivers._installed = None
    samples = {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    label = (("database", "default"), ("event_type", PLACED))
    assert samples[("outbox_events_written_total", *label)] == 2
