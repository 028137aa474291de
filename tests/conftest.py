"""Hooks and fixtures for all tests; a test that leaves threads or processes running fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from asgiref.sync import SyncToAsync
from django.db import connection, connections

from django_outbox.events.typed import classes
from django_outbox.sql import dialect_of
from tests import databases

# A shell makes its background jobs ignore SIGINT; processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ONCE = "any_database"  # the mark
LEFT_OUT = pytest.StashKey[int]()
REASON = 25  # lines shown of a failure whose test passed when run again
GRACE = 5  # seconds for threads and processes that are ending when their test returns


def pytest_report_header() -> str:
    return f"database: {databases.vendor()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that do not depend on the database only on SQLite."""
    if databases.vendor() == "sqlite":
        return
    once = [each for each in items if each.get_closest_marker(ONCE)]
    items[:] = [each for each in items if not each.get_closest_marker(ONCE)]
    config.hook.pytest_deselected(items=once)
    getattr(config, "workeroutput", {})["left out"] = len(once)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Note how many tests were left out; each process of the run reports the same number."""
    told = getattr(node, "workeroutput", {}).get("left out", 0)
    node.config.stash[LEFT_OUT] = max(told, node.config.stash.get(LEFT_OUT, 0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that has the mark but uses the run's database."""
    fixtures = {"db", "transactional_db"} & {*getattr(item, "fixturenames", ())}
    if item.get_closest_marker(ONCE) and (fixtures or item.get_closest_marker("django_db")):
        pytest.fail(f"marked {ONCE}, yet it asks for one", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests left out, and why tests ran again: those that then passed show no traceback."""
    if count := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.line(f"{count} tests marked {ONCE} were left to the run on SQLite")
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"run again: {report.nodeid}", sep="-")
        terminalreporter.line("\n".join(str(report.longrepr).splitlines()[-REASON:]))


@pytest.fixture
def database_env(transactional_db: None) -> dict[str, str]:
    """Return the environment in which a child process uses this test's databases."""
    settings = {alias: connections[alias].settings_dict for alias in connections}
    return {
        **os.environ,
        **databases.environment(settings),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }


@pytest.fixture(autouse=True)
def no_lock_wait_remembered() -> Iterator[None]:
    """Forget a lock wait: for five minutes after one, claims on MySQL are another statement."""
    yield
    if connection.vendor == "mysql":
        dialect_of(connection)._skips_until = 0.0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def no_class_remembered() -> Iterator[None]:
    """Forget the classes that a test declares: writes of their event types are validated."""
    with patch.dict(classes):
        yield


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves a thread or a child process behind."""
    threads, children = set(threading.enumerate()), set(_children())
    yield
    left = _threads_left(threads) + _children_left(children)
    if left:
        pytest.fail(f"left running: {', '.join(left)}", pytrace=False)


def _threads_left(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before - _threads_of_asgiref()
    if new:
        gc.collect()  # async_to_sync leaves an executor; collecting it ends its thread
    for thread in new:
        thread.join(GRACE)
    return [f"thread {thread.name}" for thread in new if thread.is_alive()]


def _threads_of_asgiref() -> set[threading.Thread]:
    """Return the one thread that ``sync_to_async`` keeps for the life of the process."""
    return set(SyncToAsync.single_thread_executor._threads)


def _children_left(before: set[psutil.Process]) -> list[str]:
    """Name the processes that still run, then kill them so that they do not disturb other tests."""
    _, alive = psutil.wait_procs(set(_children()) - before, timeout=GRACE)
    left = [f"process {child.pid} {' '.join(child.cmdline())}" for child in alive]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=GRACE)
    return left


def _children() -> list[psutil.Process]:
    """Return the living children; listing all processes of the machine takes 4 ms."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []  # no children
    return psutil.Process().children(recursive=True)
