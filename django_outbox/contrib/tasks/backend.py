"""The tasks backend, which writes tasks as events, and the listener that runs them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from typing import Any

import msgspec
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ... import hooks, transactions
from ...conf import current
from ...delivery.call import ends_drain
from ...delivery.decide import decide
from ...events import Event, as_utc
from ...exceptions import OutboxError
from ...listeners import registry
from ...listeners.callables import qualified_name
from ...listeners.outcomes import UNSETTLED, Dead, Defer, Status
from ...listeners.retry import Fixed, RetryPolicy
from ...models import OutboxEvent, OutboxStream
from ...models.fields import DatabaseNow
from ...sql import dialect_of
from ...writing.write import write
from .framework import (
    BaseTaskBackend,
    CoalescedTask,
    InvalidTask,
    InvalidTaskBackend,
    TaskResultStatus,
    api,
    base,
    exceptions,
    normalize_json,
    signals,
)
from .runs import Call, Error, Runs, runs_of

logger = logging.getLogger("django_outbox")

PREFIX = "task:"  # of the event type; the task's dotted path follows
TITLE = f"{PREFIX}*"  # of the listener that runs them
OPTIONS = ("database", "modules", "retry")


class OutboxBackend(BaseTaskBackend):  # type: ignore[misc, unused-ignore]
    """Enqueues tasks in the caller's transaction; they run at least once, with optional retries.

    OPTIONS: ``database`` (alias; default: the router's for ``OutboxEvent``), ``retry`` (policy,
    dict or dotted path as in ``OUTBOX["RETRY"]``; default: one run, as with Django's own
    backends), ``modules`` (packages outside of INSTALLED_APPS whose tasks may be run).

    Raises ``InvalidTaskBackend`` for unknown or invalid options.

    Example::

        TASKS = {
            "default": {
                "BACKEND": "django_outbox.contrib.tasks.OutboxBackend",
                "OPTIONS": {"retry": {"policy": "exponential"}},
            }
        }
    """

    task_class = CoalescedTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = False  # events are claimed by due time

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, dict(params))
        if unknown := sorted(set(self.options) - {*OPTIONS}):
            raise InvalidTaskBackend(
                f"TASKS[{alias!r}]['OPTIONS'] has {unknown}; expected some of {[*OPTIONS]}."
            )
        self.retry = self._policy(self.options.get("retry"))
        self.modules: tuple[str, ...] = tuple(self.options.get("modules", ()))

    def _policy(self, option: Any) -> RetryPolicy:
        if option is None:
            return Fixed(max_attempts=1)
        try:
            return hooks.retry_from(option, f"TASKS[{self.alias!r}]['OPTIONS']['retry']")
        except ImproperlyConfigured as error:
            raise InvalidTaskBackend(str(error)) from error

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Write the task as an event, in the caller's transaction or else in a new one."""
        self.validate_task(task)
        try:
            self._load_task(task.module_path)
        except LookupError as error:
            raise InvalidTask(str(error)) from error
        normalized: Any = normalize_json([list(args), dict(kwargs)])
        call = Call(
            args=normalized[0],
            kwargs=normalized[1],
            backend=self.alias,
            queue=task.queue_name,
            run_after=task.run_after and as_utc(task.run_after),
        )
        more = {"available_at": task.run_after} if task.run_after else {}
        if (coalesce := getattr(task, "coalesce", None)) is not None:  # other backends' have none
            more["coalesce"] = f"{task.module_path} {coalesce}"  # one listener runs all tasks
        event = Event(
            event_type=PREFIX + task.module_path, payload=msgspec.to_builtins(call), **more
        )
        connection = self._connection
        is_autocommit = not transactions.is_open(connection)
        with transaction.atomic(using=connection.alias) if is_autocommit else nullcontext():
            event_id = write(event, using=connection.alias)
        result = self._result(task, call, event, id=event_id)
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the result of a task, as stored in the table.

        Raises ``TaskResultDoesNotExist`` if there is no row of this backend with this id, and
        ``TaskResultMismatch`` if this process does not have the task.
        """
        rows = OutboxEvent.objects.using(self._connection.alias).annotate(now=DatabaseNow())
        mine = Q(listener=TITLE) | Q(listener=None)  # others may listen to tasks, too
        row: Any = rows.of_event(result_id).filter(mine, event_type__startswith=PREFIX).first()
        call = row and msgspec.json.decode(row.payload, type=Call)
        if row is None or call.backend != self.alias:
            raise exceptions.TaskResultDoesNotExist(result_id)
        try:
            task = self._load_task(row.event_type.removeprefix(PREFIX))
        except LookupError as error:
            raise exceptions.TaskResultMismatch(str(error)) from error
        runs, status = runs_of(row.result), RESULT_STATUSES[Status(row.status)]
        if row.locked_by and row.available_at and row.available_at > row.now:
            status = TaskResultStatus.RUNNING
            runs.start(row.locked_by, row.locked_at)
        if status == TaskResultStatus.FAILED and not runs.errors:  # never ran, or its worker died
            runs.errors.append(Error(qualified_name(OutboxError), row.last_error or ""))
        return self._result(task, call, row, runs, status=status, finished_at=row.done_at)

    def run(self, event: Event) -> Dead | Defer | None:
        """Run the task of an event, and store its result with the event."""
        try:
            task = self._load_task(event.event_type.removeprefix(PREFIX))
        except LookupError as error:
            return self._defer_unknown(event, error)
        rows = OutboxEvent.objects.using(self._connection.alias)
        row: Any = rows.of_event(event.event_id).get(listener=TITLE)
        call, runs = event.payload_as(Call), runs_of(row.result)
        owner = row.locked_by or self._owner_of_stream(row.stream)
        runs.start(owner, row.locked_at or row.created_at)
        result = self._result(task, call, row, runs, status=TaskResultStatus.RUNNING)
        signals.task_started.send(type(self), task_result=result)
        try:
            context: list[Any] = (
                [base.TaskContext(task_result=result)] if task.takes_context else []
            )
            value = task.call(*context, *result.args, **result.kwargs)
            runs.return_value = normalize_json(value)
            text = runs.text
        except BaseException as error:
            if ends_drain(error):  # the event is released as if it had not been started
                raise
            runs.add_error(error)
            runs.return_value = None
            self._store_runs(row, runs.text)
            if self._is_final(error, event):
                self._finish(result, runs, TaskResultStatus.FAILED)
            raise
        self._store_runs(row, text)
        self._finish(result, runs, TaskResultStatus.SUCCESSFUL)
        return None

    # -- find the task -----------------------------------------------------------------------------

    def _load_task(self, path: str) -> Any:
        """Return the task that a row names; ``LookupError`` for anything else.

        A row must not cause arbitrary imports. Allowed are modules of installed apps and of the
        option ``modules``, and modules that are already imported. Only tasks are called.
        """
        module, _, name = path.rpartition(".")
        known = (*self.modules, *(each.name for each in apps.get_app_configs()))
        if module not in sys.modules and not any(
            f"{module}.".startswith(f"{each}.") for each in known
        ):
            raise LookupError(
                f"The task {path!r} is in no installed app. Add its package to INSTALLED_APPS, or "
                f"to TASKS[{self.alias!r}]['OPTIONS']['modules']."
            )
        try:
            found = getattr(import_module(module), name, None)
        except ImportError as error:
            raise LookupError(
                f"The module of the task {path!r} cannot be imported: {error}"
            ) from error
        if not isinstance(found, base.Task) or found.module_path != path:
            raise LookupError(
                f"{path!r} is not a task. Expected a function decorated with @task there."
            )
        return found

    def _defer_unknown(self, event: Event, error: LookupError) -> Dead | Defer:
        """Defer until UNROUTABLE_GRACE (seconds) is over: the next deployment may know the task."""
        grace = current().UNROUTABLE_GRACE
        now = dialect_of(self._connection).clock()
        age = (now - (event.first_due_at or now)).total_seconds()
        return Dead(str(error)) if age >= grace else Defer(min(grace - age, grace / 20 + 1))

    # -- results -----------------------------------------------------------------------------------

    def _result(
        self,
        task: Any,
        call: Call,
        stored: Event | OutboxEvent,
        runs: Runs | None = None,
        *,
        id: str | None = None,  # noqa: A002 - if a hook has changed it
        status: Any = TaskResultStatus.READY,
        finished_at: datetime | None = None,
    ) -> Any:
        runs = runs or Runs()
        result: Any = base.TaskResult(
            task=replace(task, queue_name=call.queue, run_after=call.run_after, backend=self.alias),
            id=id or stored.event_id,
            status=status,
            enqueued_at=stored.occurred_at,
            started_at=runs.started_at,
            finished_at=finished_at,
            last_attempted_at=runs.last_attempted_at,
            args=call.args,
            kwargs=call.kwargs,
            backend=self.alias,
            worker_ids=[*runs.worker_ids],
            errors=[],
        )
        self._fill(result, runs)
        return result

    def _fill(self, result: Any, runs: Runs) -> None:
        result.errors[:] = [base.TaskError(**msgspec.to_builtins(each)) for each in runs.errors]
        object.__setattr__(result, "_return_value", runs.return_value)

    def _finish(self, result: Any, runs: Runs, status: Any) -> None:
        self._fill(result, runs)
        object.__setattr__(result, "status", status)
        object.__setattr__(result, "finished_at", dialect_of(self._connection).clock())
        signals.task_finished.send(type(self), task_result=result)

    def _store_runs(self, row: Any, text: str) -> None:
        """Store the runs if this worker still holds the event; the worker settles it later."""
        leased = OutboxEvent.objects.using(self._connection.alias).filter(
            pk=row.pk, attempts=row.attempts, locked_by=row.locked_by, status__in=UNSETTLED
        )
        try:
            leased.update(result=text)
        except DatabaseError:  # the task broke the connection; last_error has the cause
            logger.exception(
                "result not kept event_id=%s event_type=%s listener=%r",
                row.event_id,
                row.event_type,
                row.listener,
            )

    def _is_final(self, error: BaseException, event: Event) -> bool:
        limit = current().MAX_ATTEMPTS
        decision = decide(
            error, attempts=event.attempts, policy=self.retry, max_attempts=limit, age=0.0
        )
        return decision.status is Status.DEAD

    def _owner_of_stream(self, stream: str | None) -> str:
        streams = OutboxStream.objects.using(self._connection.alias).filter(pk=stream or "")
        return str(streams.values_list("locked_by", flat=True).first() or "")

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self.options.get("database") or router.db_for_write(OutboxEvent)]


RESULT_STATUSES = {
    Status.NEW: TaskResultStatus.READY,
    Status.RETRY: TaskResultStatus.READY,
    Status.DONE: TaskResultStatus.SUCCESSFUL,
    Status.DEAD: TaskResultStatus.FAILED,
}


# -- the listener ----------------------------------------------------------------------------------

_running_backend: ContextVar[OutboxBackend | None] = ContextVar("task_backend", default=None)


class _BackendRetry:
    """The retry policy of the backend whose task has just run; each backend has its own."""

    def __repr__(self) -> str:
        return "as its backend says"  # shown in the lists of listeners (dashboard, command)

    @property
    def max_attempts(self) -> int | None:
        return self._policy.max_attempts

    def should_retry(self, exc: BaseException) -> bool:
        return self._policy.should_retry(exc)

    def delay(self, attempt: int) -> float:
        return self._policy.delay(attempt)

    @property
    def _policy(self) -> RetryPolicy:
        backend = _running_backend.get()
        return Fixed(max_attempts=1) if backend is None else backend.retry


@registry.listener(TITLE, retry=_BackendRetry())
def run_task(event: Event) -> Dead | Defer | None:
    """Run a task with the backend that enqueued it."""
    backend: Any = api.task_backends[event.payload_as(Call).backend]
    _running_backend.set(backend)
    return backend.run(event)  # type: ignore[no-any-return, unused-ignore]
