"""The row by which people see a worker; nothing correct depends on it."""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta

import django
from django.db import connections

from .. import dialects
from ..dialects.fields import DatabaseNow
from ..models import OutboxWorker
from .queues import Held

LOST_AFTER = 10  # leases without a heartbeat until a lost worker's row is removed


class Presence:
    """Keeps this worker's row, writes it again if someone removed it, removes those of the lost."""

    def __init__(self, *, alias: str, me: str, held: Held, mode: str) -> None:
        self._alias, self._me, self._held = alias, me, held
        self._info = {
            "mode": mode,
            "django": django.get_version(),
            "python": sys.version.split()[0],
        }

    def show(self) -> None:
        rows = OutboxWorker.objects.using(self._alias)
        info = json.dumps({**self._info, "held": len(self._held)})
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

    def leave(self) -> None:
        OutboxWorker.objects.using(self._alias).filter(pk=self._me).delete()
