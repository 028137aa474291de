"""The circuit breaker of a relay's queue: open while its broker is away.

It opens as soon as a call raises ``BrokerUnavailable``, and costs no event an attempt. While it is
open, every ``CHECK_INTERVAL`` one worker has the relay check its connection; a check that succeeds
closes it. Its row has a pause of 0 seconds.
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
from ..listeners.queues import queue_of
from ..queue_settings import BreakerSettings
from ..sql import dialect_of
from .breaker import Breaker, report_closed, report_opened

logger = logging.getLogger("django_outbox")

CHECK_INTERVAL = 3.0  # seconds between two checks of a broker that is away
CHECK_LEASE = 4.0  # seconds; after it another worker checks, for this one may have been lost
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
        # When (monotonic) each line was logged last: another process may have logged the other one.
        self._logged_at = {"opened": -inf, "closed": -inf}

    def write(self, connection: BaseDatabaseWrapper) -> bool:
        """Write what has changed, as ``Breaker.write`` does; or that a check has ended."""
        if not self._is_checking:
            return super().write(connection)
        if self._succeeded is None:
            return False
        self._is_checking = False
        if not self._succeeded:
            dialect_of(connection).extend_breaker(
                connection, queue=self._queue, pause=CHECK_INTERVAL, kept=0.0
            )
        elif dialect_of(connection).close_breaker(connection, queue=self._queue):
            report_closed(self._alias, self._queue, is_logged=self._is_to_be_logged("closed"))
        return True

    def begin_check(self, connection: BaseDatabaseWrapper, pause: float) -> bool:
        """Begin to check the connection in a thread, if this worker wins that."""
        if pause or self.is_probing:
            return False
        if not self._is_checking and dialect_of(connection).probe_breaker(
            connection, queue=self._queue, lease=CHECK_LEASE
        ):
            self._is_checking, self._succeeded = True, None
            threading.Thread(
                target=self._run, name=f"outbox-check-{self._queue}", daemon=True
            ).start()
        return True

    def _run(self) -> None:
        try:
            self._check()
        except BaseException as error:  # noqa: BLE001 - a backend may raise anything
            logger.debug("broker not available queue=%s error=%r", self._queue, error)
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
