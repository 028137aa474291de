"""The row that shows a worker to users and to other workers; correctness does not depend on it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import django
from django.db.backends.base.base import BaseDatabaseWrapper

from ..clocks import monotonic
from ..listeners.queues import published
from ..models import OutboxWorker, live_workers
from ..models.fields import DatabaseNow
from ..sql import dialect_of
from .releases import Releases
from .wakeup import Wakeup

MAX_RUNNING = 5  # running events that the row lists, at most
LOST_AFTER = 10  # leases without a heartbeat until the row of a lost worker may be removed
LOST_KEPT_FOR = timedelta(days=1)  # for which rows of lost workers stay, so that users see them
MAX_LOST = 100  # rows of lost workers that stay, those with the latest heartbeats
MAX_REMOVED = 1000  # rows of lost workers that are removed at once


class WorkerRow:
    """Updates this worker's row, makes it anew if it was removed, deletes rows of lost workers."""

    def __init__(
        self, *, releases: Releases, wakeup: Wakeup, mode: str, queues: Collection[str]
    ) -> None:
        self._me, self._held, self._runs = releases.me, releases.held, releases.runs
        self._wakeup = wakeup
        self._info: dict[str, Any] = {
            "mode": mode,
            "queues": sorted(queues),
            "django": django.get_version(),
            "python": sys.version.split()[0],
        }

    def update(self, connection: BaseDatabaseWrapper) -> None:
        rows = OutboxWorker.objects.using(connection.alias)
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
        self._remove_lost(connection)

    def note_stop(self) -> None:
        """Have the next update say that this worker stops: it is not missed if it is killed."""
        self._info["stopping"] = True

    def _remove_lost(self, connection: BaseDatabaseWrapper) -> None:
        """Delete the rows of workers lost a day ago, and the oldest of more than ``MAX_LOST``."""
        now, rows = dialect_of(connection).clock(), OutboxWorker.objects.using(connection.alias)
        silent, oldest = now - timedelta(seconds=LOST_AFTER * self._held.lease), now - LOST_KEPT_FOR
        lost = rows.filter(heartbeat_at__lt=silent).order_by("-heartbeat_at", "pk")
        kept = lost.filter(heartbeat_at__gte=oldest).values_list("pk", flat=True)[:MAX_LOST]
        gone = lost.exclude(pk__in=[*kept]).values_list("pk", flat=True)[:MAX_REMOVED]
        if removed := [*gone]:
            rows.filter(pk__in=removed).delete()

    def others(self, connection: BaseDatabaseWrapper) -> list[dict[str, Any]]:
        """Return what the rows of the other live workers say; standbys do not count."""
        if self._info["mode"] == "single_node":
            return []
        return live_workers(connection.alias, but=self._me)

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

    def remove(self, connection: BaseDatabaseWrapper) -> None:
        OutboxWorker.objects.using(connection.alias).filter(pk=self._me).delete()
