"""Waiting for a fact with a deadline, a listener that waits for the test, a clock that it moves."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from django_outbox.clocks import monotonic

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")


def wait_until(fact: Callable[[], T], *, within: float = 20.0, what: str = "") -> T:
    """Return the first truthy answer of ``fact``; fail when there is none ``within`` seconds.

    The default is for a busy machine, and well below a default lease, which would explain much.
    """
    deadline = time.monotonic() + within
    while True:
        began = time.monotonic()
        if answer := fact():
            return answer
        if (now := time.monotonic()) > deadline:
            raise AssertionError(f"{what or fact} was still {answer!r} after {within:g} s")
        # Between two looks: those that take long leave the processor to what they wait for.
        time.sleep(min(max(2 * (now - began), 0.01), 0.2))


class Gate:
    """A listener that is in its call until the gate is opened; before, it does its work."""

    def __init__(self, work: Callable[[Any], object] = lambda event: None) -> None:
        self.open, self.entered = threading.Event(), list[str]()
        self._work = work

    def __call__(self, event: Any) -> None:
        self._work(event)
        self.entered.append(event.event_id)
        assert self.open.wait(60)


class MovedClock:
    """The package's monotonic clock and that of event loops: real time, and what was added to it.

    A timeout in a test can be much longer than any busy machine needs for a call, and ends at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._added = 0.0  # seconds
        loop_time = asyncio.BaseEventLoop.time
        monkeypatch.setattr(
            asyncio.BaseEventLoop, "time", lambda loop: loop_time(loop) + self._added
        )
        for name, module in {**sys.modules}.items():
            if name.startswith("django_outbox.") and vars(module).get("monotonic") is monotonic:
                monkeypatch.setattr(module, "monotonic", self.monotonic)

    def monotonic(self) -> float:
        return monotonic() + self._added

    def advance(self, seconds: float) -> None:
        self._added += seconds
