"""``python -m tests.benchmarks.contestants MODULE VERB``, in the contestant's own environment.

``prepare`` makes its tables, ``work`` runs its worker, and ``serve`` answers lines of JSON, a
command and its numbers, with lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

if TYPE_CHECKING:
    from .contestant import Contestant

PART = 1000  # jobs of a backlog in one transaction


def main(module: str, verb: str) -> None:
    kind = import_module(f"tests.benchmarks.contestants.{module}").CONTESTANT
    settings.configure(
        SECRET_KEY="not a secret: a benchmark",
        DATABASES={"default": json.loads(os.environ["OUTBOX_BENCH_DATABASE"])},
        INSTALLED_APPS=["django.contrib.contenttypes", "tests.benchmarks.contestants", *kind.apps],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        LOGGING={
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"stderr": {"class": "logging.StreamHandler"}},
            "root": {"handlers": ["stderr"], "level": "ERROR"},
        },
        **kind.settings,
    )
    django.setup()
    contestant = kind()
    verbs: dict[str, Callable[[], None]] = {
        "prepare": lambda: prepare(contestant),
        "work": contestant.work,
        "serve": lambda: serve(contestant),
    }
    verbs[verb]()


def prepare(contestant: Contestant) -> None:
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)
    contestant.prepare()


def serve(contestant: Contestant) -> None:
    commands: dict[str, Callable[..., Any]] = {
        "write": write,
        "fill": fill,
        "send": send,
        "version": version,
    }
    for line in sys.stdin:
        name, *numbers = json.loads(line)
        print(json.dumps(commands[name](contestant, *numbers)), flush=True)


def version(contestant: Contestant) -> str:
    return django.get_version()


def write(contestant: Contestant, transactions: int) -> float:
    """Return microseconds for a transaction of an order and a job."""
    from django.db import transaction

    from .models import Order

    started = time.perf_counter()
    for _ in range(transactions):
        with transaction.atomic():
            Order.objects.create(sku="teapot", quantity=3)
            contestant.enqueue(0)
    return 1e6 * (time.perf_counter() - started) / transactions


def fill(contestant: Contestant, count: int) -> None:
    """Leave a backlog of so many jobs, and nothing else."""
    from django.db import connection, transaction

    contestant.clear()
    for start in range(0, count, PART):
        with transaction.atomic():
            contestant.enqueue_many(min(PART, count - start))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")


def send(contestant: Contestant, first: int, count: int, apart: float) -> list[float]:
    """Enqueue numbered jobs one by one; return when each commit had returned (monotonic)."""
    from django.db import transaction

    committed: list[float] = []
    for number in range(first, first + count):
        time.sleep(apart)  # the system is idle between two jobs
        with transaction.atomic():
            transaction.on_commit(lambda: committed.append(time.monotonic()))
            contestant.enqueue(number)
    return committed


if __name__ == "__main__":
    main(*sys.argv[1:])
