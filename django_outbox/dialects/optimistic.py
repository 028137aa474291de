"""The dialect of every database that has no better one: nothing in it needs row locks."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper

from .claiming import Claiming
from .keeping import Keeping
from .pausing import Pausing
from .settling import Settling
from .stream_looks import StreamLooks


class Optimistic(Claiming, Keeping, Settling, Pausing, StreamLooks):
    """Every statement, as MySQL would have it where standards differ."""

    notifies = False  # the database itself can ring

    def notify(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        raise NotSupportedError(f"{connection.vendor} has no NOTIFY")

    def listen(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        raise NotSupportedError(f"{connection.vendor} has no LISTEN")

    def heard(self, connection: BaseDatabaseWrapper, timeout: float) -> bool:
        """Wait for a notification on a listening connection; return whether one came."""
        raise NotSupportedError(f"{connection.vendor} has no LISTEN")

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        """Change an engine thread's own copy of its connection settings, before it connects."""
