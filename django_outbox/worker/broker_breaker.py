"""The circuit breaker of a relay's queue: open while its broker is away.

It opens as soon as a call raises ``BrokerUnavailable``, and costs no event an attempt. A message
that the broker refuses says that the broker is there, so it is never counted. While the breaker is
open, every ``CHECK_INTERVAL`` one worker has the relay check its connection; a check that succeeds
closes it. Its row has a pause of 0 seconds.

A check may be wrong: it asks for more than a message needs, such as a permission. So if the broker
can be connected to and the check fails, a probe delivers one event, and a success closes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..listeners import registry
from ..listeners.outcomes import Decision
from ..listeners.queues import queue_of
from ..queue_settings import BreakerSettings
from ..relays.relay import CheckFailed
from ..sql import dialect_of
from .breaker import LONGEST_PAUSE, Breaker, report_closed, report_opened

logger = logging.getLogger("django_outbox")

CHECK_INTERVAL = 3.0  # seconds between two checks of a broker that is away
CHECK_LEASE = 4.0  # seconds; after it another worker checks, for this one may have been lost
PROBE_PAUSE = 30.0  # seconds from one probe to the next; doubles up to LONGEST_PAUSE
# Seconds between two lines of a kind: a broker that answers, but takes no messages, opens and
# closes its breaker all the time.
LOG_INTERVAL = 120.0


class BrokerBreaker(Breaker):
    """Opens, checks and closes the breaker of one relay. Threads call ``record`` only."""

    away_pause = 0.0  # until a check succeeds

    def __init__(
        self, queue: str, settings: BreakerSettings, *, check: Callable[[], None], **parts: Any
    ) -> None:
        """``check`` raises while the broker does not take messages."""
        super().__init__(queue, settings, **parts)
        self._check = check
        self._is_checking = False
        self._succeeded: bool | None = None  # once a check has ended; set by its thread
        self._is_doubtful = False  # the check failed, although there was a connection; the same
        self._probe_next = False  # instead of a check
        self._probed_at, self._probe_pause = -inf, 0.0  # monotonic; seconds until another probe
        # When (monotonic) each line was logged last: another process may have logged the other one.
        self._logged_at = {"opened": -inf, "closed": -inf}

    def follow(self, connection: BaseDatabaseWrapper) -> None:
        """Write what has changed, as ``Breaker.follow`` does; or that a check has ended."""
        if not self._is_checking:
            super().follow(connection)
        elif self._succeeded is not None:
            self._is_checking = False
            self._end_check(connection)
            self._known_pauses.read(connection)

    def _end_check(self, connection: BaseDatabaseWrapper) -> None:
        if not self._succeeded:
            is_time = monotonic() >= self._probed_at + self._probe_pause
            self._probe_next = self._is_doubtful and is_time
            self._prolong(connection, 0.0)
        else:
            self._probed_at, self._probe_pause = -inf, 0.0
            if dialect_of(connection).close_breaker(queue=self._queue):
                report_closed(self._alias, self._queue, is_logged=self._is_to_be_logged("closed"))

    @staticmethod
    def is_failure(decision: Decision) -> bool:
        """Return whether the broker could not be reached; a refusal is the message's own."""
        return bool(decision.unavailable)

    def begin_check(self, connection: BaseDatabaseWrapper, pause: float) -> bool:
        """Begin to check the connection in a thread, if this worker wins that."""
        if pause or self.is_probing:
            return False
        if self._probe_next:
            self._probe_next = False
            return False
        if not self._is_checking and dialect_of(connection).probe_breaker(
            queue=self._queue, lease=CHECK_LEASE
        ):
            self._is_checking, self._succeeded, self._is_doubtful = True, None, False
            threading.Thread(
                target=self._run, name=f"outbox-check-{self._queue}", daemon=True
            ).start()
        return True

    def begin_probe(self, connection: BaseDatabaseWrapper, pause: float) -> bool:
        """Try to win the probe, as ``Breaker.begin_probe`` does, and note when."""
        is_won = super().begin_probe(connection, pause)
        if is_won:
            self._probed_at = monotonic()
            self._probe_pause = min(max(2 * self._probe_pause, PROBE_PAUSE), LONGEST_PAUSE)
        return is_won

    def _prolong(self, connection: BaseDatabaseWrapper, pause: float) -> None:
        """Check again soon."""
        dialect_of(connection).extend_breaker(queue=self._queue, pause=CHECK_INTERVAL, kept=0.0)

    def _run(self) -> None:
        try:
            self._check()
        except BaseException as error:  # noqa: BLE001 - a backend may raise anything
            logger.debug("broker not available queue=%s error=%r", self._queue, error)
            self._is_doubtful = isinstance(error, CheckFailed)
            self._succeeded = False
        else:
            self._succeeded = True
        self._wakeup.poll()

    def _report_opened(self, pause: float, reason: str) -> None:
        is_logged = self._is_to_be_logged("opened") or bool(pause)
        report_opened(self._alias, self._queue, pause, reason, is_logged=is_logged)

    def _is_to_be_logged(self, line: str) -> bool:
        now = monotonic()
        if now < self._logged_at[line] + LOG_INTERVAL:
            return False
        self._logged_at[line] = now
        return True


def breaker_of(queue: str, settings: BreakerSettings, **parts: Any) -> Breaker:
    """Return the breaker of a queue: of a relay's, one that checks the connection."""
    for each in registry.listeners():
        if each.check is not None and queue_of(each) == queue:
            return BrokerBreaker(queue, settings, check=each.check, **parts)
    return Breaker(queue, settings, **parts)
