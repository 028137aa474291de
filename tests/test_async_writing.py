"""Writing from async code: ``awrite``, and the unit of work under ``sync_to_async``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.test import AsyncClient, override_settings
from django.urls import path

from django_outbox import (
    DuplicateEvent,
    Event,
    InvalidEvent,
    NoActiveTransaction,
    awrite,
    awrite_many,
    write,
    write_many,
)
from django_outbox.models import OutboxEvent
from tests import samples
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


class Undone(Exception):
    """Raised by the business code."""


def stored() -> list[str]:
    return [*OutboxEvent.objects.order_by("pk").values_list("event_type", flat=True)]


def in_async(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run async code as a sync server does, with this thread as the thread-sensitive one."""

    async def run() -> Any:
        return await work()

    return async_to_sync(run)()


def test_awrite_writes_in_the_transaction_of_the_sync_code_that_called() -> None:
    with transaction.atomic():
        event_id = in_async(lambda: awrite("x", {"n": 1}, tenant_id="t"))
        Order.objects.create(sku="tea")
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.payload, row.tenant_id) == (event_id, '{"n":1}', "t")


@pytest.mark.parametrize(
    "call",
    [lambda: awrite("x"), lambda: awrite_many([Event(event_type="x")])],
    ids=["awrite", "awrite_many"],
)
def test_without_a_transaction_it_is_an_error(call: Callable[[], Awaitable[Any]]) -> None:
    with pytest.raises(NoActiveTransaction):
        in_async(call)
    assert stored() == []


def test_write_itself_cannot_be_called_on_the_event_loop() -> None:
    async def work() -> None:
        write("x")

    with transaction.atomic(), pytest.raises((NoActiveTransaction, SynchronousOnlyOperation)):
        in_async(work)
    assert stored() == []


def test_errors_are_those_of_write_and_poison_nothing() -> None:
    async def work() -> None:
        await awrite("x", unique_key="u")
        with pytest.raises(InvalidEvent):
            await awrite("")
        with pytest.raises(DuplicateEvent):
            await awrite("y", unique_key="u")

    with transaction.atomic():
        in_async(work)
        Order.objects.create(sku="goes on")
    assert stored() == ["x"]
    assert Order.objects.exists()


@pytest.mark.parametrize(
    ("twin", "of"), [(awrite, write), (awrite_many, write_many)], ids=["awrite", "awrite_many"]
)
def test_the_twins_take_what_their_originals_take(twin: Any, of: Any) -> None:
    assert inspect.signature(twin) == inspect.signature(of)
    assert iscoroutinefunction(twin)
    assert twin.__doc__


def test_a_unit_of_work_under_sync_to_async_needs_no_twin() -> None:
    @transaction.atomic
    def unit(fails: bool) -> None:
        Order.objects.create(sku="tea")
        write("x")
        if fails:
            raise Undone

    in_async(lambda: sync_to_async(unit)(False))
    with pytest.raises(Undone):
        in_async(lambda: sync_to_async(unit)(True))
    assert stored() == ["x"]
    assert Order.objects.count() == 1


def test_the_samples_of_the_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("shop.models")
    vars(models).update(Order=Order)
    monkeypatch.setitem(sys.modules, "shop.models", models)
    with samples.modules("how-to/write-events.md#Async code") as shop:
        urls = ModuleType("shop.urls")
        vars(urls).update(urlpatterns=[path("checkout", shop["shop.views"].checkout)])
        with override_settings(ROOT_URLCONF=urls):
            client = AsyncClient()
            answer = async_to_sync(client.post)("/checkout", {"sku": "tea"})
        order = Order.objects.get()
        assert answer.json() == {"order": order.pk}
        row = OutboxEvent.objects.get()
        assert (row.aggregate_id, row.payload) == (str(order.pk), '{"sku":"tea"}')
        event_id = shop["shop.orders"].place("cup")
        assert OutboxEvent.objects.get(pk=event_id).payload == '{"sku":"cup","shelf":5}'
