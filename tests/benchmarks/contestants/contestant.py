"""What is asked of each: enqueue in a Django transaction, and run its own worker."""

from __future__ import annotations

from typing import Any, ClassVar

from django.apps import apps
from django.db import connection

from tests.benchmarks.witness import Testifying


class Contestant:
    """One of them. It is made when Django is set up, and registers what its worker calls."""

    apps: ClassVar[tuple[str, ...]] = ()  # INSTALLED_APPS, also by label
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._testifying = Testifying()

    def hear(self, number: int) -> None:
        """Be called by the worker: count a job of a backlog (0), or tell of a numbered one."""
        if number:
            self._testifying.tell(number)
        else:
            self._testifying.count()

    def enqueue(self, number: int) -> None:
        """Enqueue a job in the transaction that is open."""
        raise NotImplementedError

    def enqueue_many(self, count: int) -> None:
        """Enqueue jobs of a backlog, in whatever way is quick."""
        for _ in range(count):
            self.enqueue(0)

    def work(self) -> None:
        """Run the worker until the process is told to end."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what the migrations do not make."""

    def clear(self) -> None:
        """Empty the tables."""
        names = {"tests.benchmarks.contestants", *self.apps}
        models = [
            model
            for config in apps.get_app_configs()
            if config.name in names
            for model in config.get_models()
        ]
        self.truncate(*(model._meta.db_table for model in models if not model._meta.proxy))

    def truncate(self, *tables: str) -> None:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(f"TRUNCATE {', '.join(tables)} CASCADE")
                return
            for table in tables:
                cursor.execute(f"DELETE FROM {table}")
