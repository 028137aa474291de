"""Hooks and fixtures for all tests; a test that leaves threads or processes running fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import psutil
import pytest
from asgiref.sync import SyncToAsync
from django.db import connections
from django.test.utils import setup_test_environment, teardown_test_environment

from django_outbox.events.typed import classes
from tests import databases
from tests.waiting import MovedClock

if TYPE_CHECKING:
    from tests.reach.children import Site

# A shell makes its background jobs ignore SIGINT; processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

MOMENT = 0.1  # seconds for threads that are at their end, as most are; a collection takes longer
GRACE = 30  # seconds for threads and processes that are ending when their test returns


def pytest_report_header() -> str:
    return f"database: {databases.vendor()}"


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collections, which take long otherwise."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Undo that: what other plugins do at the end may ask what refers to an object."""
    gc.unfreeze()


@pytest.fixture
def database_env(transactional_db: None) -> dict[str, str]:
    """Return the environment in which a child process uses this test's databases."""
    settings = {alias: connections[alias].settings_dict for alias in connections}
    return {
        **os.environ,
        **databases.environment(settings),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }


@pytest.fixture
def site(database_env: dict[str, str], tmp_path: Path) -> Site:
    """Return the site whose processes a test starts."""
    from tests.reach.children import Site  # its models need the apps, which load later

    return Site(database_env, tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """Return the monotonic clock of workers and event loops, which the test moves ahead."""
    return MovedClock(monkeypatch)


@pytest.fixture(autouse=True)
def no_class_remembered() -> Iterator[None]:
    """Forget the classes that a test declares: writes of their event types are validated."""
    with patch.dict(classes):
        yield


@pytest.fixture(autouse=True)
def relays_that_send() -> Iterator[None]:
    """Let relays send in a test run: the brokers of these tests are their own."""
    from django_outbox.testing import send_relayed

    with send_relayed():
        yield


@pytest.fixture
def no_test_run() -> Iterator[None]:
    """Go on as outside of a test run."""
    teardown_test_environment()
    yield
    setup_test_environment()


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
    for thread in new:
        thread.join(MOMENT)
    if left := [thread for thread in new if thread.is_alive()]:
        gc.collect()  # async_to_sync leaves an executor; collecting it ends its thread
    for thread in left:
        thread.join(GRACE)
    return [f"thread {thread.name}" for thread in left if thread.is_alive()]


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
