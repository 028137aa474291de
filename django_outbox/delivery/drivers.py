"""Drivers of a delivery: one for threads and ``drain()``, and one for an event loop.

A delivery is a generator of effects, so that all callers go through the same steps: it yields a
``Call``, which has what it returned or raised then; ``Tidy``, which says whether more may be called
then; ``PASS_ON`` before fallbacks. Its driver passes on what is decided in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

from .call import Call


class Tidy:
    """Clean up after a call."""

    goes_on = True  # whether more may be called; set by the driver


PASS_ON: Final = None  # pass ``decided`` and ``to_repeat`` on
Steps = Iterator[Call | Tidy | None]


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
    for effect in steps:
        if isinstance(effect, Call):
            effect.answer = driver.make(effect)
        elif effect is PASS_ON:
            driver.pass_on()
        else:
            effect.goes_on = driver.tidy()
    driver.pass_on()


async def adrive(
    steps: Steps, *, tidy: Callable[[], Awaitable[bool]], pass_on: Callable[[], None]
) -> None:
    """Await a delivery."""
    for effect in steps:
        if isinstance(effect, Call):
            effect.answer = await effect.amake()
        elif effect is PASS_ON:
            pass_on()
        else:
            effect.goes_on = await tidy()
    pass_on()
