"""Task functions of the tests."""

from __future__ import annotations

import builtins
import os
from datetime import datetime
from typing import Any

from django_outbox.contrib.tasks.backend import api
from tests.testapp.models import Effect

task = api.task


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task()
async def add_later(a: int, b: int) -> int:
    return a + b


@task(queue_name="mail")
def note(phase: str) -> None:
    Effect.objects.create(event_id="task", pid=os.getpid(), phase=phase)


@task
def fail(kind: str = "ValueError") -> None:
    raise getattr(builtins, kind)(f"failed by {kind}")


@task(takes_context=True)
def tell(context: Any, word: str) -> dict[str, Any]:
    result = context.task_result
    return {
        "id": result.id,
        "attempt": context.attempt,
        "word": word,
        "status": result.status,
        "workers": result.worker_ids,
    }


@task
def complex_value() -> datetime:
    return datetime.now()  # noqa: DTZ005 - no JSON value, whichever zone


@task
def not_a_number() -> float:
    return float("nan")


@task(backend="retried", takes_context=True)
def fail_twice(context: Any) -> str:
    if context.attempt < 3:
        raise ConnectionError(f"attempt {context.attempt}")
    return f"attempt {context.attempt}"


def no_task() -> None:
    Effect.objects.create(event_id="no task", pid=os.getpid(), phase="called")
