"""Relays, whatever the broker: registration, envelopes, outcomes and outages."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox.conf import current
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.relays import BrokerUnavailable, Unconfirmed
from django_outbox.relays.relay import relays
from django_outbox.relays.session import THREAD_NAME, EventLoopThread
from django_outbox.signals import breaker_opened, relay_published
from django_outbox.worker import pauses as worker_breaker
from tests.relay_backend import BROKER, Awaited
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Status = OutboxEvent.Status

ORDERS = {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["order.*"], "TO": "{event_type}"}


@pytest.fixture(autouse=True)
def broker(settings: Any) -> Iterator[None]:
    BROKER.reset()
    configure(settings)
    yield
    BROKER.reset()
    for each in relays():
        each.close()
        registry.remove(each)


def configure(settings: Any, outbox_settings: dict[str, Any] | None = None, **relay: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {"orders": {**ORDERS, **relay}},
        "PROBE_INTERVAL": 0.05,
        "RETRY": {"policy": "fixed", "delay": 3600},
        **(outbox_settings or {}),
    }


def write(event_type: str = "order.placed", payload: Any = None, **fields: Any) -> str:
    with transaction.atomic():
        event_id = outbox.write(event_type, payload, **fields)
    assert event_id is not None
    return event_id


def write_all(count: int, **fields: Any) -> list[str]:
    with transaction.atomic():
        return outbox.write_many(
            [outbox.Event(event_type="order.placed", payload=n, **fields) for n in range(count)]
        )


def row(event_id: str) -> OutboxEvent:
    return OutboxEvent.objects.get(pk=event_id)


def state(event_id: str) -> tuple[int, int]:
    found = row(event_id)
    return found.status, found.attempts


# -- registration ----------------------------------------------------------------------------------


def test_a_relay_is_one_batch_listener_with_a_queue_of_its_name() -> None:
    (relay,) = [each for each in registry.listeners() if each.title == "relay.orders"]
    assert relay.queue == "relay.orders"
    assert relay.batching is not None
    assert (relay.batching.size, relay.batching.per_key) == (500, 1)
    queue = current().queues["relay.orders"]
    assert queue.WORKERS == 2
    assert queue.BREAKER is not None


def test_settings_that_change_replace_the_relays(settings: Any) -> None:
    configure(settings, EVENTS=["invoice.*"])
    assert not registry.route("x", "order.placed")
    assert registry.route("x", "invoice.sent")[0].title == "relay.orders"
    settings.OUTBOX = {}
    assert relays() == []


@pytest.mark.parametrize(
    ("patterns", "sent"),
    [
        (["order.*", "order.placed", "*"], ["order.placed", "invoice.sent", "order.canceled"]),
        (["invoice.*", "order.canceled"], ["invoice.sent", "order.canceled"]),
    ],
    ids=["all", "some"],
)
def test_an_event_that_a_pattern_matches_is_sent_once(
    settings: Any, patterns: list[str], sent: list[str]
) -> None:
    configure(settings, {"UNROUTABLE": "ignore"}, EVENTS=patterns)
    for event_type in ("order.placed", "invoice.sent", "order.canceled"):
        write(event_type)
    outbox.drain()
    assert [each.event_type for each in BROKER.messages] == sent


def test_a_backend_that_cannot_be_imported_loses_nothing(settings: Any) -> None:
    configure(settings, BACKEND="tests.relay_backend.Missing")
    event_id = write()
    assert outbox.drain() == 1
    assert state(event_id) == (Status.NEW, 0)
    with outbox.Worker():
        assert "tests.relay_backend.Missing" in wait_until(breaker).reason


# -- what is sent ----------------------------------------------------------------------------------


def test_what_an_event_lacks_is_not_sent() -> None:
    write()
    outbox.drain()
    assert BROKER.messages[0].headers.keys() == {"event-id", "event-type", "occurred-at"}
    assert (BROKER.messages[0].key, BROKER.messages[0].group) == (None, None)


def test_the_source_of_a_cloudevent_is_a_uri_reference(settings: Any) -> None:
    configure(settings, FORMAT="cloudevents", SOURCE="{headers[base]}/{tenant_id}")
    write(tenant_id='north 50% "ä"', headers={"base": "https://shop.example:8443"})
    outbox.drain()
    (message,) = BROKER.messages
    assert message.headers["ce_source"] == "https://shop.example:8443/north%2050%25%20%22%C3%A4%22"


def test_cloudevents_in_structured_mode(settings: Any) -> None:
    configure(settings, FORMAT="cloudevents-structured")
    with transaction.atomic():
        event_id = outbox.write(outbox.Event.from_json("order.placed", ' [1.0, "ä"] '))
    outbox.drain()
    (message,) = BROKER.messages
    assert message.content_type == "application/cloudevents+json; charset=utf-8"
    assert message.body.decode().endswith('"data": [1.0, "ä"] }')
    found = json.loads(message.body)
    assert found["data"] == [1.0, "ä"]
    assert (found["id"], found["type"]) == (event_id, "order.placed")
    assert (found["specversion"], found["source"]) == ("1.0", "/django-outbox")
    assert found["datacontenttype"] == "application/json"


@pytest.mark.parametrize(
    ("to", "filled"), [("{tenant_id}.{aggregate_id}", "acme.7"), ("{headers[region]}", "eu")]
)
def test_a_field_that_an_event_lacks_is_unrecoverable_for_it_alone(
    settings: Any, to: str, filled: str
) -> None:
    configure(settings, TO=to)
    lacking = write()
    good = write(tenant_id="acme", headers={"region": "eu"}, aggregate_id="7")
    outbox.drain()
    assert state(lacking) == (Status.DEAD, 0)
    assert "Unrecoverable" in (row(lacking).last_error or "")
    assert state(good) == (Status.DONE, 0)
    assert [(each.event_id, each.to) for each in BROKER.messages] == [(good, filled)]


# -- batches and outcomes --------------------------------------------------------------------------


def test_a_backlog_is_sent_in_batches() -> None:
    write_all(1200)
    assert outbox.drain() == 1200
    assert sorted(BROKER.batches, reverse=True)[:2] == [500, 500]
    assert BROKER.opened == 1


def test_an_outcome_counts_for_its_message_alone() -> None:
    ids = write_all(10)
    BROKER.refused = {
        ids[1]: ValueError("the queue is full"),
        ids[2]: outbox.Unrecoverable("it is too large"),
        ids[3]: Unconfirmed("no answer"),
    }
    outbox.drain()
    assert state(ids[1]) == (Status.RETRY, 1)
    assert state(ids[2]) == (Status.DEAD, 0)
    assert state(ids[3]) == (Status.RETRY, 1)
    rest = [each for each in ids if each not in BROKER.refused]
    assert [each.event_id for each in BROKER.messages] == rest
    assert {state(each) for each in rest} == {(Status.DONE, 0)}


@pytest.mark.parametrize(("backend", "sizes"), [("InMemory", [1] * 7), ("InOrder", [5, 2])])
def test_events_of_a_key_share_a_batch_only_if_the_backend_keeps_order(
    settings: Any, backend: str, sizes: list[int]
) -> None:
    configure(settings, BACKEND=f"tests.relay_backend.{backend}")
    for number in range(7):
        write(payload=number, key="k")
    outbox.drain()
    assert [json.loads(each.body) for each in BROKER.messages] == [*range(7)]
    assert BROKER.batches == sizes


def test_an_async_backend_keeps_its_loop_between_deliveries(settings: Any) -> None:
    configure(settings, BACKEND="tests.relay_backend.Awaited")
    Awaited.loops.clear()
    ids = [write() for _ in range(3)]
    for _ in ids:
        outbox.drain(limit=1)
    assert {state(each)[0] for each in ids} == {Status.DONE}
    assert (BROKER.opened, BROKER.closed, len(Awaited.loops)) == (1, 0, 1)


def test_a_relay_reports_what_it_published() -> None:
    told = list[dict[str, Any]]()

    def note(**facts: Any) -> None:
        told.append(facts)

    ids = write_all(5)
    BROKER.refused = {ids[0]: ValueError("no"), ids[1]: outbox.Defer(60, "the host is down")}
    relay_published.connect(note)
    try:
        outbox.drain()
    finally:
        relay_published.disconnect(note)
    assert (told[0]["relay"], told[0]["published"], told[0]["refused"]) == ("orders", 3, 1)
    assert told[0]["deferred"] == 1
    assert told[0]["sender"] == "default"
    assert told[0]["duration"] >= 0


# -- outages ---------------------------------------------------------------------------------------


def breaker() -> OutboxPause | None:
    return OutboxPause.objects.filter(kind="breaker").first()


def test_an_outage_costs_no_attempt_and_ends_soon_after_it() -> None:
    BROKER.is_away = True
    ids = write_all(50)
    with outbox.Worker():
        found = wait_until(breaker)
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
        assert (found.name, found.pause_seconds) == ("relay.orders", 0)
        assert "the tests' broker is away" in found.reason
        published = BROKER.published
        wait_until(lambda: OutboxPause.objects.filter(kind="breaker", until__gt=found.until))
        assert BROKER.published == published  # the connection is checked, no event is tried
        BROKER.is_away = False
        wait_until(lambda: len(BROKER.messages) == 50)
        wait_until(lambda: {state(each) for each in ids} == {(Status.DONE, 0)})
        assert breaker() is None


SILENT, AWAY = Unconfirmed("no answer"), BrokerUnavailable("the connection broke")
LARGE = outbox.Unrecoverable("it is too large to be sent")
OUTSTANDING, CONFIRMED, REFUSED = (Status.NEW, 0), (Status.DONE, 0), (Status.RETRY, 1)


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        ([SILENT, AWAY, SILENT], [OUTSTANDING] * 3),
        ([SILENT, None, SILENT, LARGE], [REFUSED, CONFIRMED, OUTSTANDING, (Status.DEAD, 0)]),
        ([None, None, AWAY, AWAY], [CONFIRMED] * 2 + [OUTSTANDING] * 2),
    ],
    ids=["all unconfirmed", "silent in mid-batch", "broken in mid-batch"],
)
def test_an_outage_in_a_batch_costs_no_attempt_and_keeps_what_was_confirmed(
    answer: list[Any], states: list[Any]
) -> None:
    ids = write_all(len(answer))
    BROKER.answer = answer
    outbox.drain()
    assert [state(each) for each in ids] == states


def test_a_drain_says_once_that_a_broker_is_away(caplog: pytest.LogCaptureFixture) -> None:
    write_all(3)
    BROKER.answer = BrokerUnavailable("connection refused")
    with caplog.at_level(logging.WARNING, "django_outbox"):
        outbox.drain()
    (line,) = [each.getMessage() for each in caplog.records]
    assert "queue=relay.orders" in line
    assert "connection refused" in line


def test_a_wrong_number_of_outcomes_loses_nothing() -> None:
    ids = write_all(3)
    BROKER.answer = [None]
    outbox.drain()
    assert {state(each) for each in ids} == {REFUSED}
    assert "expected one for each" in (row(ids[0]).last_error or "")


def test_a_connection_that_failed_is_closed_and_another_opened() -> None:
    write()
    outbox.drain()
    BROKER.answer = BrokerUnavailable("cut")
    second = write()
    outbox.drain()
    BROKER.answer = None
    assert BROKER.opened == 1
    OutboxEvent.objects.filter(pk=second).update(available_at=row(second).occurred_at)
    outbox.drain()
    assert (BROKER.opened, BROKER.closed) == (2, 1)
    assert state(second) == (Status.DONE, 0)


def test_a_broker_that_answers_but_takes_nothing_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_breaker, "CHECK_INTERVAL", 0.05)
    BROKER.answer = BrokerUnavailable("full")
    event_id = write()
    with caplog.at_level(logging.INFO, "django_outbox"), outbox.Worker():
        wait_until(lambda: BROKER.published > 4)
        lines = [each.getMessage() for each in caplog.records if "breaker" in each.getMessage()]
        assert [each.split()[1] for each in lines] in (["opened"], ["opened", "closed"])
        BROKER.answer = None
        wait_until(lambda: row(event_id).status == Status.DONE)


@pytest.mark.parametrize("size", [1, 500], ids=["alone", "in a batch"])
@pytest.mark.parametrize(
    "refusal",
    [
        ValueError("unroutable"),
        outbox.RetryAfter(60),
        TimeoutError("x"),
        outbox.Unrecoverable("too large"),
        outbox.Dead("gone"),
        outbox.Defer(60),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_refusal_is_the_messages_own_and_what_is_behind_it_goes_at_once(
    settings: Any, refusal: Any, size: int
) -> None:
    hasty = {"relay.orders": {"BREAKER": {"failures": 1, "pause": 60}, "WORKERS": 1}}
    configure(settings, {"QUEUES": hasty}, BATCH=size)
    opened = list[Any]()

    def note(**facts: Any) -> None:
        opened.append(facts["reason"])

    ids = write_all(9)
    BROKER.refused = dict.fromkeys(ids[:8], refusal)
    breaker_opened.connect(note)
    try:
        with outbox.Worker():
            wait_until(lambda: state(ids[8])[0] == Status.DONE)
            wait_until(lambda: not OutboxEvent.objects.leased().exists())
    finally:
        breaker_opened.disconnect(note)
    assert opened == []
    assert BROKER.checked == 0


@pytest.fixture
def hasty_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_breaker, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(worker_breaker, "PROBE_PAUSE", 600.0)


CHECK_ERRORS = [BrokerUnavailable("has no JetStream"), PermissionError("may not ask")]


@pytest.mark.usefixtures("hasty_checks")
@pytest.mark.parametrize("is_keyed", [False, True], ids=["unkeyed", "keyed"])
@pytest.mark.parametrize("error", CHECK_ERRORS, ids=lambda each: type(each).__name__)
def test_a_check_that_fails_although_the_broker_takes_messages_ends_in_a_probe(
    error: Exception, is_keyed: bool
) -> None:
    BROKER.is_away, BROKER.check_error = True, error
    ids = [write(key="k" if is_keyed else None) for _ in range(3)]
    with outbox.Worker():
        wait_until(breaker)
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
        BROKER.is_away = False
        wait_until(lambda: {state(each) for each in ids} == {(Status.DONE, 0)})
        wait_until(lambda: breaker() is None)
    assert BROKER.batches[0] == 1  # the probe


@pytest.mark.usefixtures("hasty_checks")
def test_a_probe_that_the_broker_refuses_closes_the_breaker(settings: Any) -> None:
    configure(settings, BATCH=1)
    BROKER.is_away, BROKER.check_error = True, ValueError("no stream takes it")
    first, second = write_all(2)
    BROKER.refused = {first: ValueError("unroutable")}
    with outbox.Worker():
        wait_until(breaker)
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
        BROKER.is_away = False
        wait_until(lambda: state(first) == (Status.RETRY, 1))
        wait_until(lambda: state(second) == (Status.DONE, 0))


@pytest.mark.usefixtures("hasty_checks")
def test_probes_that_fail_become_rare_and_cost_no_attempt() -> None:
    BROKER.check_error, BROKER.answer = ValueError("no"), BrokerUnavailable("full")
    event_id = write()
    with outbox.Worker():
        wait_until(lambda: BROKER.checked > 4)
        assert BROKER.published == 2  # the one that opened the breaker, and the probe
        BROKER.check_error = BROKER.answer = None
        wait_until(lambda: state(event_id) == (Status.DONE, 0))


@pytest.mark.usefixtures("hasty_checks")
def test_without_an_event_to_probe_with_it_is_checked_again() -> None:
    BROKER.is_away, BROKER.check_error = True, ValueError("no")
    write()
    with outbox.Worker():
        wait_until(breaker)
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
        OutboxEvent.objects.all().delete()
        BROKER.is_away = False
        wait_until(lambda: BROKER.checked > 0)
        checked, BROKER.check_error = BROKER.checked, None
        wait_until(lambda: breaker() is None)
        assert BROKER.checked > checked


def test_a_connection_ends_although_its_client_swallows_the_cancellation() -> None:
    """As that of NATS does while its server does not answer."""
    tasks: list[asyncio.Task[None]] = []

    async def send() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(send()))
        await asyncio.sleep(0)

    loop = EventLoopThread()
    loop.run(begin(), timeout=10)
    loop.stop()
    assert THREAD_NAME not in [each.name for each in threading.enumerate()]
    assert not tasks[0].done()


def test_a_thread_ends_although_a_connection_was_lost_after_it_had_sent_the_rest() -> None:
    lost, taken, kept = asyncio.Event(), asyncio.Event(), []

    class Client(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            lost.set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        taken.set()

    async def begin() -> None:
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()
        transport, _ = await asyncio.get_running_loop().create_connection(Client, *place)
        transport.write(b"x" * 10_000_000)  # more than the kernel takes at once
        transport.close()
        await lost.wait()
        await taken.wait()
        kept.append(transport)
        server.close()

    loop = EventLoopThread()
    loop.run(begin(), timeout=10)
    loop.stop()
    assert THREAD_NAME not in [each.name for each in threading.enumerate()]
