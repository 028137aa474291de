"""A broker in the test's own memory, and the backend of a relay that sends to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from django_outbox.relays import Backend, BrokerUnavailable, Message, Outcome


class Broker:
    """What the tests' relays send to; one for all backends of a process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.is_away, self.refused = False, dict[str, Exception]()  # by event id
        self.check_error: Exception | None = None  # of a broker that is there
        self.messages, self.batches = list[Message](), list[int]()
        self.opened, self.closed, self.checked, self.published = 0, 0, 0, 0
        self.threads = set[str]()
        self.answer: Any = None  # given: what publish returns, or raises

    def take(self, messages: Sequence[Message]) -> list[Outcome]:
        self.published += 1
        self.threads.add(threading.current_thread().name)
        self.expect_there()
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is not None:
            return list(self.answer)
        self.batches.append(len(messages))
        found: list[Outcome] = []
        for each in messages:
            found.append(self.refused.get(each.event_id))
            if found[-1] is None:
                self.messages.append(each)
        return found

    def expect_there(self) -> None:
        if self.is_away:
            raise BrokerUnavailable("the tests' broker is away")


BROKER = Broker()


class InMemory(Backend):
    attribute_prefix = "ce_"

    def __init__(self, *, timeout: Any = 10.0, color: str = "red") -> None:
        super().__init__(timeout=timeout)
        if color == "none":
            raise ValueError("color is 'none'; expected a color.")

    def open(self) -> None:
        BROKER.expect_there()
        BROKER.opened += 1

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        return BROKER.take(messages)

    def check(self) -> None:
        BROKER.checked += 1
        BROKER.expect_there()
        if BROKER.check_error is not None:
            raise BROKER.check_error

    def close(self) -> None:
        BROKER.closed += 1


class InOrder(InMemory):
    per_key: ClassVar[int] = 5


class Awaited(Backend):
    loops: ClassVar[set[int]] = set()

    async def open(self) -> None:
        BROKER.expect_there()
        BROKER.opened += 1

    async def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return BROKER.take(messages)

    async def close(self) -> None:
        BROKER.closed += 1
