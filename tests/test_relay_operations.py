"""What operators see of relays: metrics, ``outbox_relays`` and the dashboard."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from typing import Any, ClassVar

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.management.commands import outbox_relays
from django_outbox.models import OutboxAttempt, OutboxEvent, OutboxPause
from django_outbox.relays import Backend, BrokerUnavailable
from django_outbox.signals import listener_overdue
from tests.relay_backend import BROKER
from tests.table import insert, now
from tests.test_checks import ours
from tests.test_dashboard import body, boss, part
from tests.test_prometheus import Shown, shown
from tests.waiting import wait_until

__all__ = ["boss", "shown"]  # the fixtures

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


# -- metrics ---------------------------------------------------------------------------------------


def test_what_relays_have_sent_is_counted(shown: Shown) -> None:
    rows = insert(3, event_type="order.placed")
    BROKER.refused = {rows[0]: ValueError("too large")}
    outbox.drain()
    assert shown("outbox_relay_published_total", relay="orders") == 2
    assert shown("outbox_relay_refused_total", relay="orders") == 1
    assert shown("outbox_relay_seconds_count", relay="orders") == 1
    assert shown("outbox_relay_published_total", relay="hooks") is None


def test_what_cannot_be_sent_is_counted_as_refused(shown: Shown, settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "TO": "{tenant_id}"}}}
    insert(1, event_type="order.placed")
    outbox.drain()
    assert shown("outbox_relay_refused_total", relay="orders") == 1
    insert(1, event_type="order.placed")
    insert(1, event_type="order.placed", tenant_id="acme")
    outbox.drain()
    assert shown("outbox_relay_refused_total", relay="orders") == 2
    assert shown("outbox_relay_published_total", relay="orders") == 1


def test_an_outage_refuses_nothing(shown: Shown) -> None:
    insert(1, event_type="order.placed")
    BROKER.is_away = True
    outbox.drain()
    assert shown("outbox_relay_published_total", relay="orders") == 0
    assert shown("outbox_relay_refused_total", relay="orders") == 0


def test_messages_are_counted_from_zero(shown: Shown) -> None:
    with outbox.Worker():
        for name in ("published", "refused", "deferred"):
            assert shown(f"outbox_relay_{name}_total", relay="hooks") == 0


def test_an_open_breaker_of_a_relay_is_shown(shown: Shown) -> None:
    breaker()
    assert shown("outbox_breaker_open", queue="relay.orders") == 1
    assert shown("outbox_breaker_open", queue="relay.hooks") == 0


# -- outbox_relays ---------------------------------------------------------------------------------


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
    out = StringIO()
    call_command("outbox_relays", *arguments, stdout=out)
    return out.getvalue()


def fails(*arguments: str) -> tuple[int, str]:
    with pytest.raises(CommandError) as raised:
        run(*arguments)
    return raised.value.returncode, str(raised.value)


def test_the_table_has_each_relay_and_no_password() -> None:
    insert(2, event_type="order.placed", due=-90, queue="relay.orders")
    text = run()
    assert "order.*, cart.left" in text
    assert "https://***@example.org/{event_type}?***" in text
    assert "hunter2" not in text
    assert "tests.relay_backend.InMemory" in text
    assert "relay.hooks" in text
    assert "[default]" in text
    assert "2, the oldest for 9" in text
    assert "no live worker serves it" in text
    assert BROKER.opened == 0


def test_a_broker_that_is_away_and_a_pause_are_told() -> None:
    breaker()
    OutboxPause.objects.pause("queue", "relay.hooks")
    lines = {each.split()[0]: each for each in run().partition("[default]")[2].splitlines()[1:]}
    assert "broker away since 20" in lines["orders"]
    assert "no answer from kafka:9092" in lines["orders"]
    assert "paused" in lines["hooks"]


def test_json_has_the_same_and_is_stable() -> None:
    insert(1, event_type="order.placed", due=-9, queue="relay.orders")
    breaker("relay.hooks")
    found = json.loads(run("--format", "json"))
    state = found["orders"].pop("databases")["default"]
    assert found["orders"] == {
        "backend": "tests.relay_backend.InMemory",
        "events": ["order.*", "cart.left"],
        "to": "{event_type}",
        "format": "plain",
        "queue": "relay.orders",
    }
    assert state.pop("oldest_due_age") >= 9
    assert state == {"waiting": 1, "workers": 0, "paused": False, "away": None, "held": None}
    away = found["hooks"]["databases"]["default"]["away"]
    assert away["reason"] == "no answer from kafka:9092"
    assert set(away) == {"since", "reason"}


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
    rows = insert(3, event_type="order.placed", due=-90, queue="relay.orders")
    BROKER.refused = dict.fromkeys(rows[:2], outcome)
    outbox.drain()
    for arguments in ((), ("--check",)):
        held = json.loads(run("--format", "json", *arguments))["orders"]["databases"]["default"][
            "held"
        ]
        assert (held["count"], held["reason"]) == (2, reason)
        assert held["age"] >= 90
        assert "2 refused or deferred, for up to 9" in run(*arguments)
    lines = [
        each.getMessage() for each in caplog.records if each.getMessage().startswith("message")
    ]
    assert len(lines) == 1  # for both
    assert reason in lines[0]
    is_deferred = isinstance(outcome, outbox.Defer)
    assert shown("outbox_relay_deferred_total", relay="orders") == (2 if is_deferred else 0)
    assert shown("outbox_relay_refused_total", relay="orders") == (0 if is_deferred else 2)
    assert OutboxEvent.objects.get(pk=rows[0]).attempts == (0 if is_deferred else 1)
    assert OutboxAttempt.objects.count() == (0 if is_deferred else 2)


def test_what_its_turn_did_not_come_to_is_not_told(shown: Shown) -> None:
    BROKER.refused = dict.fromkeys(insert(1, event_type="order.placed"), outbox.Defer(60))
    outbox.drain()
    assert shown("outbox_relay_deferred_total", relay="orders") == 0
    assert json.loads(run("--format", "json"))["orders"]["databases"]["default"]["held"] is None


def test_one_relay_may_be_chosen() -> None:
    text = run("--relay", "hooks")
    assert "relay.hooks" in text
    assert "orders" not in text
    code, message = fails("--relay", "order")
    assert code == 2
    assert "does not have 'order'; expected one of orders, hooks." in message


def test_without_relays_it_says_so(settings: Any) -> None:
    settings.OUTBOX = {}
    assert run() == 'OUTBOX["RELAYS"] names no relay.\n'
    assert run("--check", "--format", "json") == "{}\n"
    assert "it is empty" in fails("--relay", "x")[1]


def test_a_check_connects_and_closes() -> None:
    text = run("--check", "--relay", "orders")
    assert "BROKER" in text
    assert (BROKER.opened, BROKER.checked, BROKER.closed, BROKER.published) == (1, 1, 1, 0)
    assert json.loads(run("--check", "--format", "json"))["orders"]["fault"] is None


def test_a_check_says_what_is_wrong(settings: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {
            "orders": ORDERS,
            "broken": {**ORDERS, "BACKEND": f"{__name__}.Broken"},
            "mute": {**ORDERS, "BACKEND": f"{__name__}.Secretive"},
        }
    }
    BROKER.is_away = True
    code, message = fails("--check")
    assert code == 1
    assert message.splitlines() == [
        "orders: the tests' broker is away",
        "broken: the topic order.placed is missing",
        "mute: BrokerUnavailable",
    ]
    assert fails("--check", "--relay", "broken")[1] == "broken: the topic order.placed is missing"


def test_a_broker_that_does_not_answer_is_not_awaited_for_ever(settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "BACKEND": f"{__name__}.Silent"}}}
    Silent.gate.clear()
    try:
        assert fails("--check", "--timeout", "0.2") == (1, "orders: no answer within 0.2 s")
    finally:
        Silent.gate.set()


def test_a_database_without_an_answer_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(alias: str) -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(outbox_relays, "missing_table", refuse)
    assert fails() == (2, "default: gone")
    monkeypatch.setattr(outbox_relays, "missing_table", lambda alias: "no table")
    assert fails() == (2, "no table")


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call_command("outbox_relays", "--help")
    assert (
        "manage.py outbox_relays --check --relay orders --timeout 5s\n" in capsys.readouterr().out
    )


# -- the dashboard ---------------------------------------------------------------------------------


def test_the_dashboard_shows_relays_where_there_are_any(boss: Client, settings: Any) -> None:
    insert(2, event_type="order.placed", due=-90, queue="relay.orders")
    text = part(body(boss), "relays")
    assert "Relays" in text
    assert "orders order.*, cart.left {event_type} InMemory 2 1 min" in text
    assert "https://***@example.org/{event_type}?*** InMemory 0" in text
    assert "hunter2" not in body(boss)
    settings.OUTBOX = {}
    assert 'id="outbox-relays"' not in body(boss)


def test_the_dashboard_tells_since_when_a_broker_is_away_and_why(boss: Client) -> None:
    breaker()
    OutboxPause.objects.pause("queue", "relay.hooks")
    text = part(body(boss), "relays")
    assert "away for 1 min : no answer from kafka:9092" in text
    assert text.endswith("paused")
    assert re.search(r'<section class="[^"]*outbox-wrong[^"]*" id="outbox-relays"', body(boss))


def test_relays_cost_the_dashboard_no_query(boss: Client, settings: Any) -> None:
    breaker()
    counts = []
    for relays in ({}, {"orders": ORDERS}):
        settings.OUTBOX = {"RELAYS": relays, "QUEUES": {"relay.orders": {}}}
        body(boss)
        with CaptureQueriesContext(connection) as queries:
            body(boss)
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_markup_in_a_relay_is_escaped(boss: Client, settings: Any) -> None:
    settings.OUTBOX = {"RELAYS": {"orders": {**ORDERS, "EVENTS": ["<b>"], "TO": "<b>"}}}
    breaker()
    OutboxPause.objects.update(reason="<b>")
    assert "<b>" not in body(boss).partition('id="outbox-relays"')[2].partition("</section>")[0]


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


def test_w018_relays_need_no_interceptor(settings: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {"orders": ORDERS},
        "INTERCEPTORS": ["django_outbox.contrib.logs.restore"],
    }
    assert [each.id for each in ours()] == []


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
