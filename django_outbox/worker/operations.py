"""Works off operations: the bulk changes that people have asked for, one worker for all."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import doorbell
from ..clocks import monotonic
from ..models import OutboxOperation
from ..models.bulk import Worked, work_off
from .effects import Steps
from .leases import Leader
from .pauses import KnownPauses
from .polling import Wakeup

logger = logging.getLogger("django_outbox")

STEP_INTERVAL = 1.0  # seconds; an idle step makes no statement: the claimer knows of operations
ASK_INTERVAL = 120.0  # seconds until a step asks all the same, for the claimer may be busy
# Seconds of one step, and of the pause after it: a stop, and the housekeeper's other work, wait.
MAX_RUN = 0.5


class Operations:
    """Does the next batches of what is open, in turn. The housekeeper's thread only."""

    def __init__(self, *, me: str, lease: float, known_pauses: KnownPauses, wakeup: Wakeup) -> None:
        self._leader, self._wakeup = Leader(me=me, name="operations", lease=lease), wakeup
        self._known_pauses, self._asked_at = known_pauses, monotonic()

    def step(self) -> Steps[float]:
        """Work for a moment, unless another worker does; return the seconds to the next step."""
        is_time = monotonic() >= self._asked_at + ASK_INTERVAL
        if self._known_pauses.has_operations or self._leader.holds or is_time:
            self._asked_at = monotonic()
            turns = deque((yield open_operations))
            if not turns:
                yield from self.close()
            elif self._leader.holds or (yield self._leader.take):
                return (yield from self._work(turns))
        return STEP_INTERVAL

    def close(self) -> Steps[None]:
        """Let another worker continue."""
        yield from self._leader.release()

    def _work(self, turns: deque[int]) -> Steps[float]:
        until, wait = monotonic() + MAX_RUN, STEP_INTERVAL
        while turns and monotonic() < until:
            pk = turns.popleft()
            worked: Worked = yield partial(work_off, pk)
            if worked.changed:
                self._wakeup.poll()
                yield doorbell.ring
            if worked.wait is None:
                logger.info("operation ended id=%d", pk)
            elif worked.wait:
                wait = min(wait, worked.wait)
            else:
                turns.append(pk)
            yield from self._leader.renew("")
        return MAX_RUN if turns else wait


def open_operations(connection: BaseDatabaseWrapper) -> list[int]:
    """Return the ids of the operations that are to be worked off."""
    found = OutboxOperation.objects.using(connection.alias).open()
    return [*found.values_list("pk", flat=True)]


def work_off_all(connection: BaseDatabaseWrapper) -> None:
    """Work off what is open, as far as rates allow now."""
    for pk in open_operations(connection):
        while work_off(pk, connection).wait == 0:
            continue
