"""The pages about migration: each step, and the move of what is pending, with the real packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import modify_settings

import django_outbox as outbox
from tests import samples
from tests.testapp.models import Order

QUEUES = "how-to/migrate-from-a-task-queue.md"
CELERY = f"{QUEUES}#Celery and `on_commit`"
SHARED = f"{QUEUES}#Make the task idempotent"
PARENTS = "how-to/come-from-another-outbox.md"

pytestmark = pytest.mark.django_db(transaction=True)


class Carrier:
    """The service that books parcels; it fails while ``error`` is set, and remembers its calls."""

    def __init__(self) -> None:
        self.booked: list[tuple[Any, str | None]] = []
        self.error: Exception | None = None

    def book(self, sku: Any, idempotency_key: str | None = None) -> None:
        if self.error:
            raise self.error
        self.booked.append((sku, idempotency_key))


class Shop:
    """The modules of a reader's project; a module that is added again replaces the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.carrier = Carrier()
        self._open: dict[str, ExitStack] = {}
        self._put("shop")
        self._put("shop.models", Order=Order)
        self._put("shop.clients", carrier=self.carrier)

    def add(self, name: str, block: AbstractContextManager[dict[str, Any]]) -> Any:
        """Make a module of a page's block, which ``samples.run`` lends, and return it."""
        self.remove(name)
        self._open[name] = ExitStack()
        return self._put(name, **self._open[name].enter_context(block))

    def remove(self, name: str) -> None:
        """Forget a module's listeners."""
        if stack := self._open.pop(name, None):
            stack.close()

    def close(self) -> None:
        for name in [*self._open]:
            self.remove(name)

    def _put(self, name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(names)
        self.monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        return module


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """Lend the shop that each page begins with."""
    found = Shop(monkeypatch)
    yield found
    found.close()


def sql(page: str) -> str:
    """Return the SQL block of a page."""
    text = samples.section(page)
    [found] = re.findall(r"^```(?:sql|postgresql)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


def booked(shop: Shop) -> list[Any]:
    return [sku for sku, _ in shop.carrier.booked]


def parcels(shop: Shop) -> None:
    shop.add("shop.parcels", samples.run(SHARED, __name__="shop.parcels"))


# --- Celery --------------------------------------------------------------------------------------


@pytest.fixture
def celery(shop: Shop) -> Iterator[Any]:
    """Lend a Celery app with a broker in memory and a queue of its own."""
    celery = import_module("celery")
    app = celery.Celery("shop", broker="memory://", fixups=[])
    app.conf.task_default_queue = f"shop-{uuid4()}"
    state = import_module("celery._state")
    finalizers = {*state._on_app_finalizers}
    own = {each for each in finalizers if each.__module__ == "celery.app.builtins"}
    state._on_app_finalizers.intersection_update(own)  # samples share tasks of the same names
    yield app
    app.close()
    state._on_app_finalizers.clear()  # else the next app gets the shared task of this test, too
    state._on_app_finalizers.update(finalizers)
    state._tls.current_app = None
    import_module("kombu").pools.reset()


def celery_listener(shop: Shop) -> None:
    parcels(shop)
    shop.add("shop.listeners", samples.run(CELERY, only="parcels.book(event.payload"))


def celery_task(shop: Shop) -> Any:
    both = samples.run(CELERY, only="    parcels.book(order_id)", __name__="shop.tasks")
    return shop.add("shop.tasks", both)


@pytest.mark.parametrize("first", ["celery", "outbox"])
def test_celery_and_the_outbox_book_a_parcel_once(shop: Shop, celery: Any, first: str) -> None:
    celery_listener(shop)
    task = celery_task(shop).book_parcel
    block = samples.run(CELERY, only="transaction.on_commit(lambda: book_parcel")
    shop.add("shop.views", block)
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "delay", sent.append)
        order = sys.modules["shop.views"].place_order("teapot")
    runs: list[Callable[[], Any]] = [lambda: task(sent[0]), outbox.drain]
    for run in runs if first == "celery" else reversed(runs):
        run()
    assert shop.carrier.booked == [("teapot", f"order-{order.pk}")]


@contextmanager
def installed(app: str) -> Iterator[None]:
    """Add an application, and take what it registered with the admin away with it."""
    with modify_settings(INSTALLED_APPS={"append": app}):
        try:
            yield
        finally:
            models = [each for each in apps.get_models() if admin.site.is_registered(each)]
            admin.site.unregister([m for m in models if m.__module__.startswith(app)])


# --- the parents ---------------------------------------------------------------------------------


@pytest.fixture
def parents(shop: Shop) -> Iterator[Any]:
    """Lend the modules of the page about other outboxes."""
    models = {"INSTALLED_APPS": ["django_outbox", "shop", "reliable_outbox"]}
    shop.add("shop.settings", given(models))
    with samples.modules(PARENTS) as found:
        yield found


@contextmanager
def given(names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield names
