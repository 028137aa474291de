"""The pytest plugin: fixtures of the test kit, and no worker outlives its test.

Pytest loads it wherever the package is installed, so nothing of Django is imported before use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .engine.worker import Worker
    from .testing import Written

GRACE = 5.0  # seconds for threads that are ending when their test returns


@pytest.fixture
def outbox_events() -> Iterator[Written]:
    """The events written in this test and not rolled back, in order, as listeners see them."""
    from .testing import capture_events

    with capture_events() as events:
        yield events


@pytest.fixture
def outbox_worker(transactional_db: None) -> Iterator[Worker]:
    """A running worker; the test commits for real."""
    from .testing import running_worker

    with running_worker() as worker:
        yield worker


@pytest.fixture(autouse=True)
def _no_outbox_thread_left() -> Iterator[None]:
    """Fail a test that leaves a worker running: it would deliver the events of the next."""
    before = _threads()
    yield
    if left := _threads() - before:
        for thread in left:
            thread.join(GRACE / len(left))
        if names := sorted(thread.name for thread in left if thread.is_alive()):
            pytest.fail(
                f"A worker or a thread of it is still running: {', '.join(names)}. Stop it in the "
                "test, or use the fixture outbox_worker.",
                pytrace=False,
            )


def _threads() -> set[threading.Thread]:
    hooks = sys.modules.get("django_outbox.hooks")
    if hooks is None or hooks.slot.start is not None:  # an EMBEDDED worker lives with the process
        return set()
    return {each for each in threading.enumerate() if each.name.startswith("outbox-")}
