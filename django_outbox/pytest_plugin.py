"""Pytest plugin: fixtures of the test kit, and a check that no worker outlives its test.

Pytest loads it wherever the package is installed, so it imports Django only on use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import Written
    from .worker.worker import Worker

GRACE = 5.0  # seconds that all threads left by a test may take to end


@pytest.fixture
def outbox_events() -> Iterator[Written]:
    """Capture the test's events that are not rolled back, in order, as listeners see them.

    Example::

        @pytest.mark.django_db
        def test_what_is_written(outbox_events):
            with transaction.atomic():
                outbox.write("order.placed", {"order": 7})
            assert [event.event_type for event in outbox_events] == ["order.placed"]
    """
    from .testing import capture_events

    with capture_events() as events:
        yield events


@pytest.fixture
def outbox_worker(transactional_db: None) -> Iterator[Worker]:
    """Run a worker during the test, which commits for real.

    Example::

        def test_a_worker_delivers_it(outbox_worker):
            with transaction.atomic():
                event_id = outbox.write("order.placed", {"order": 7})
            wait_until(OutboxEvent.objects.done().filter(pk=event_id).exists)
    """
    from .testing import running_worker

    with running_worker() as worker:
        yield worker


@pytest.fixture(autouse=True)
def _no_outbox_thread_left() -> Iterator[None]:
    """Fail a test that leaves a worker running: it would deliver the next test's events."""
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
    module = sys.modules.get("django_outbox.writing.on_commit")
    if module is None or module.hot_queues.start_worker is not None:
        # An embedded worker lives as long as its process.
        return set()
    return {each for each in threading.enumerate() if each.name.startswith("outbox-")}
