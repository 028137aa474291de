"""The metrics that a worker's port serves: of its process, or of all that share a directory."""

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
    """Return the registry to serve; with a multi-process directory it sums all processes."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return REGISTRY
    shared = CollectorRegistry()
    shared.register(LiveProcesses(directory))
    shared.register(install().backlog)
    return shared


class LiveProcesses(Collector):
    """Collects the metrics of all processes, after removing the gauges of killed ones."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._collector: Collector = MultiProcessCollector(None, directory)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        for path in Path(self._directory).glob("gauge_live*_*.db"):
            pid = path.stem.rpartition("_")[2]
            if pid.isdecimal() and not _is_alive(int(pid)):
                with suppress(FileNotFoundError):  # another scrape has deleted it
                    mark_process_dead(int(pid), self._directory)  # type: ignore[no-untyped-call]
        return self._collector.collect()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
