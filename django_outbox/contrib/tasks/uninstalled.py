"""Stand-in tasks backend that reports that the app is not in INSTALLED_APPS."""

# mypy: disable-error-code="misc,unused-ignore"
from __future__ import annotations

from typing import Any, NoReturn

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from .framework import BaseTaskBackend


class OutboxBackend(BaseTaskBackend):
    """Accepts every ``@task``, so that the checks can run, but refuses to enqueue one."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Report E053 (the app is not installed); Django's tasks framework calls this."""
        return [Error(self._fault, hint=HINT, id="django_outbox.E053")]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> NoReturn:
        raise ImproperlyConfigured(f"{self._fault} {HINT}")

    def get_result(self, result_id: str) -> NoReturn:
        raise ImproperlyConfigured(f"{self._fault} {HINT}")

    @property
    def _fault(self) -> str:
        return f'TASKS[{self.alias!r}] names the outbox, but the app "django_outbox" is missing.'


HINT = 'Add "django_outbox" to INSTALLED_APPS and run migrate.'
