"""The pages about migration: each step, and the move of what is pending, with the real packages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest
from django import VERSION
from django.apps import apps
from django.contrib import admin
from django.core.management import call_command
from django.db import connection
from django.test import modify_settings, override_settings

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.migration_samples import Shop, command
from tests.table import now
from tests.testapp.models import Order

QUEUES = "how-to/migrate-from-a-task-queue.md"
CELERY = f"{QUEUES}#Celery and `on_commit`"
TASKS = f"{QUEUES}#django-tasks-db"
PROCRASTINATE = f"{QUEUES}#procrastinate"
PARENTS = "how-to/come-from-another-outbox.md"

pytestmark = pytest.mark.django_db(transaction=True)


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


# --- Celery --------------------------------------------------------------------------------------


@pytest.fixture
def celery(shop: Shop) -> Iterator[Any]:
    """Lend a Celery app with a broker in memory and a queue of its own."""
    celery = import_module("celery")
    app = celery.Celery("shop", broker="memory://", fixups=[])
    app.conf.task_default_queue = f"shop-{uuid4()}"
    state = import_module("celery._state")
    finalizers = {*state._on_app_finalizers}
    yield app
    app.close()
    state._on_app_finalizers.clear()  # else the next app gets the shared task of this test, too
    state._on_app_finalizers.update(finalizers)
    state._tls.current_app = None
    import_module("kombu").pools.reset()


def messages(celery: Any) -> list[Any]:
    """Take the messages of the queue, without acknowledging them."""
    found = []
    with celery.connection_for_read() as link:
        queue = celery.amqp.queues[celery.conf.task_default_queue](link.default_channel)
        while message := queue.get(accept=["json"]):
            found.append(message)
        for message in found:
            message.requeue()
    return found


def celery_listener(shop: Shop) -> None:
    shop.add(
        "shop.parcels", samples.run(CELERY, only="def book(order_id)", __name__="shop.parcels")
    )
    shop.add("shop.listeners", samples.run(CELERY, only="parcels.book(event.payload"))


def celery_task(shop: Shop) -> Any:
    both = samples.run(CELERY, only="    parcels.book(order_id)", __name__="shop.tasks")
    return shop.add("shop.tasks", both)


@pytest.fixture
def move_celery(shop: Shop, celery: Any) -> Callable[[], str]:
    """Lend the command of the page that empties a queue of Celery."""
    celery_listener(shop)
    celery_task(shop)
    module = shop.add("shop.move_celery", samples.run(CELERY, only="SimpleQueue"))
    return lambda: command(module, queue=celery.conf.task_default_queue)


def test_pending_messages_of_celery_move(
    shop: Shop, celery: Any, move_celery: Callable[[], str]
) -> None:
    first, second = (Order.objects.create(sku=sku).pk for sku in ("teapot", "kettle"))
    task = celery.tasks["shop.tasks.book_parcel"]
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    task.delay(first)
    task.apply_async(kwargs={"order_id": second}, eta=tomorrow)
    committed = []  # events, at each acknowledgement
    message = import_module("kombu.message").Message
    ack = message.ack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            message, "ack", lambda self: (committed.append(OutboxEvent.objects.count()), ack(self))
        )
        assert move_celery() == "moved 2, kept 0"
    assert committed == [1, 2]
    assert messages(celery) == []
    assert move_celery() == "moved 0, kept 0"
    rows = OutboxEvent.objects.order_by("event_id")
    assert [row.event_type for row in rows] == ["celery.book_parcel"] * 2
    assert rows[1].deliver_at == pytest.approx(tomorrow, abs=timedelta(milliseconds=1))
    assert outbox.drain() == 1
    assert booked(shop) == ["teapot"]


def test_what_the_move_does_not_know_stays_in_celery(
    celery: Any, move_celery: Callable[[], str]
) -> None:
    task = celery.tasks["shop.tasks.book_parcel"]
    task.apply_async((1,), expires=600)
    task.apply_async((2,), link=task.si(3))  # part of a workflow
    celery.send_task("shop.tasks.other", (4,))
    task.delay(5)
    assert move_celery() == "moved 1, kept 3"
    kept = sorted((each.headers["task"], each.decode()[0]) for each in messages(celery))
    assert kept == [(task.name, [1]), (task.name, [2]), ("shop.tasks.other", [4])]
    [row] = OutboxEvent.objects.all()
    assert json.loads(row.payload) == {"order": 5}


def test_a_message_that_comes_again_is_recognized(
    celery: Any, move_celery: Callable[[], str]
) -> None:
    """As after a kill between the commit and the acknowledgement."""
    for _ in range(2):
        celery.send_task("shop.tasks.book_parcel", (1,), task_id="t-1")
    assert move_celery() == "moved 2, kept 0"
    assert OutboxEvent.objects.get().unique_key == "celery:t-1"


@contextmanager
def installed(app: str) -> Iterator[None]:
    """Add an application, and take what it registered with the admin away with it."""
    with modify_settings(INSTALLED_APPS={"append": app}):
        try:
            yield
        finally:
            models = [each for each in apps.get_models() if admin.site.is_registered(each)]
            admin.site.unregister([m for m in models if m.__module__.startswith(app)])


# --- django-tasks-db -----------------------------------------------------------------------------


@pytest.fixture
def results(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lend the model of django-tasks-db, with its table, and both backends as on the page."""
    framework = "django.tasks" if VERSION >= (6,) else "django_tasks"
    pytest.importorskip(framework)
    import_module("django_tasks_db")
    for name in ("", ".exceptions"):
        module = import_module(framework + name)
        monkeypatch.setitem(sys.modules, f"django.tasks{name}", module)
    with installed("django_tasks_db"), override_settings(TASKS=tasks_settings("both")):
        model = import_module("django_tasks_db.models").DBTaskResult
        with connection.schema_editor() as editor:
            editor.create_model(model)
        try:
            yield model
        finally:
            with connection.cursor() as cursor:
                for statement in sql(TASKS).split(";\n"):
                    if statement.strip():
                        cursor.execute(statement)
    assert model._meta.db_table not in connection.introspection.table_names()


