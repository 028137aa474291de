"""Drivers of a delivery: one for threads and ``drain()``, and one for an event loop.

A delivery is a generator of effects, so that all callers go through the same steps: it yields a
``Call``, and goes on with what that returned or raised; ``TIDY``, and goes on if more may be
called; ``PASS_ON`` when decisions are to be settled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final

from .call import Call


class Between(Enum):
    """What a delivery asks of its driver, but for calls."""

    TIDY = auto()  # clean up after a call; return whether more may be called
    PASS_ON = auto()  # pass ``decided`` and ``to_repeat`` on


TIDY: Final = Between.TIDY
PASS_ON: Final = Between.PASS_ON
Steps = Generator[Call | Between, Any, None]


def drive(
    steps: Steps,
    *,
    make: Callable[[Call], Any],
    tidy: Callable[[], bool],
    pass_on: Callable[[], None],
) -> None:
    """Make a delivery in this thread; ``make`` makes a call."""
    answer: Any = None
    with suppress(StopIteration):
        while True:
            effect, answer = steps.send(answer), None
            if effect is PASS_ON:
                pass_on()
            elif effect is TIDY:
                answer = tidy()
            else:
                answer = make(effect)


async def adrive(
    steps: Steps, *, tidy: Callable[[], Awaitable[bool]], pass_on: Callable[[], None]
) -> None:
    """Await a delivery."""
    answer: Any = None
    with suppress(StopIteration):
        while True:
            effect, answer = steps.send(answer), None
            if effect is PASS_ON:
                pass_on()
            elif effect is TIDY:
                answer = await tidy()
            else:
                answer = await effect.amake()
