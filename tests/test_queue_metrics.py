"""Prometheus metrics and trace attributes of queues."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxPause
from django_outbox.signals import announce, breaker_closed, breaker_opened
from tests.table import insert, keyed, listening, now
from tests.test_opentelemetry import Traced, attributes, traced
from tests.test_prometheus import Shown, deliver, shown
from tests.test_queue_status import breaker, serving
from tests.waiting import wait_until

__all__ = ["shown", "traced"]  # the fixtures

pytestmark = pytest.mark.django_db(transaction=True)

TWO = {"QUEUES": {"hooks": {"BREAKER": {}}}, "POLL_INTERVAL": 0.001}


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = TWO


def nothing(event: outbox.Event) -> None:
    """Do nothing."""


def test_what_is_due_is_shown_by_queue(shown: Shown) -> None:
    insert(2, queue="hooks", due=-70)
    insert(1, queue="hooks", due=60)
    insert(1, queue="gone")
    keyed("k", 3)
    due = {each: shown("outbox_queue_due", queue=each) for each in ("default", "hooks", "gone")}
    assert due == {"default": 1, "hooks": 2, "gone": 1}
    age = shown("outbox_queue_oldest_due_age_seconds", queue="hooks")
    assert age is not None
    assert 70 <= age < 130
    assert shown("outbox_queue_due", queue="nowhere") is None


def test_an_empty_queue_has_zeros(shown: Shown) -> None:
    for name in ("due", "oldest_due_age_seconds", "workers"):
        assert shown(f"outbox_queue_{name}", queue="hooks") == 0
    assert shown("outbox_breaker_open", queue="hooks") == 0


def test_live_workers_are_shown_by_queue(shown: Shown) -> None:
    serving("all", "default", "hooks")
    serving("one", "default")
    serving("lost", "hooks", heartbeat_at=now() - timedelta(seconds=40))
    found = {each: shown("outbox_queue_workers", queue=each) for each in ("default", "hooks")}
    assert found == {"default": 2, "hooks": 1}


def test_an_open_breaker_is_shown_until_it_is_closed(shown: Shown) -> None:
    made = breaker()
    OutboxPause.objects.pause("queue", "default")  # is not a breaker
    assert shown("outbox_breaker_open", queue="hooks") == 1
    assert shown("outbox_breaker_open", queue="default") == 0
    made.delete()
    wait_until(lambda: shown("outbox_breaker_open", queue="hooks") == 0)


def test_breakers_are_counted_from_zero(shown: Shown) -> None:
    with outbox.Worker():
        for name in ("opened", "closed"):
            assert shown(f"outbox_breakers_{name}_total", queue="hooks") == 0
            assert shown(f"outbox_breakers_{name}_total", queue="default") is None
    announce(breaker_opened, sender="default", queue="hooks", pause=30, reason="5 failures")
    announce(breaker_opened, sender="default", queue="hooks", pause=60, reason="the probe failed")
    announce(breaker_closed, sender="default", queue="hooks")
    assert shown("outbox_breakers_opened_total", queue="hooks") == 2
    assert shown("outbox_breakers_closed_total", queue="hooks") == 1


def test_metrics_of_a_listener_have_its_queue(shown: Shown) -> None:
    insert(1, event_type="hook.sent", queue="hooks")
    insert(1)
    with listening(nothing), listening(nothing, "hook.sent", queue="hooks"):
        deliver(2)
    for listener, queue in (("order.placed", "default"), ("hook.sent", "hooks")):
        label = {"listener": listener, "queue": queue}
        assert shown("outbox_events_started_total", **label) == 1
        assert shown("outbox_events_decided_total", **label, outcome="done") == 1
        assert shown("outbox_listener_seconds_count", **label) == 1


@pytest.mark.parametrize(("queue", "expected"), [("hooks", "hooks"), ("gone", "default")])
def test_a_span_has_the_queue_of_its_listener(
    traced: Traced, settings: Any, queue: str, expected: str
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, **TWO}
    insert(1)
    with listening(nothing, name="first"), listening(nothing, name="second", queue=queue):
        outbox.drain()
    found = {
        attributes(each)["messaging.consumer.group.name"]: attributes(each)["outbox.queue"]
        for each in traced.deliveries()
    }
    assert found == {"order.placed first": "default", "order.placed second": expected}
