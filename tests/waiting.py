"""Waiting for a fact, with a deadline; and a listener that waits for the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

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
    """A listener that is in its call until the gate is opened."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), list[str]()

    def __call__(self, event: Any) -> None:
        self.entered.append(event.event_id)
        self.open.wait(60)
