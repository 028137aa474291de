"""The backend for Django's tasks: the behaviour of Django's own backends, and what a table adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django import VERSION
from django.db import transaction
from django.test import TestCase
from django.utils import timezone

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.testing import immediate_delivery, pass_time, running_worker, wait_until
from tests import samples
from tests.fleet import Fleet
from tests.surroundings import both, inside, outside_alone
from tests.table import claim, now, row, statuses
from tests.testapp.models import Effect, Order

pytest.importorskip(
    "django.tasks" if VERSION >= (6,) else "django_tasks",
    reason="Django's tasks come with Django 6, or with the package django-tasks",
)

from django_outbox.contrib.tasks import OutboxBackend
from django_outbox.contrib.tasks.backend import (
    PREFIX,
    InvalidTask,
    TaskResultStatus,
    api,
    exceptions,
    signals,
)
from tests.testapp import tasks

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
SUCCESSFUL, FAILED = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED


@contextmanager
def finished() -> Iterator[list[Any]]:
    """Collect the results that ``task_finished`` sends during the block."""
    told: list[Any] = []

    def note(sender: type, task_result: Any, **facts: Any) -> None:
        told.append(task_result)

    signals.task_finished.connect(note)
    try:
        yield told
    finally:
        signals.task_finished.disconnect(note)


def run(result: Any) -> Any:
    """Deliver what is due, refresh the result and return it."""
    outbox.drain()
    result.refresh()
    return result


# -- enqueueing ------------------------------------------------------------------------------------


@both
def test_enqueued_with_the_transaction_and_run_after_it(outside: bool) -> None:
    with transaction.atomic():
        Order.objects.create(sku="teapot")
        first = tasks.add.enqueue(1, b=2)
        second = tasks.add.enqueue(3)
    assert (first.status, first.args, first.kwargs) == (READY, [1], {"b": 2})
    assert (first.task, first.is_finished, first.attempts) == (tasks.add, False, 0)
    assert OutboxEvent.objects.count() == 2
    assert row(first.id).event_type == "task:tests.testapp.tasks.add"
    outbox.drain()
    assert [tasks.add.get_result(each.id).return_value for each in (first, second)] == [3, 3]


@both
def test_a_rollback_takes_the_task_along(outside: bool) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        result = tasks.note.enqueue("ghost")
        raise ZeroDivisionError
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.note.get_result(result.id)
    assert outbox.drain() == 0


@both
def test_outside_a_transaction_it_opens_its_own(outside: bool) -> None:
    """Users of tasks expect to enqueue without ``atomic()``, also in a TestCase."""
    result = tasks.add.enqueue(1, 2)
    assert run(result).return_value == 3


@outside_alone
def test_the_async_twins() -> None:
    async def enqueue() -> Any:
        return await tasks.add_later.aenqueue(1, b=2)

    result = async_to_sync(enqueue)()
    outbox.drain()
    found = async_to_sync(tasks.add_later.aget_result)(result.id)
    assert (found.status, found.return_value) == (SUCCESSFUL, 3)
    async_to_sync(result.arefresh)()
    assert result.return_value == 3


@both
def test_run_after_is_a_due_time(outside: bool) -> None:
    at = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(run_after=at).enqueue(1)
    assert row(result.id).deliver_at == at
    assert run(result).status == READY
    assert tasks.add.get_result(result.id).task.run_after == at
    pass_time(3601)
    assert run(result).status == SUCCESSFUL


@both
def test_of_tasks_that_wait_the_newest_of_a_slot_runs(outside: bool) -> None:
    index = tasks.add.using(coalesce="index")
    later = index.using(run_after=now() + timedelta(hours=1))
    assert (index.coalesce, later.coalesce) == ("index", "index")
    first, second = index.enqueue(1, 1), index.enqueue(2, 2)
    newest, other = later.enqueue(3, 3), tasks.add_later.using(coalesce="index").enqueue(4, 4)
    results = [run(each) for each in (first, second, newest, other)]
    assert {each.status for each in results} == {SUCCESSFUL}
    assert [each.return_value for each in results] == [None, None, 6, 8]


@both
def test_a_task_that_no_worker_has_taken_is_moved_and_cancelled(outside: bool) -> None:
    result = tasks.add.using(run_after=now() + timedelta(hours=1)).enqueue(1)
    assert outbox.reschedule(event_id=result.id, deliver_after=7200) == 1
    assert outbox.cancel(event_id=result.id) == 1
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        result.refresh()
    finished = run(tasks.add.enqueue(1))
    assert outbox.cancel(event_id=finished.id) == 0


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_on_another_database() -> None:
    result = tasks.add.using(backend="other").enqueue(2)
    assert OutboxEvent.objects.using("other").filter(pk=result.id).exists()
    outbox.drain(using="other")
    result.refresh()
    assert result.return_value == 2
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.add.get_result(result.id)


# -- results ---------------------------------------------------------------------------------------


@both
def test_success(outside: bool) -> None:
    result = tasks.tell.enqueue("hello")
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    run(result)
    assert (result.status, result.is_finished, result.errors) == (SUCCESSFUL, True, [])
    assert result.return_value == {
        "id": result.id,
        "attempt": 1,
        "word": "hello",
        "status": "RUNNING",
        "workers": result.worker_ids,
    }
    assert result.attempts == 1
    assert result.enqueued_at == row(result.id).occurred_at
    assert result.started_at == result.last_attempted_at
    assert result.started_at <= result.finished_at == row(result.id).done_at
    assert json.loads(row(result.id).result or "")["return_value"] == result.return_value


@both
@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit])
def test_failure_is_final_by_default(outside: bool, kind: type[BaseException]) -> None:
    result = tasks.fail.enqueue(kind.__name__)
    with finished() as told:
        run(result)
    assert [(each.id, each.status) for each in told] == [(result.id, FAILED)]
    assert (result.status, result.is_finished, result.attempts) == (FAILED, True, 1)
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    (error,) = result.errors
    assert error.exception_class is kind
    assert error.traceback.startswith("Traceback")
    assert error.traceback.endswith(f"{kind.__name__}: failed by {kind.__name__}\n")
    assert result.finished_at is not None
    assert str(row(result.id).last_error).startswith(f"{kind.__name__}: failed by")


@both
def test_an_interrupt_hands_the_task_back_and_leaves_no_run_behind(outside: bool) -> None:
    result = tasks.fail.enqueue("KeyboardInterrupt")
    with finished() as told, pytest.raises(KeyboardInterrupt):
        outbox.drain()
    result.refresh()
    assert (result.status, result.errors, result.worker_ids, told) == (READY, [], [], [])
    assert (row(result.id).attempts, row(result.id).locked_by) == (0, None)


@both
def test_retried_by_the_backends_own_policy(outside: bool) -> None:
    result = tasks.fail_twice.enqueue()
    run(result)
    assert (result.status, result.attempts, len(result.errors)) == (READY, 1, 1)
    assert row(result.id).status == 2
    run(result)
    assert run(result).return_value == "attempt 3"
    assert (result.status, result.attempts) == (SUCCESSFUL, 3)
    said = [each.traceback.rpartition(": ")[2].strip() for each in result.errors]
    assert said == ["attempt 1", "attempt 2"]
    assert len(result.worker_ids) == 3
    assert result.started_at < result.last_attempted_at


@both
def test_a_task_that_its_workers_did_not_survive(outside: bool) -> None:
    result = tasks.add.enqueue(1)
    OutboxEvent.objects.update(rescues=4, locked_by="lost")
    run(result)
    assert (result.status, result.attempts) == (FAILED, 0)
    assert result.errors[0].exception_class is outbox.OutboxError
    assert result.errors[0].traceback == "lost 5 workers"


@inside
def test_results_by_id() -> None:
    result = tasks.add.enqueue(1)
    assert tasks.add.get_result(result.id).id == result.id
    assert api.task_backends["default"].get_result(result.id).task == tasks.add
    with pytest.raises(exceptions.TaskResultMismatch, match="Task does not match"):
        tasks.note.get_result(result.id)
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.add.get_result("123")
    with transaction.atomic():
        plain = str(outbox.write("order.placed"))
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.add.get_result(plain)


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[tuple[str, Any, Any]]]:
    heard: list[tuple[str, Any, Any]] = []
    names = {name: getattr(signals, f"task_{name}") for name in ("enqueued", "started", "finished")}
    receivers = {}
    for name, signal in names.items():

        def receive(sender: type, task_result: Any, name: str = name, **facts: Any) -> None:
            assert sender is OutboxBackend
            heard.append((name, task_result.id, task_result.status))

        receivers[name] = receive
        signal.connect(receive)
    yield heard
    for name, signal in names.items():
        signal.disconnect(receivers[name])


@both
def test_djangos_signals_are_sent(outside: bool, told: list[Any]) -> None:
    result = tasks.add.enqueue(1)
    outbox.drain()
    failed = tasks.fail_twice.enqueue()
    outbox.drain()
    assert told == [
        ("enqueued", result.id, READY),
        ("started", result.id, RUNNING),
        ("finished", result.id, SUCCESSFUL),
        ("enqueued", failed.id, READY),
        ("started", failed.id, RUNNING),  # failed, and will be retried
    ]
    outbox.drain()
    outbox.drain()
    assert told[-1] == ("finished", failed.id, SUCCESSFUL)
    assert len(told) == 8
    dead = tasks.fail.enqueue()
    outbox.drain()
    assert told[-1] == ("finished", dead.id, FAILED)


# -- which functions may run -----------------------------------------------------------------------


def forge(path: str, backend: str = "default") -> str:
    """Write an event for any path, as any user with access to the table could."""
    payload = {"args": [], "kwargs": {}, "backend": backend, "queue": "default"}
    with transaction.atomic():
        return str(outbox.write(f"{PREFIX}{path}", payload))


@both
@pytest.mark.parametrize(
    "path",
    [
        "tests.testapp.tasks.no_task",
        "tests.testapp.tasks.add.func",
        "os.getcwd",
        "exit",
        "tests.testapp.nothing.here",
        "tests.testapp.tasks.missing",
        "this.s",
    ],
    ids=str,
)
def test_what_is_no_task_is_never_called(outside: bool, path: str, settings: Any) -> None:
    settings.OUTBOX = {"UNROUTABLE_GRACE": 600}
    event_id = forge(path)
    outbox.drain()
    assert statuses() == {"NEW": 1}  # a newer release may know the task
    with pytest.raises(exceptions.TaskResultMismatch):
        api.task_backends["default"].get_result(event_id)
    pass_time(601)
    outbox.drain()
    assert statuses() == {"DEAD": 1}
    assert path in (row(event_id).last_error or "")
    assert not Effect.objects.exists()
    assert "this" not in sys.modules  # the path's module must not be imported


@both
def test_a_payload_that_is_no_call_is_dead(outside: bool) -> None:
    with transaction.atomic():
        event_id = str(outbox.write(f"{PREFIX}tests.testapp.tasks.add", {"args": 1}))
    outbox.drain()
    assert "PayloadError" in (row(event_id).last_error or "")
    assert statuses() == {"DEAD": 1}


def test_modules_of_no_app_may_be_allowed() -> None:
    closed = OutboxBackend("mine", {})
    with pytest.raises(LookupError, match="INSTALLED_APPS"):
        closed._load_task("antigravity.fly")
    opened = OutboxBackend("mine", {"OPTIONS": {"modules": ["wsgiref"]}})
    with pytest.raises(LookupError, match="is not a task"):
        opened._load_task("wsgiref.util.guess_scheme")


@inside
def test_a_function_that_no_worker_would_find_is_refused_at_once() -> None:
    hidden = api.task()(tasks.no_task)  # its path leads to the plain function
    with pytest.raises(InvalidTask, match="is not a task"):
        hidden.enqueue()
    assert not OutboxEvent.objects.exists()


# -- with workers ----------------------------------------------------------------------------------


@outside_alone
def test_in_a_worker_process_that_nobody_told_of_the_tasks(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    """A worker process finds the backend and the functions through the settings alone."""
    fleet = Fleet(database_env, tmp_path, LISTENER_MODULE="nobody_has_such")
    exited = tasks.fail.enqueue("SystemExit")
    results = [tasks.note.enqueue("done"), tasks.add_later.enqueue(1, 2)]
    try:
        worker = fleet.start("--once")
        assert worker.wait(60) == 0, fleet.log.read_text()
    finally:
        fleet.kill_all()
    for each in results:
        each.refresh()
    assert [each.status for each in results] == [SUCCESSFUL] * 2
    assert Effect.objects.get().phase == "done"
    exited.refresh()
    assert (exited.status, exited.errors[0].exception_class) == (FAILED, SystemExit)


class InATestCase(TestCase):
    def test_immediately(self) -> None:
        with immediate_delivery(), self.captureOnCommitCallbacks(execute=True):
            result = tasks.add.enqueue(1, 2)
        result.refresh()
        assert result.return_value == 3


# -- the how-to ------------------------------------------------------------------------------------


@outside_alone
def test_162_the_samples_of_the_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django.tasks", api)  # as the page says for Django 5.2
    with samples.modules("how-to/migrate-from-a-task-queue.md#Run Django tasks") as made:
        shop = made["shop.views"]
        vars(shop).update(Order=Order)
        vars(made["shop.tasks"]).update(Order=Order)
        order, result = shop.place_order("teapot")
        assert outbox.drain() == 1
        assert shop.look(result.id) == {"order": order.pk, "sku": "teapot"}
        assert statuses() == {"DONE": 1, "NEW": 1}
        pass_time(86400)
        outbox.drain()
        assert statuses() == {"DONE": 2}


WITHOUT = """
import sys
sys.modules["django.tasks"] = sys.modules["django_tasks"] = None
"""
SETUP = """
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_outbox"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:",
                           "OPTIONS": {"transaction_mode": "IMMEDIATE"}}},
    TASKS={"default": {"BACKEND": "django_outbox.contrib.tasks.OutboxBackend"}})
