"""The row by which people see a worker, and workers each other; nothing correct depends on it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import django
from django.db import connections

from .. import dialects
from ..dialects.fields import DatabaseNow
from ..models import OutboxWorker
from .queues import Held
from .streams import Streams

SHOWN = 5  # running events that the row names
LOST_AFTER = 10  # leases without a heartbeat until a lost worker's row is removed


class Presence:
    """Keeps this worker's row, writes it again if someone removed it, removes those of the lost."""

    def __init__(self, *, alias: str, me: str, held: Held, streams: Streams, mode: str) -> None:
        self._alias, self._me, self._held, self._streams = alias, me, held, streams
        self._info = {
            "mode": mode,
            "django": django.get_version(),
            "python": sys.version.split()[0],
        }

    def show(self) -> None:
        rows = OutboxWorker.objects.using(self._alias)
        leases = {"held": len(self._held), "streams": len(self._streams)}
        info = json.dumps({**self._info, **leases, "running": self._running()})
        if not rows.filter(pk=self._me).update(heartbeat_at=DatabaseNow(), info=info):
            rows.create(
                id=self._me,
                hostname=socket.gethostname()[:255],
                pid=os.getpid(),
                started_at=DatabaseNow(),
                heartbeat_at=DatabaseNow(),
                info=info,
            )
        connection = connections[self._alias]
        now = dialects.of(connection).clock(connection)
        silent = now - timedelta(seconds=LOST_AFTER * self._held.lease)
        rows.filter(heartbeat_at__lt=silent).delete()

    def others(self) -> list[int]:
        """Return how many streams each other worker that is alive had when it showed itself."""
        if self._info["mode"] == "single_node":
            return []  # they stand by
        connection = connections[self._alias]
        lately = dialects.of(connection).clock(connection) - timedelta(seconds=self._held.lease)
        rows = OutboxWorker.objects.using(self._alias).exclude(pk=self._me)
        shown = rows.filter(heartbeat_at__gt=lately).values_list("info", flat=True)
        said = [json.loads(info).get("streams") for info in shown if info]
        return [each for each in said if each is not None]  # an older release does not say

    def _running(self) -> list[dict[str, Any]]:
        """Name what has run longest: where a worker hangs, people see over what."""
        now = time.monotonic()
        longest = sorted(self._held.running(), key=lambda each: each.started_at)[:SHOWN]
        return [
            {
                "event_type": each.event_type,
                "event_id": each.event_id,
                "seconds": round(now - each.started_at, 1),
            }
            for each in longest
        ]

    def leave(self) -> None:
        OutboxWorker.objects.using(self._alias).filter(pk=self._me).delete()
