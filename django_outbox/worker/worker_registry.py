"""The row that shows a worker to users and to other workers; correctness does not depend on it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import django
from django.db import connections

from ..clocks import monotonic
from ..conf import DAY
from ..listeners.queues import published
from ..models import OutboxWorker, live_workers
from ..models.fields import DatabaseNow
from ..sql import dialect_of
from .held import Held
from .runs import Runs
from .wakeup import Wakeup

MAX_RUNNING = 5  # running events that the row lists, at most
LOST_AFTER = 10  # leases without a heartbeat until the row of a lost worker may be removed
LOST_KEPT_FOR = DAY  # seconds for which the rows of lost workers stay, so that users see them
MAX_LOST = 100  # rows of lost workers that stay, those with the latest heartbeats
MAX_REMOVED = 1000  # rows of lost workers that are removed at once


class OtherWorker(NamedTuple):
    """What its row says of another worker; None: it is of a release that does not say."""

    streams: int | None  # that it has leased
    queues: list[str] | None  # that it serves

    def serves(self, queue: str) -> bool:
        """Return whether it serves a queue; a worker that does not say serves all."""
        return self.queues is None or queue in self.queues


class WorkerRow:
    """Updates this worker's row, makes it anew if it was removed, deletes rows of lost workers."""

    def __init__(
        self,
        *,
        alias: str,
        me: str,
        held: Held,
        runs: Runs,
        wakeup: Wakeup,
        mode: str,
        queues: Collection[str],
    ) -> None:
        self._alias, self._me, self._held, self._runs = alias, me, held, runs
        self._wakeup = wakeup
        self._info: dict[str, Any] = {
            "mode": mode,
            "queues": sorted(queues),
            "django": django.get_version(),
            "python": sys.version.split()[0],
        }

    def update(self) -> None:
        rows = OutboxWorker.objects.using(self._alias)
        leases: dict[str, Any] = {"held": len(self._held), "streams": len(self._runs)}
        if self._wakeup.suspect_waits:
            leases["suspect_waits"] = True
        info = json.dumps({**self._info, **published(), **leases, "running": self._running()})
        if not rows.filter(pk=self._me).update(heartbeat_at=DatabaseNow(), info=info):
            rows.create(
                id=self._me,
                hostname=socket.gethostname()[:255],
                pid=os.getpid(),
                started_at=DatabaseNow(),
                heartbeat_at=DatabaseNow(),
                info=info,
            )
        self._remove_lost()

    def note_stop(self) -> None:
        """Have the next update say that this worker stops: it is not missed if it is killed."""
        self._info["stopping"] = True

    def _remove_lost(self) -> None:
        """Delete the rows of workers lost a day ago, and the oldest of more than ``MAX_LOST``."""
        connection = connections[self._alias]
        now = dialect_of(connection).clock()
        silent = now - timedelta(seconds=LOST_AFTER * self._held.lease)
        lost = OutboxWorker.objects.using(self._alias).filter(heartbeat_at__lt=silent)
        newest = lost.order_by("-heartbeat_at", "pk").values_list("pk", "heartbeat_at")
        oldest = now - timedelta(seconds=LOST_KEPT_FOR)
        removed = [
            pk
            for number, (pk, heartbeat_at) in enumerate(newest[: MAX_LOST + MAX_REMOVED])
            if number >= MAX_LOST or heartbeat_at < oldest
        ]
        if removed:
            lost.filter(pk__in=removed).delete()

    def others(self) -> list[OtherWorker]:
        """Return the other live workers, as their rows show them."""
        if self._info["mode"] == "single_node":
            return []  # they stand by
        others = live_workers(self._alias, but=self._me)
        return [OtherWorker(each.get("streams"), each.get("queues")) for each in others]

    def _running(self) -> list[dict[str, Any]]:
        """Return the events that have run longest, so that users see where a worker hangs."""
        now = monotonic()
        longest = sorted(self._held.running(), key=lambda each: each.started_at)[:MAX_RUNNING]
        return [
            {
                "event_type": each.event_type,
                "id": each.id,
                "seconds": round(now - each.started_at, 1),
            }
            for each in longest
        ]

    def delete(self) -> None:
        OutboxWorker.objects.using(self._alias).filter(pk=self._me).delete()
