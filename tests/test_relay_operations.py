"""What operators see of relays: metrics, ``outbox_status --relays`` and the dashboard."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.db import transaction
from django.test import Client

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.relays import Backend, BrokerUnavailable
from django_outbox.signals import listener_overdue
from tests.relay_backend import BROKER
from tests.table import insert, now
from tests.test_checks import ours
from tests.test_dashboard import body, part
from tests.test_prometheus import Shown, shown
from tests.test_status import fails
from tests.test_status import run as run_status
from tests.waiting import wait_until

__all__ = ["shown"]  # the fixtures

pytestmark = pytest.mark.django_db(transaction=True)

ORDERS = {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["order.*", "cart.left"]}
HOOKS = {
    "BACKEND": "tests.relay_backend.InMemory",
    "EVENTS": ["hook.*"],
    "FORMAT": "cloudevents",
    "TO": "https://me:hunter2@example.org/{event_type}?key=hunter2",
}


@pytest.fixture(autouse=True)
def two_relays(settings: Any) -> Iterator[None]:
    BROKER.reset()
    settings.OUTBOX = {"RELAYS": {"orders": ORDERS, "hooks": HOOKS}}
    yield
    BROKER.reset()


def breaker(name: str = "relay.orders") -> OutboxPause:
    return OutboxPause.objects.create(
        kind="breaker",
        name=name,
        paused_at=now() - timedelta(seconds=90),
        pause_seconds=0,
        until=now() - timedelta(seconds=1),
        reason=f"{name}: no answer from kafka:9092",
    )


# -- outbox_status --relays ------------------------------------------------------------------------


class Broken(Backend):
    def check(self) -> None:
        raise RuntimeError("the topic order.placed is missing")


class Silent(Backend):
    gate = threading.Event()

    def open(self) -> None:
        self.gate.wait(10)


class Secretive(Backend):
    def open(self) -> None:
        raise BrokerUnavailable


def run(*arguments: str) -> str:
    return run_status("--relays", *arguments)


def rows(*arguments: str) -> tuple[Any, Any]:
    """Return the relays and their states by name."""
    found = json.loads(run("--format", "json", *arguments))
    states = {each.pop("relay"): each for each in found["databases"]["default"]["waiting"]}
    return {each.pop("relay"): each for each in found["relays"]}, states


def test_a_table_and_json_have_each_relay_and_no_password() -> None:
    insert(2, event_type="order.placed", due=-90, queue="relay.orders")
    relays, states = rows()
    assert relays["orders"] == {
        "backend": "tests.relay_backend.InMemory",
        "events": ["order.*", "cart.left"],
        "to": "{event_type}",
        "format": "plain",
        "queue": "relay.orders",
    }
    assert 90 <= states["orders"].pop("oldest_due_age") < 150
    assert (states["orders"]["due"], states["orders"]["workers"]) == (2, 0)
    assert not any([*states["orders"].values()][2:])
    text = run()
    for each in ("order.*, cart.left", "https://***@example.org/{event_type}?***", "[default]"):
        assert each in text
    assert "hunter2" not in text
    assert BROKER.opened == 0


def test_a_broker_that_is_away_and_a_pause_are_told() -> None:
    breaker()
    OutboxPause.objects.pause("queue", "relay.hooks")
    _, states = rows()
    assert states["orders"]["away_since"] is not None
    assert states["orders"]["reason"] == "no answer from kafka:9092"
    assert (states["hooks"]["paused"], states["hooks"]["away_since"]) == (True, None)
    assert "no answer from kafka:9092" in run()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.msg.startswith("message")]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ValueError("unroutable: no queue is bound"), "ValueError: unroutable: no queue is bound"),
        (outbox.Defer(60, "a.example:443 cannot be reached"), "a.example:443 cannot be reached"),
    ],
    ids=["refused", "deferred"],
)
def test_what_was_refused_or_deferred_is_told_with_its_reason_and_age(
    outcome: Any, reason: str, shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    ids = insert(3, event_type="order.placed", due=-90, queue="relay.orders")
    BROKER.refused = dict.fromkeys(ids[:2], outcome)
    outbox.drain()
    found = rows("--check")[1]["orders"]
    assert (found["deferred"], found["reason"]) == (2, reason)
    assert found["deferred_age"] >= 90
    assert reason in run()
    [line] = logged(caplog)  # for both
    assert line.endswith(f" reason={reason}")
    is_deferred = isinstance(outcome, outbox.Defer)
    assert shown("outbox_relay_deferred_total", relay="orders") == (2 if is_deferred else 0)
    assert shown("outbox_relay_refused_total", relay="orders") == (0 if is_deferred else 2)
    assert shown("outbox_relay_published_total", relay="orders") == 1
    assert shown("outbox_relay_seconds_count", relay="orders") == 1
    assert shown("outbox_relay_published_total", relay="hooks") is None
    assert OutboxEvent.objects.get(pk=ids[0]).attempts == (0 if is_deferred else 1)


def test_a_reason_is_one_line_and_never_empty(caplog: pytest.LogCaptureFixture) -> None:
    two = "too large\nby 5 bytes"
    outcomes = [outbox.Dead(), outbox.Dead(two), outbox.Defer(9, " \n"), ValueError(two)]
    ids = insert(4, event_type="order.placed", queue="relay.orders")
    BROKER.refused = dict(zip(ids, outcomes, strict=True))
    outbox.drain()
    found = {each.partition(" reason=")[2] for each in logged(caplog)}
    assert found == {"Dead", "too large", "Defer", "ValueError: too large"}


def test_what_its_turn_did_not_come_to_is_not_told(shown: Shown) -> None:
    BROKER.refused = dict.fromkeys(insert(1, event_type="order.placed"), outbox.Defer(60))
    outbox.drain()
    assert shown("outbox_relay_deferred_total", relay="orders") == 0
    assert rows()[1]["orders"]["deferred"] == 0


def test_without_relays_it_says_so(settings: Any) -> None:
    settings.OUTBOX = {}
    assert rows("--check") == ({}, {})


def test_a_check_connects_and_closes() -> None:
    assert {each["broker"] for each in rows("--check")[0].values()} == {"ok"}
    assert (BROKER.opened, BROKER.checked, BROKER.closed, BROKER.published) == (2, 2, 2, 0)


def test_a_check_says_what_is_wrong(settings: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {
            "orders": ORDERS,
            "broken": {**ORDERS, "BACKEND": f"{__name__}.Broken"},
            "mute": {**ORDERS, "BACKEND": f"{__name__}.Secretive"},
        }
    }
    BROKER.is_away = True
    code, message = fails("--relays", "--check")
    assert code == 1
    assert message.splitlines() == [
        "orders: the tests' broker is away",
        "broken: the topic order.placed is missing",
        "mute: BrokerUnavailable",
    ]


def test_a_broker_that_does_not_answer_is_not_awaited_for_ever(settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "BACKEND": f"{__name__}.Silent"}}}
    Silent.gate.clear()
    try:
        said = fails("--relays", "--check", "--timeout", "1")
    finally:
        Silent.gate.set()
    assert said == (1, "orders: no answer within 1 s")


# -- the dashboard ---------------------------------------------------------------------------------


def test_the_dashboard_shows_where_relays_send_to(admin_client: Client) -> None:
    insert(2, event_type="order.placed", due=-90, queue="relay.orders")
    text = part(body(admin_client), "queues")
    assert "relay.orders → {event_type} (InMemory), no live worker serves it 2 1 min" in text
    assert "relay.hooks → https://***@example.org/{event_type}?*** (InMemory), no" in text
    assert "hunter2" not in body(admin_client)


def test_the_dashboard_tells_since_when_a_broker_is_away_and_why(admin_client: Client) -> None:
    breaker()
    OutboxPause.objects.pause("queue", "relay.hooks")
    text = body(admin_client)
    assert "no answer from kafka:9092" in part(text, "held")
    assert part(text, "queues").count("paused") == 2
    assert re.search(
        r"The broker of relay orders has been away since [\d :-]+: no answer from", text
    )


def test_markup_in_a_relay_is_escaped(admin_client: Client, settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "EVENTS": ["<b>"], "TO": "<b>"}}}
    breaker()
    OutboxPause.objects.update(reason="<b>")
    assert (
        "<b>"
        not in body(admin_client).partition('id="outbox-queues"')[2].partition("</section>")[0]
    )


# -- settings of other listeners -------------------------------------------------------------------


def test_a_relay_ends_its_calls_itself_whatever_listener_timeout_says(settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": ORDERS}, "LISTENER_TIMEOUT": 1e-9}
    insert(1, event_type="order.placed")
    late: list[Any] = []

    def note(**kwargs: Any) -> None:
        late.append(kwargs)

    listener_overdue.connect(note)
    try:
        outbox.drain()
    finally:
        listener_overdue.disconnect(note)
    assert len(BROKER.messages) == 1
    assert late == []


def test_w017_names_relays_that_hold_up_the_one_stream(settings: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {"orders": ORDERS},
        "MODE": "ordered",
        "ORDERING": "global",
        "UNROUTABLE_GRACE": 0,
    }
    [warning] = ours()
    assert warning.id == "django_outbox.W017"
    assert "a relay whose broker is away" in warning.msg


# -- drain -----------------------------------------------------------------------------------------


class Lost(Backend):
    """Takes longer to find its broker away than an event waits until its next try."""

    opened: ClassVar[list[float]] = []

    def open(self) -> None:
        self.opened.append(time.monotonic())
        wait_until(lambda: time.monotonic() > self.opened[-1] + 1.2)
        raise BrokerUnavailable("no route to the host")


@pytest.mark.parametrize("is_keyed", [False, True], ids=["unkeyed", "keyed"])
def test_a_drain_ends_though_a_broker_is_away(settings: Any, is_keyed: bool) -> None:
    lost = {**ORDERS, "BACKEND": f"{__name__}.Lost", "BATCH": 1}
    settings.OUTBOX = {"RELAYS": {"lost": lost, "hooks": HOOKS}}
    Lost.opened.clear()
    with transaction.atomic():
        for n in range(2):
            outbox.write("order.placed", key=f"k{n}" if is_keyed else None)
        outbox.write("hook.called")
    outbox.drain()
    assert 1 <= len(Lost.opened) <= 2  # what was claimed before it was known to be away
    assert [each.event_type for each in BROKER.messages] == ["hook.called"]
    assert OutboxEvent.objects.filter(status=Status.NEW, attempts=0).count() == 2
