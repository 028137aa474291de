"""A doorbell that wakes the listener connections of all simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Task, scheduler

ears: list[Ear] = []  # that listen now


class Touched:
    """What a history makes of a touch: nothing, or an error."""

    act: Callable[..., None] = staticmethod(lambda *place: None)


class Bell:
    def __init__(self, alias: str) -> None:
        """Every doorbell is made for an alias; here is one database."""

    def ring(self, connection: Any) -> None:
        Touched.act("doorbell", "ring")
        for each in ears:
            each.is_rung = True
            if each.waiting is not None:
                scheduler.wake(each.waiting)

    def ear(self) -> Ear:
        return Ear()


class Ear:
    sure = False

    def __init__(self) -> None:
        self.is_rung = False
        self.waiting: Task | None = None

    def listen(self) -> None:
        Touched.act("doorbell", "listen")
        self.close()
        ears.append(self)
        scheduler.current.process.on_kill.append(self.close)

    def wait(self, timeout: float) -> bool:
        Touched.act("doorbell", "wait")
        if not self.is_rung:
            self.waiting = scheduler.current
            scheduler.block(timeout)
            self.waiting = None
        found, self.is_rung = self.is_rung, False
        return found

    def close(self) -> None:
        if self in ears:
            ears.remove(self)
