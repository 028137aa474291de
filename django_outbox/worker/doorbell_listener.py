"""The listener connection: receives notifications of new events, and wakes the claimer."""

from __future__ import annotations

from ..doorbell.base import MAX_INTERVALS, Ear
from .effects import Steps, act
from .wakeup import Wakeup

WAIT_TIMEOUT = 0.2  # seconds of one wait for a notification; a stop may have to wait as long
COMMIT_MARGIN = 0.005  # seconds after a writer's quiet interval; what it wrote is committed by then


class DoorbellListener:
    """Requests a poll at each notification, and again when quiet writers may notify again."""

    def __init__(self, ear: Ear, *, interval: float, wakeup: Wakeup) -> None:
        self._ear = ear
        self._quiet = (interval + COMMIT_MARGIN, MAX_INTERVALS * interval + COMMIT_MARGIN)
        self._wakeup = wakeup
        self._open = False

    def step(self) -> Steps[float]:
        try:
            if not self._open:
                yield from act(self._ear.listen)
                self._open = True
                self._wakeup.poll()  # finds what was announced before
            if (yield lambda _: self._ear.wait(WAIT_TIMEOUT)):
                self._wakeup.poll_again(self._quiet)
                self._wakeup.poll()
            self._wakeup.trust_doorbell(self._ear.sure)
        except BaseException:
            self._open = False
            self._wakeup.trust_doorbell(False)
            raise
        return 0.0

    def close(self) -> Steps[None]:
        yield from act(self._ear.close)
