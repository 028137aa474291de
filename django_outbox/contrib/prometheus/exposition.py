"""What a port of a worker shows: this process's numbers, or those of all in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from .receivers import install

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def registry() -> CollectorRegistry:
    """Return what to show: with a multi-process directory the sum of its processes."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return REGISTRY
    shared = CollectorRegistry()
    shared.register(Living(directory))
    shared.register(install().backlog)
    return shared


class Living(Collector):
    """The numbers of all processes; gauges of those that were killed are forgotten first."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._all: Collector = MultiProcessCollector(None, directory)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        for path in Path(self._directory).glob("gauge_live*_*.db"):
            pid = path.stem.rpartition("_")[2]
            if pid.isdecimal() and not _is_alive(int(pid)):
                with suppress(FileNotFoundError):  # another scrape was faster
                    mark_process_dead(int(pid), self._directory)  # type: ignore[no-untyped-call]
        return self._all.collect()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
