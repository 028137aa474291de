"""django-tasks-db: one task at a time; looks every 50 ms, for it has no other news."""

from __future__ import annotations

from django.core.management import call_command

from tests.benchmarks.payload import PAYLOAD

from .contestant import Contestant


class TasksDb(Contestant):
    apps = ("django_tasks_db",)
    settings = {"TASKS": {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}}

    def __init__(self) -> None:
        super().__init__()
        from . import background

        self._task = background.hear
        background.heard.append(self.hear)

    def enqueue(self, number: int) -> None:
        self._task.enqueue(number, PAYLOAD)

    def work(self) -> None:
        call_command("db_worker", interval=0.05, startup_delay=False, reload=False, verbosity=0)


CONTESTANT = TasksDb