def tasks_settings(stage: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(samples.blocks(TASKS)[f"settings.py ({stage})"], names)
    found: dict[str, Any] = names["TASKS"]
    return found


def tasks_both(shop: Shop) -> Any:
    both = samples.run(
        TASKS, only="@task\ndef book_parcel(order_id):\n    w", __name__="shop.tasks"
    )
    return shop.add("shop.tasks", both)


def tasks_view(shop: Shop) -> Any:
    view = samples.run(TASKS, only="= book_parcel.enqueue(order.pk)\n    return")
    return shop.add("shop.views", view)


def test_after_the_cut_over_old_results_are_still_found(shop: Shop, results: Any) -> None:
    tasks_both(shop)
    views = tasks_view(shop)
    _, old = views.place_order("kettle")
    after = samples.run(TASKS, only='@task(backend="outbox")', __name__="shop.tasks")
    shop.add("shop.tasks", after)
    views = tasks_view(shop)
    _, new = views.place_order("teapot")
    find = shop.add("shop.results", samples.run(TASKS, only="def find_result")).find_result
    left = shop.add("shop.status", samples.run(TASKS, only="def tasks_left")).tasks_left
    assert (results.objects.count(), left()) == (1, 1)
    outbox.drain()
    assert left() == 0
    assert booked(shop) == ["teapot"]
    assert [find(each.id).status for each in (old, new)] == ["READY", "SUCCESSFUL"]
    missing = import_module("django.tasks.exceptions").TaskResultDoesNotExist
    with pytest.raises(missing):
        find(str(uuid4()))


def test_rows_are_renamed_for_the_alias_that_stays(shop: Shop, results: Any) -> None:
    tasks = tasks_both(shop)
    id_ = tasks.book_parcel.enqueue(1).id
    new = tasks.book_parcel.using(backend="outbox").enqueue(2).id
    with override_settings(TASKS=tasks_settings("after")):
        rename = shop.add("shop.rename", samples.run(TASKS, only="def rename_rows")).rename_rows
        assert rename() == 1
        backends = import_module("django.tasks").task_backends
        assert backends["old"].get_result(id_).status == "READY"
        ended = now() - timedelta(days=15)
        results.objects.update(status="SUCCESSFUL", finished_at=ended)
        call_command("prune_db_task_results", "--backend", "old", verbosity=0)
        assert not results.objects.exists()
        assert backends["outbox"].get_result(new).status == "READY"


# --- procrastinate -------------------------------------------------------------------------------


def parcels(shop: Shop) -> None:
    block = samples.run(PROCRASTINATE, only="def book(order_id)", __name__="shop.parcels")
    shop.add("shop.parcels", block)


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
