"""Gives each simulated process the globals that a real one has once."""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import datetime, timedelta
from typing import Any

from django_outbox import doorbell
from django_outbox.events import arguments
from django_outbox.writing.on_commit import hot_queues
from tests.simulation.scheduler import scheduler


class PerProcess(MutableMapping[str, Any]):
    """A mapping of which every simulated process has its own, like a global of a real one."""

    def _own(self) -> dict[str, Any]:
        found: dict[str, Any] = scheduler.current.process.values.setdefault(self, {})
        return found

    def __getitem__(self, key: str) -> Any:
        return self._own()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own()[key]

    def __iter__(self) -> Any:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    __hash__ = object.__hash__


class VirtualDatetime(datetime):
    """``datetime.now`` by the clock of the simulated process."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        shift = timedelta(seconds=scheduler.current.process.wall_offset)
        return (scheduler.database_time() + shift).astimezone(tz)


def prepare() -> None:
    """Give each simulated process its own globals. Once, before any history."""
    hot_queues.by_alias = PerProcess()  # type: ignore[assignment]
    make, notifiers = doorbell._notifier.__wrapped__, PerProcess()

    def notifier(alias: str) -> Any:
        if alias not in notifiers:
            notifiers[alias] = make(alias)
        return notifiers[alias]

    notifier.cache_clear = lambda: None  # type: ignore[attr-defined]
    doorbell._notifier = notifier  # type: ignore[assignment]
    arguments.datetime = VirtualDatetime  # type: ignore[misc]
