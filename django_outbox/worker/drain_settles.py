"""How ``drain()`` settles: it retries after errors, and leaves what the database refuses."""

from __future__ import annotations

import time

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import Settings
from ..delivery.lease import Lease
from ..sql import dialect_of
from ..sql.halving import answers
from .settle_log import Settled, log_refused, report_settled
from .settler import settle, split_by_kind

GATHER_COUNT = 20  # decisions after which they are settled
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before each further try of a settle


class DrainSettles:
    """Writes the decisions of a drain, in its thread."""

    def __init__(self, *, alias: str, me: str, settings: Settings) -> None:
        self._alias, self._me, self._settings = alias, me, settings
        self._accepts = False  # the database has accepted a decision
        self._refused = 0  # decisions that were refused while none had been accepted
        self._error: Exception | None = None  # by which

    def settle(self, connection: BaseDatabaseWrapper, decided: Settled) -> list[Lease]:
        """Write decisions; retry after errors, so that the events need not run again.

        Return what the database refuses while it accepts others; it stays leased.
        """
        left: list[Lease] = []
        for part in split_by_kind(decided):
            pauses = iter(RETRY_DELAYS)
            while part:
                try:
                    left += self._write(connection, part)
                except Exception as error:
                    pause = next(pauses, None)
                    if pause is not None and not connection.in_atomic_block:
                        time.sleep(pause)
                        continue
                    # A few are left, in the hope that others are accepted.
                    self._error, self._refused = error, self._refused + len(part)
                    waits = dialect_of(connection).is_lock_wait(error)
                    if self._refused > GATHER_COUNT or waits or not answers(connection):
                        raise
                    log_refused(part, error)
                    left += [lease for lease, _ in part]
                    break
        return left

    def check(self) -> None:
        """Raise the last error if the database has accepted nothing."""
        if self._error is not None and not self._accepts:
            raise self._error

    def _write(self, connection: BaseDatabaseWrapper, part: Settled) -> list[Lease]:
        """Write decisions of one kind and remove them from ``part``, but not those in doubt.

        Return what is refused.
        """
        refused, problem = Settled(), None
        try:
            for each in settle(part, connection=connection, me=self._me, settings=self._settings):
                if each.is_written:
                    self._accepts = True
                    report_settled(each.rows, alias=self._alias)
                else:
                    refused, problem = refused + each.rows, each.error
            if problem is not None and not self._accepts:
                raise problem
        except Exception:
            part += refused
            raise
        if problem is not None:
            log_refused(refused, problem)
        return [lease for lease, _ in refused]