import django
django.setup()
"""


def said_by(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=Path(__file__).parent.parent,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return done.stdout


CHECKED = """
from django.core.checks import run_checks
for each in run_checks(tags=["django_outbox"]):
    print(each.id, each.level, each.msg, each.hint)
try:
    from django_outbox.contrib.tasks import OutboxBackend
except ImportError as error:
    print(error)
"""


def test_without_tasks_nothing_breaks_and_the_extra_is_named() -> None:
    """The app starts on Django 5.2 without the package django-tasks."""
    hint = "Run pip install 'django-transactional-outbox[tasks]'."
    fault = "TASKS['default'] names the outbox, but before Django 6 nothing reads TASKS without"
    assert said_by(WITHOUT + SETUP + CHECKED).splitlines() == [
        f"django_outbox.E055 40 {fault} the package django-tasks. {hint}",
        f"Before Django 6 tasks need the package django-tasks. {hint}",
    ]


# -- the settings ----------------------------------------------------------------------------------


@outside_alone
def test_a_run_that_was_written_off_keeps_nothing_while_its_retry_runs(settings: Any) -> None:
    settings.OUTBOX = {"LISTENER_TIMEOUT": 2}
    gates = [threading.Event(), threading.Event()]
    threads: list[threading.Thread] = []

    def hold(sender: type, task_result: Any, **facts: Any) -> None:
        threads.append(threading.current_thread())
        gates[len(threads) - 1].wait(30)

    signals.task_started.connect(hold)
    try:
        with running_worker() as worker:
            result = tasks.add.using(backend="retried").enqueue(1)
            wait_until(lambda: len(threads) == 2)
            gates[0].set()
            wait_until(lambda: not threads[0].is_alive())
            assert row(result.id).result is None
            gates[1].set()
            wait_until(lambda: statuses() == {"DONE": 1})
            result.refresh()
    finally:
        for gate in gates:
            gate.set()
        signals.task_started.disconnect(hold)
    assert (result.return_value, result.worker_ids) == (1, [worker.id])


@both
def test_running_is_what_a_worker_holds(outside: bool) -> None:
    result = tasks.add.enqueue(1)
    claim("worker-1")
    result.refresh()
    assert (result.status, result.worker_ids) == (RUNNING, ["worker-1"])
    assert result.started_at == row(result.id).locked_at
    OutboxEvent.objects.update(available_at=now() - timedelta(seconds=1))
    result.refresh()
    assert result.status == READY  # the lease has ended, so its worker is lost
