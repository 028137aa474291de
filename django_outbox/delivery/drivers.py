"""Drivers of a delivery: one for threads and ``drain()``, and one for an event loop.

A delivery is a generator of effects, so that all callers go through the same steps: it yields a
``Call``, and goes on with what that returned or raised; ``TIDY``, and goes on if more may be
called; ``PASS_ON`` before fallbacks. Its driver passes on what is decided in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from enum import Enum, auto
from typing import Any, Final, Protocol

from .call import Call


class Between(Enum):
    """What a delivery asks of its driver, but for calls."""

    TIDY = auto()  # clean up after a call; return whether more may be called
    PASS_ON = auto()  # pass ``decided`` and ``to_repeat`` on


TIDY: Final = Between.TIDY
PASS_ON: Final = Between.PASS_ON
Steps = Generator[Call | Between, Any, None]


class Driver(Protocol):
    """Who makes a delivery in a thread."""

    def make(self, call: Call) -> Any:
        """Make a call; return what it returned or raised."""

    def tidy(self) -> bool:
        """Clean up after a call; return whether more may be called."""

    def pass_on(self) -> None:
        """Pass on what the delivery has decided."""


def drive(steps: Steps, driver: Driver) -> None:
    """Make a delivery in this thread."""
    answer: Any = None
    while True:
        try:
            effect = steps.send(answer)
        except StopIteration:
            break
        if effect is PASS_ON:
            answer = driver.pass_on()  # type: ignore[func-returns-value]
        elif effect is TIDY:
            answer = driver.tidy()
        else:
            answer = driver.make(effect)
    driver.pass_on()


async def adrive(
    steps: Steps, *, tidy: Callable[[], Awaitable[bool]], pass_on: Callable[[], None]
) -> None:
    """Await a delivery."""
    answer: Any = None
    while True:
        try:
            effect = steps.send(answer)
        except StopIteration:
            break
        if effect is PASS_ON:
            answer = pass_on()  # type: ignore[func-returns-value]
        elif effect is TIDY:
            answer = await tidy()
        else:
            answer = await effect.amake()
    pass_on()
