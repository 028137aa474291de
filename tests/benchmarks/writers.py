"""What writers lose by the doorbell, and by a worker in their own process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

from django.db import connection

from django_outbox import doorbell

from . import backlog
from .figures import Figure, in_turn
from .scale import Scale
from .witness import Witness
from .workers import WorkerProcess, environment
from .writing import Order

SEVERAL = 8
LEAD = 1.0  # seconds in which workers start and settings are taken


def run(scale: Scale, witness: Witness) -> list[Figure]:
    silent: dict[str, Any] = {"DOORBELL": None}
    with Writers(SEVERAL) as several, Writers(1) as one:

        def beside_worker(outbox: dict[str, Any]) -> float:
            backlog.empty()
            with WorkerProcess(**outbox) as worker:
                rate = several.rate(scale.seconds, outbox)
                worker.wait_until_settled()
            return rate

        def heard(outbox: dict[str, Any]) -> float:
            backlog.empty()
            with an_ear() as rings:
                rate = several.rate(scale.seconds, outbox)
            assert outbox is silent or len(rings) > 5
            return rate

        def single(*, embedded: bool) -> float:
            backlog.empty()
            return one.rate(scale.seconds, {}, embedded=embedded)

        for writers in (several, one):
            writers.rate(scale.seconds / 2, {})  # a warm-up
        found = in_turn(
            {
                "heard": lambda: heard({}),
                "quiet": lambda: heard(silent),
                "bell": lambda: beside_worker({}),
                "silent": lambda: beside_worker(silent),
                "embedded": lambda: single(embedded=True),
                "alone": lambda: single(embedded=False),
            },
            scale.repeats,
        )
    return [
        Figure(
            name=f"{SEVERAL} writers with the doorbell, and a worker that listens for it",
            unit="transactions/s",
            values=found["heard"],
            bar="≥ 0.95",
            reference="without a doorbell",
            references=found["quiet"],
        ),
        Figure(
            name=f"{SEVERAL} writers with the doorbell, and a worker that delivers",
            unit="transactions/s",
            values=found["bell"],
            reference="without a doorbell, five deliveries a second",
            references=found["silent"],
        ),
        Figure(
            name="one writer with a worker in its process",
            unit="transactions/s",
            values=found["embedded"],
            bar="≥ 0.90",
            reference="with none anywhere",
            references=found["alone"],
        ),
    ]


@contextmanager
def an_ear() -> Iterator[list[float]]:
    """Listen as a worker does, and do nothing about it; give when it rang."""
    rings: list[float] = []
    ended = threading.Event()

    def listen() -> None:
        ear = doorbell.ear("default")
        assert ear is not None
        ear.listen()
        while not ended.is_set():
            if ear.wait(0.1):
                rings.append(time.monotonic())
        ear.close()
        connection.close()

    with ThreadPoolExecutor(1) as thread:
        listening = thread.submit(listen)
        try:
            yield rings
        finally:
            ended.set()
            listening.result()


class Writers:
    """Processes that write at the same time; a context manager."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> Writers:
        command = [sys.executable, "-m", "tests.benchmarks.writing"]
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
            )
            for _ in range(self._number)
        ]
        return self

    def rate(self, seconds: float, outbox: dict[str, Any], *, embedded: bool = False) -> float:
        """Have all write for so long; return transactions a second."""
        order = Order(
            start=time.monotonic() + LEAD, seconds=seconds, outbox=outbox, embedded=embedded
        )
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(order)) + "\n")
            process.stdin.flush()
        return sum(self._answer(process) for process in self._processes) / seconds

    def _answer(self, process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a writer ended: exit code {process.wait()}")
        return int(answer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.communicate()  # the end of its input is its end
