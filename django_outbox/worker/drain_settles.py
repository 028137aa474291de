"""How ``drain()`` settles: it retries after errors, and leaves what the database refuses."""

from __future__ import annotations

import time

from django.db.backends.base.base import BaseDatabaseWrapper

from ..delivery.lease import Lease
from ..sql import dialect_of
from ..sql.halving import answers
from .drain_claims import DrainClaims
from .settle_log import Settled, log_refused, report_settled
from .settler import settle, split_by_kind

GATHER_COUNT = 20  # decisions after which they are settled
SETTLE_RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before each further try of a settle


class DrainSettles(DrainClaims):
    """Writes the decisions of a drain, in its thread."""

    _accepts = False  # the database has accepted a decision
    _left = 0  # decisions that were refused while none had been accepted
    _error: Exception | None = None  # by which

    def _exclude(self, lease: Lease) -> None:
        """Do not claim an event, or its stream, again."""
        if lease.stream is None:
            self.excluded.append(lease.id)
        else:
            self.reads.exclude.append(lease.stream)

    def _settle(self, connection: BaseDatabaseWrapper, settled: Settled) -> None:
        """Write decisions; retry after errors, so that the events need not run again.

        What the database refuses while it accepts others stays leased.
        """
        for part in split_by_kind(settled):
            pauses = iter(SETTLE_RETRY_DELAYS)
            while part:
                try:
                    self._write(connection, part)
                except Exception as error:
                    pause = next(pauses, None)
                    if pause is not None and not connection.in_atomic_block:
                        time.sleep(pause)
                        continue
                    # A few are left, in the hope that others are accepted.
                    self._error, self._left = error, self._left + len(part)
                    waits = dialect_of(connection).is_lock_wait(error)
                    if self._left > GATHER_COUNT or waits or not answers(connection):
                        raise
                    self._leave(part, error)
                    break

    def _write(self, connection: BaseDatabaseWrapper, part: Settled) -> None:
        """Write decisions of one kind and remove them from ``part``, but not those in doubt."""
        refused, problem = Settled(), None
        try:
            for each in settle(part, connection=connection, me=self.me, settings=self.settings):
                if each.is_written:
                    self._accepts = True
                    report_settled(each.rows, alias=self.alias)
                else:
                    refused, problem = refused + each.rows, each.error
            if problem is not None and not self._accepts:
                raise problem
        except Exception:
            part += refused
            raise
        if problem is not None:
            self._leave(refused, problem)

    def _leave(self, refused: Settled, error: Exception) -> None:
        log_refused(refused, error)
        for lease, _ in refused:
            self._exclude(lease)
