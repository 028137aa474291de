"""The testing helpers as a user's tests call them, and the pytest plugin in a separate pytest."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings

import django_outbox as outbox
from django_outbox import inbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxInbox
from django_outbox.testing import (
    accept_test_transaction,
    assert_event_written,
    capture_events,
    drain,
    immediate_delivery,
    make_event,
    pass_time,
    running_worker,
    wait_until,
)
from django_outbox.writing.on_commit import hot_queues
from tests import samples
from tests.surroundings import both, inside, outside_alone
from tests.table import PLACED, insert, listening, now, row, statuses
from tests.testapp.models import Effect, Order

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent


class Shop(enum.Enum):
    PLACED = PLACED


def place(sku: str = "teapot", **fields: Any) -> str:
    """Place an order: the business code under test."""
    with transaction.atomic():
        order = Order.objects.create(sku=sku)
        return str(outbox.write(PLACED, {"sku": sku}, aggregate=order, **fields))


def ship(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=os.getpid(), phase="shipped")


def shipped() -> int:
    return Effect.objects.filter(phase="shipped").count()


def fail(event: outbox.Event) -> None:
    raise ValueError("the van has no fuel")


# -- capture_events --------------------------------------------------------------------------------


@both
def test_captured_events_in_order_as_listeners_see_them(outside: bool) -> None:
    place("before")
    with capture_events() as events:
        assert events == []
        first = place("teapot", headers={"locale": "en"})
        with transaction.atomic():
            second = outbox.write("order.paid", {"on": date(2026, 11, 21), "parts": (1, 2)})
    place("after")
    assert [each.event_id for each in events] == [first, second]
    assert (len(events), events[1].payload) == (2, {"on": "2026-11-21", "parts": [1, 2]})
    assert [each.headers for each in events[:1]] == [{"locale": "en"}]
    assert events[0].aggregate_type == "testapp.Order"
    assert events[0].created_at == row(first).created_at
    assert "order.paid" in repr(events)
    assert events == [*events]


@both
def test_what_was_rolled_back_is_not_captured(outside: bool) -> None:
    with capture_events() as events:
        with transaction.atomic():
            kept = outbox.write(PLACED)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                outbox.write("order.ghost")
                assert [each.event_type for each in events] == [PLACED, "order.ghost"]
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            outbox.write("order.ghost")
            raise ZeroDivisionError
    assert [each.event_id for each in events] == [kept]


# -- assert_event_written --------------------------------------------------------------------------


@both
def test_the_event_that_fits_is_returned(outside: bool) -> None:
    place("kettle")
    wanted = place("teapot", headers={"locale": "en"}, tenant_id="north")
    order = Order.objects.get(sku="teapot")
    found = assert_event_written(
        Shop.PLACED,
        payload={"sku": "teapot"},
        aggregate=order,
        headers={"locale": "en"},
        tenant_id="north",
        is_delayed=False,
    )
    assert found.event_id == wanted
    assert assert_event_written(PLACED, payload={"sku": ANY}).payload == {"sku": "kettle"}


@inside
def test_values_are_compared_as_written_and_as_seen() -> None:
    with transaction.atomic():
        outbox.write("order.paid", {"on": date(2026, 11, 21), "sum": Decimal("4.80")})
    assert_event_written("order.paid", payload={"on": date(2026, 11, 21), "sum": Decimal("4.80")})
    assert_event_written("order.paid", payload={"on": "2026-11-21", "sum": "4.80"})
    with pytest.raises(AssertionError):
        assert_event_written("order.paid", payload={"on": date(2026, 11, 22), "sum": ANY})


@inside
def test_a_failure_lists_what_was_written() -> None:
    kettle = place("kettle", headers={"locale": "de"})
    with transaction.atomic():
        paid = outbox.write("order.paid", {"cents": 480})
    order = Order.objects.get()
    with pytest.raises(AssertionError) as failure:
        assert_event_written(PLACED, payload={"sku": "teapot"}, headers={"locale": "en"})
    assert str(failure.value).splitlines() == [
        (
            "No event 'order.placed' with payload={'sku': 'teapot'}, headers={'locale': 'en'} was "
            "written. Written were 2:"
        ),
        (
            f"  order.placed {kettle} (testapp.Order {order.pk}): payload={{'sku': 'kettle'}}, "
            "headers={'locale': 'de'} (differs in payload, headers)"
        ),
        f"  order.paid {paid}: payload={{'cents': 480}}",
    ]


# -- make_event ------------------------------------------------------------------------------------


def test_an_event_for_a_listener_needs_no_database() -> None:
    """``make_event`` makes no query: this test has no access to a database."""
    event = make_event(
        Shop.PLACED,
        {"on": date(2026, 11, 21), "parts": (1,)},
        attempts=2,
        headers={"locale": "en"},
        aggregate_type="shop.Order",
        aggregate_id="7",
    )
    assert event.payload == {"on": "2026-11-21", "parts": [1]}
    assert (event.event_type, event.attempts, event.source) == (PLACED, 2, "cold")
    assert (event.aggregate_type, event.aggregate_id) == ("shop.Order", "7")
    assert event.headers == {"locale": "en"}
    assert event.created_at == event.occurred_at == event.first_due_at == event.available_at
    assert not event.is_delayed
    assert make_event(PLACED).event_id != make_event(PLACED).event_id
    assert make_event(PLACED, event_id="mine", source="hot").source == "hot"


@outbox.event("parcel.typed", headers={"carrier": "carrier"})
@dataclass
class ParcelSent:
    number: int
    carrier: str
    on: date


@inside
def test_typed_events_are_asserted_by_their_class() -> None:
    parcel = ParcelSent(7, "owl", date(2026, 11, 21))
    made = make_event(parcel, attempts=1)
    assert (made.event_type, made.attempts, made.payload) == ("parcel.typed", 1, parcel)
    with transaction.atomic():
        outbox.write(parcel)
    assert_event_written(ParcelSent, payload=parcel, headers={"carrier": "owl"})
    with pytest.raises(AssertionError, match="differs in payload"):
        assert_event_written(ParcelSent, payload=ParcelSent(8, "owl", parcel.on))


@pytest.mark.parametrize(
    "payload",
    [float("nan"), {1, 2}, "\ud800", "x" * 2_000_000],
    ids=["nan", "set", "surrogate", "large"],
)
def test_a_made_event_is_checked_like_a_written_one(payload: Any) -> None:
    with pytest.raises(outbox.InvalidEvent):
        make_event(PLACED, payload)


# -- drain -----------------------------------------------------------------------------------------


@both
def test_drain_delivers_in_this_thread(outside: bool) -> None:
    threads: list[int] = []
    with listening(lambda event: threads.append(threading.get_ident())):
        place()
        place(deliver_after=60)
        assert drain() == 1
        assert drain(at=now() + timedelta(seconds=61)) == 1
    assert threads == [threading.get_ident()] * 2


@both
def test_drain_fails_with_what_the_listener_raised(outside: bool) -> None:
    with listening(fail), pytest.raises(AssertionError) as failure:
        event_id = place()
        drain()
    said = str(failure.value)
    assert said.startswith(f"1 deliveries failed:\norder.placed {event_id} (testapp.Order ")
    assert "(retry): ValueError: the van has no fuel\nTraceback" in said
    assert row(event_id).status == Status.RETRY
    with listening(fail, retry=outbox.Fixed(max_attempts=1)):
        pass_time(60)
        with pytest.raises(AssertionError, match=r"\(dead\): ValueError"):
            drain()
        assert drain() == 0  # it reports only its own deliveries


@both
def test_drain_fails_with_what_each_listener_raised(outside: bool) -> None:
    def bounce(event: outbox.Event) -> None:
        raise ConnectionError("no such address")

    with (
        listening(lambda event: None),
        listening(fail, name="van"),
        listening(bounce, name="mail"),
        pytest.raises(AssertionError) as failure,
    ):
        place()
        drain()
    said = str(failure.value)
    assert said.startswith("2 deliveries failed:\n")
    assert "(retry): ValueError: the van has no fuel\n" in said
    assert "(retry): ConnectionError: no such address\n" in said


@inside
def test_an_event_of_several_listeners_is_one_event() -> None:
    with listening(ship), listening(lambda event: None, name="mail"), capture_events() as events:
        event_id = place()
    assert OutboxEvent.objects.of_event(event_id).count() == 2
    assert [(event.event_id, event.listener) for event in events] == [(event_id, "")]
    with pytest.raises(AssertionError, match="Written were 1:"):
        assert_event_written("order.paid")


# -- immediate_delivery ----------------------------------------------------------------------------


class InATestCase(TestCase):
    """``on_commit`` callbacks run in captureOnCommitCallbacks, or at the end of our block."""

    def test_at_the_end_of_the_block(self) -> None:
        with listening(ship), immediate_delivery():
            place()
            assert shipped() == 0
        assert shipped() == 1
        assert hot_queues.by_alias == {}

    def test_when_callbacks_are_executed(self) -> None:
        with listening(ship), immediate_delivery():
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                place()
                assert shipped() == 0
            assert shipped() == 1
            assert len(callbacks) == 1
            with self.captureOnCommitCallbacks(execute=True):
                place()
                transaction.on_commit(place)  # business code that writes again after the commit
            assert shipped() == 3
        assert shipped() == 3

    def test_a_failed_delivery_fails_the_test(self) -> None:
        failure = pytest.raises(AssertionError, match="the van has no fuel")
        with listening(fail), failure, immediate_delivery():
            place()
        assert hot_queues.by_alias == {}

    def test_an_error_of_the_block_comes_first(self) -> None:
        with listening(fail), pytest.raises(ZeroDivisionError), immediate_delivery():
            place()
            raise ZeroDivisionError
        assert hot_queues.by_alias == {}
        assert statuses() == {"NEW": 1}

    def test_a_forgotten_transaction_is_found_unless_the_test_asks_otherwise(self) -> None:
        with pytest.raises(outbox.NoActiveTransaction):
            outbox.write(PLACED)
        with accept_test_transaction():
            outbox.write(PLACED)
            with inbox.once("bank", 1) as first:
                assert first
        with pytest.raises(outbox.NoActiveTransaction):
            outbox.write(PLACED)
        assert statuses() == {"NEW": 1}

    def test_519_enabled_false_silences_delivery(self) -> None:
        with listening(ship), override_settings(OUTBOX={"ENABLED": False}):
            with immediate_delivery(), self.captureOnCommitCallbacks(execute=True) as callbacks:
                place()
            assert callbacks == []
            assert shipped() == 0
            assert_event_written(PLACED, payload={"sku": "teapot"})

    def test_no_worker_can_see_what_is_written_here(self) -> None:
        refused = pytest.raises(RuntimeError, match=r"no worker sees.*TransactionTestCase")
        with refused, running_worker():
            pytest.fail("entered")


class InATransactionTestCase(TransactionTestCase):
    def test_at_the_commit(self) -> None:
        threads: list[int] = []
        with listening(lambda event: threads.append(threading.get_ident())), immediate_delivery():
            with transaction.atomic():
                outbox.write(PLACED)
                outbox.write(PLACED)
                assert threads == []
            assert threads == [threading.get_ident()] * 2
        assert statuses() == {"DONE": 2}

    def test_what_a_listener_writes_is_delivered_too(self) -> None:
        depth: list[int] = []
        deepest: list[int] = []

        def chain(event: outbox.Event) -> None:
            depth.append(1)
            deepest.append(len(depth))
            if event.payload < 20:
                with transaction.atomic():
                    outbox.write(PLACED, event.payload + 1)
            depth.pop()

        with listening(chain), immediate_delivery(), transaction.atomic():
            outbox.write(PLACED, 1)
        assert statuses() == {"DONE": 20}
        assert max(deepest) == 1  # one after another, not nested

    def test_beside_a_worker_it_is_refused(self) -> None:
        refused = pytest.raises(RuntimeError, match="delivers the events of 'default'")
        with running_worker(), refused, immediate_delivery():
            pytest.fail("entered")
        assert hot_queues.by_alias == {}


# -- real workers ----------------------------------------------------------------------------------


@outside_alone
def test_w23_write_wait_for_the_fact_and_assert() -> None:
    with listening(ship), running_worker() as worker, capture_events() as events:
        assert worker.alias == "default"
        event_id = place()
        wait_until(shipped, what="a shipment")
        wait_until(lambda: row(event_id).status == Status.DONE)
    assert assert_event_written(PLACED, among=events).payload == {"sku": "teapot"}
    assert [each.name for each in threading.enumerate() if each.name.startswith("outbox-")] == []


@outside_alone
def test_a_listener_that_does_not_end_fails_the_test(settings: Any) -> None:
    settings.OUTBOX = {"DRAIN_TIMEOUT": 0.05}
    begun, gate = threading.Event(), threading.Event()

    def stuck(event: outbox.Event) -> None:
        begun.set()
        gate.wait(30)

    with listening(stuck):
        with pytest.raises(AssertionError, match="a listener still runs"), running_worker():
            place()
            assert begun.wait(30)
        gate.set()


def test_waiting_has_a_deadline() -> None:
    answers = iter([0, "", 7])
    assert wait_until(lambda: next(answers)) == 7
    with pytest.raises(AssertionError, match=r"the parcel was still None after 0\.03 s"):
        wait_until(lambda: None, within=0.03, what="the parcel")


# -- the plugin ------------------------------------------------------------------------------------

# Each project here has its own SQLite database.
# Load the plugin by its module, whether or not the package's entry points are installed.
PLUGIN = ("-p", "no:django_outbox", "-p", "django_outbox.pytest_plugin", "-p", "no:randomly")

PROJECT = """
SECRET_KEY = "x"
DATABASES = {"default": {
    "ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "TEST": {"NAME": "test.sqlite3"},
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode=WAL"},
}}
INSTALLED_APPS = ["django_outbox"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Create a Django project with its own test suite."""
    pytester.makepyfile(project_settings=PROJECT)
    pytester.makeini("[pytest]\nDJANGO_SETTINGS_MODULE = project_settings\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{pytester.path}")
    for name in ("DJANGO_SETTINGS_MODULE", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return pytester


FIXTURES = """
import pytest
from django.db import transaction
import django_outbox as outbox
from django_outbox.testing import assert_event_written, wait_until

seen = []
outbox.listener("order.placed")(lambda event: seen.append(event.payload))

@pytest.mark.django_db
def test_events(outbox_events):
    with transaction.atomic():
        outbox.write("order.placed", {"n": 1})
    assert [each.payload for each in outbox_events] == [{"n": 1}]

@pytest.mark.django_db
def test_they_are_this_tests_own(outbox_events):
    assert outbox_events == []

def test_worker(outbox_worker, outbox_events):
    with transaction.atomic():
        outbox.write("order.placed", {"n": 2})
    wait_until(lambda: seen == [{"n": 2}])
    assert_event_written("order.placed", among=outbox_events)

def test_without_a_database(outbox_events):
    assert not outbox_events
"""


LEAKS = """
import threading, time
import pytest
import django_outbox as outbox

workers = []

@pytest.fixture(scope="module")
def shared(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock(), outbox.Worker() as worker:
        yield worker

def test_a_worker_of_the_module_is_not_mine(shared):
    pass

def test_nor_mine(shared):
    shared.stop()

@pytest.mark.django_db(transaction=True)
def test_leaks():
    workers.append(outbox.Worker())
    workers[0].start()

@pytest.mark.django_db(transaction=True)
def test_the_next_is_not_blamed():
    workers[0].stop()

@pytest.mark.django_db(transaction=True)
def test_tidy():
    with outbox.Worker():
        pass

def test_a_thread_of_somebody_else():
    threading.Thread(target=time.sleep, args=(0.2,), name="mine").start()
"""


def test_the_fixtures_work_and_a_leaked_worker_fails_its_test(project: pytest.Pytester) -> None:
    project.makepyfile(test_fixtures=FIXTURES, test_leaks=LEAKS)
    done = project.runpytest_subprocess(*PLUGIN, "-rA")
    done.assert_outcomes(passed=10, errors=1)
    done.stdout.fnmatch_lines(["A worker or a thread of it is still running: outbox-default-*"])
    done.stdout.fnmatch_lines(["ERROR *::test_leaks*"])


# Runs every sample of the how-to as a project's own test suite.
def test_the_samples_of_the_how_to(project: pytest.Pytester) -> None:
    project.makepyfile(
        project_settings=PROJECT.replace('["django_outbox"]', '["django_outbox", "shop"]')
    )
    shop = project.mkpydir("shop")
    (shop / "models.py").write_text(SHOP_MODELS)
    project.mkpydir("shop/tests")
    found = samples.files("how-to/testing.md")
    assert {title.partition("/")[0] for title in found} == {"shop"}
    for title, code in found.items():
        (project.path / title).write_text(code)
    orders = shop / "orders.py"
    orders.write_text(f"from shop.models import Order, Stock\n{orders.read_text()}")
    tests = [title for title in found if "/tests/" in title]
    project.runpytest_subprocess(*PLUGIN, *tests).assert_outcomes(passed=14)


SHOP_MODELS = """
from django.db import models

class Order(models.Model):
    sku = models.CharField(max_length=20)

class Stock(models.Model):
    sku = models.CharField(max_length=20)
"""


@pytest.fixture(autouse=True)
def no_queue_left() -> Iterator[None]:
    yield
    assert hot_queues.by_alias == {}


@both
def test_time_moves_retries_and_each_listeners_own(outside: bool) -> None:
    calls: list[str] = []

    def slow(event: outbox.Event) -> outbox.Defer | None:
        calls.append("slow")
        return outbox.Defer(3000) if calls.count("slow") == 1 else None

    def quick(event: outbox.Event) -> outbox.Defer | None:
        calls.append("quick")
        return outbox.Defer(600) if calls.count("quick") == 1 else None

    with listening(slow, name="slow"), listening(quick, name="quick"):
        place()
        assert drain() == 2
        pass_time(599)
        assert drain() == 0
        pass_time(2)
        assert drain() == 1
        assert sorted(calls) == ["quick", "quick", "slow"]
        pass_time(2400)
        assert drain() == 1
    assert sorted(calls) == ["quick", "quick", "slow", "slow"]
    assert statuses() == {"DONE": 2}


@both
def test_time_moves_ages(outside: bool) -> None:
    """``pass_time`` also applies to UNROUTABLE_GRACE, the retentions and the inbox."""
    event_id = place()
    assert drain() == 1
    assert row(event_id).status == Status.NEW
    with transaction.atomic(), inbox.once("bank", 1):
        pass
    pass_time(601)
    with pytest.raises(AssertionError, match="No listener for event type"):
        drain()
    insert(status=Status.DONE, due=None, done_at=now())
    pass_time(timedelta(days=8))
    assert OutboxEvent.objects.purge() == 1
    assert OutboxInbox.objects.purge() == 1
