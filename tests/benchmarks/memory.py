"""Memory of a worker process over a long drain: what it holds is bounded."""

from __future__ import annotations

import psutil

from . import backlog
from .figures import Figure
from .scale import Scale
from .witness import STEP, Witness
from .workers import WorkerProcess


def run(scale: Scale, witness: Witness) -> list[Figure]:
    backlog.fill(scale.memory_events)
    witness.clear()
    lines = scale.memory_events // STEP - 1
    looks: list[tuple[int, float]] = []  # lines so far, resident MB
    with WorkerProcess() as worker:
        process = psutil.Process(worker.process.pid)

        def drained() -> bool:
            looks.append((len(witness), process.memory_info().rss / 2**20))
            return looks[-1][0] >= lines

        worker.wait_for(drained, "end of the calls", every=0.05)
    tenth = lines // 10
    return [
        Figure(
            name=f"resident memory at the end of a drain of {scale.memory_events:,} events",
            unit="MB",
            values=[looks[-1][1]],
            reference="after its first tenth",
            bar="≤ 1.1",
            references=[next(memory for done, memory in looks if done >= tenth)],
        )
    ]
