"""Django's tasks framework, a package before Django 6; and the class of the backend's tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from django import VERSION

FRAMEWORK = "django.tasks" if VERSION >= (6,) else "django_tasks"
try:
    api: Any = import_module(FRAMEWORK)
except ModuleNotFoundError as error:
    raise ImportError(
        "Before Django 6 tasks need the package django-tasks. "
        "Run pip install 'django-transactional-outbox[tasks]'."
    ) from error
base, exceptions, signals = (
    import_module(f"{FRAMEWORK}.{each}") for each in ("base", "exceptions", "signals")
)
BaseTaskBackend: Any = import_module(f"{FRAMEWORK}.backends.base").BaseTaskBackend
TaskResultStatus = base.TaskResultStatus
utils = import_module("django.utils.json" if VERSION >= (6,) else "django_tasks.utils")
normalize_json = utils.normalize_json
# django-tasks up to 0.12 has other names.
InvalidTask: Any = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
InvalidTaskBackend: Any = (
    getattr(exceptions, "InvalidTaskBackend", None) or exceptions.InvalidTaskBackendError
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoalescedTask(base.Task):  # type: ignore[misc, name-defined, unused-ignore]
    """A task of the backend: of those that wait with the same ``coalesce``, the newest runs."""

    coalesce: str | None = None

    def using(self, *, coalesce: str | None = None, **changes: Any) -> Any:
        changed = base.Task.using(self, **changes)
        return changed if coalesce is None else replace(changed, coalesce=coalesce)
