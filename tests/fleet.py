"""Worker processes of a test: started, broken and replaced; and what their listeners testified.

Run as a program it is ``outbox_worker --processes N`` whose dead are replaced at once: tests kill
more often than any backoff would bear.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests import waiting

# A busy machine takes half a minute to start a process.
wait_until = partial(waiting.wait_until, within=60.0)

REPOSITORY = Path(__file__).parent.parent

WITNESS = "OUTBOX_TEST_WITNESS"  # the environment variable with the file's path
POISONED = 23  # exit code of a process that a poison event ended

END = 60.0  # seconds that a process gets to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that a listener left."""

    id: str
    type: str
    attempts: int
    source: str
    phase: str  # "start", "failed" or "end"
    pid: int
    at: float  # seconds since the epoch
    database: str = ""  # the alias it was delivered from
    held: int | None = None  # leases beside its own, where the listener looked


class Fleet:
    """The worker processes of one test, their log and their witness."""

    def __init__(self, environment: dict[str, str], directory: Path, **outbox: Any) -> None:
        self.witness, self.log = directory / "witness", directory / "log"
        self.witness.touch()
        self._environment = {
            **environment,
            WITNESS: str(self.witness),
            "DJANGO_SETTINGS_MODULE": "tests.fault_settings",
            "OUTBOX_TEST_SETTINGS": json.dumps(outbox),
        }
        self._processes: list[psutil.Popen] = []

    def start(self, *arguments: str, **environment: str) -> psutil.Popen:
        """Start ``outbox_worker``."""
        return self._start("django", "outbox_worker", *arguments, **environment)

    def start_several(self, number: int) -> psutil.Popen:
        """Start a supervisor of ``number`` workers, which replaces each that dies."""
        return self._start("tests.fleet", str(number))

    def _start(self, module: str, *arguments: str, **environment: str) -> psutil.Popen:
        with self.log.open("ab") as log:
            process = psutil.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**self._environment, **environment},
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def end(self, process: psutil.Popen) -> int:
        """Ask a process to end; return its exit code."""
        process.send_signal(signal.SIGTERM)
        return int(process.wait(END))

    def kill_all(self) -> None:
        """End what still runs, children first asked, so that none is left behind."""
        for process in self._processes:
            family = [*children(process), process]
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(family, timeout=END)

    def lines(self) -> list[Line]:
        """Return what listeners have left, but for a line that is just being written."""
        lines = self.witness.read_text().splitlines(keepends=True)
        return [Line(**json.loads(each)) for each in lines if each.endswith("\n")]

    def starts(self, event_type: str | None = None) -> Counter[str]:
        """How many times each event was started."""
        lines = self.lines()
        wanted = (event_type,) if event_type else {each.type for each in lines}
        return Counter(each.id for each in lines if each.phase == "start" and each.type in wanted)

    def logged(self, text: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if text in line]


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def wait_for_end_of(process: psutil.Popen, within: float = END) -> int:
    """Wait for a process that ends by itself; return its exit code."""
    code = wait_until(
        lambda: (process.poll(),) if process.poll() is not None else None,
        within=within,
        what="the process that should have ended",
    )
    assert code is not None
    return int(code[0])


def main(processes: int) -> int:
    import django

    django.setup()

    from django_outbox.process import main, supervisor

    supervisor.BACKOFF = (0.0, 0.0)
    return main.run([None], processes=processes, purge=False)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    os._exit(code)
