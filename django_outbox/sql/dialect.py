"""The SQL that all databases share; the class of each database overrides what differs."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper

from .claiming import Claiming
from .inspection_queries import InspectionQueries
from .leasing import Leasing
from .pausing import Pausing
from .settling import Settling


class Dialect(Claiming, Leasing, Settling, Pausing, InspectionQueries):
    """Every operation on the tables. None of these statements needs row locks."""

    def notify(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        raise NotSupportedError(f"{connection.vendor} has no NOTIFY")

    def listen(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        raise NotSupportedError(f"{connection.vendor} has no LISTEN")

    def heard(self, connection: BaseDatabaseWrapper, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a notification; return whether one was received."""
        raise NotSupportedError(f"{connection.vendor} has no LISTEN")

    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        """Change an engine thread's copied settings before it connects; ``lock_wait``: seconds."""

    def guard_engine(self, connection: BaseDatabaseWrapper) -> None:
        """Set up what an engine thread's connection needs and settings cannot express."""
