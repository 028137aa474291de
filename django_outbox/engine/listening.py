"""The worker's ear at the doorbell: passes rings on to the claimer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..doorbell.ends import QUIET, Ear

logger = logging.getLogger("django_outbox")

LOOK_UP = 0.2  # seconds; also how long a stop may have to wait
MARGIN = 0.005  # seconds; who kept quiet for an interval has committed by then


class Listening:
    """Claims are asked for at each ring, and when those that then keep quiet may ring again."""

    def __init__(
        self, ear: Ear, *, interval: float, look: Callable[[], None],
        look_again: Callable[[Sequence[float]], None], tell: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._ear, self._quiet = ear, (interval + MARGIN, QUIET * interval + MARGIN)
        self._look, self._look_again, self._tell = look, look_again, tell
        self._open = False

    def step(self) -> float:
        try:
            self._listen()
        except BaseException:
            self._open = False
            self._tell(False)
            raise
        return 0.0

    def _listen(self) -> None:
        if not self._open:
            self._ear.listen()
            self._open = True
            self._look()  # what was rung while nobody listened
        if self._ear.wait(LOOK_UP):
            self._look_again(self._quiet)
            self._look()
        self._tell(self._ear.sure)

    def close(self) -> None:
        self._ear.close()
