"""Waiting for a fact, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
