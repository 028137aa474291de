"""The scheduler: simulated processes and threads, one of which runs at a time, in virtual time.

A thread is a greenlet. Others may run where one waits, and, if the seed says so, where it takes a
lock or begins a statement. When all of them wait, the clock jumps to the next deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from heapq import heappop, heappush
from itertools import count
from typing import Any

from greenlet import getcurrent, greenlet

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)  # the database's clock when a history begins
START = 10_000.0  # seconds; the scheduler's clock when a history begins
TICK = 1e-6  # seconds that every wait lasts at least, so that none ends before its deadline
# Turns that one thread may take in a virtual second. The busiest takes a few hundred.
MAX_TURNS = 4000


class Stalled(Exception):
    """Every thread waits, and nothing will ever wake one."""


@dataclass(eq=False, kw_only=True)
class Process:
    """A simulated process: its threads share a clock, and are killed or suspended together."""

    name: str
    pid: int
    rate: float = 1.0  # seconds of its monotonic clock in a second
    offset: float = 0.0  # seconds by which that clock is ahead at the beginning
    wall_offset: float = 0.0  # seconds by which its time of day is ahead
    alive: bool = True
    suspended: bool = False
    held: list[Task] = field(default_factory=list)  # threads to go on after the suspension
    on_kill: list[Callable[[], None]] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)  # what a real process has as globals


class Task:
    """A thread."""

    def __init__(self, process: Process, name: str, number: int) -> None:
        self.process, self.name, self.number = process, name, number
        self.greenlet: Any = None
        self.thread: Any = None  # the object that ``threading.current_thread()`` returns
        self.token = 0  # of the wait that it is in; 0: it does not wait
        self.was_woken = False
        self.is_done = False
        self.locals: dict[Any, dict[str, Any]] = {}  # of ``threading.local``
        self.second, self.turns = 0.0, 0  # its turns since the virtual time ``second``
        self.quiet = False  # its locks let no other thread run


class Scheduler:
    """Chooses who runs; the only one of this process, reset for each history."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Begin a history; the thread that calls becomes the driver's."""
        self.random = random.Random(f"scheduler {seed}")
        self.now = START
        self.ready: list[Task] = []
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.order, self.numbers = count(1), count(1)
        self.preemption = 0.0  # probability that another thread runs where one takes a lock
        self.graveyard: list[Any] = []  # threads that ended: a greenlet must not be collected
        self.violation: Callable[[str, str], None] = lambda rule, text: None
        self.lines: list[str] | None = None  # of the trace, if it is kept
        self.digest = hashlib.blake2b(digest_size=12)
        self.driver = Process(name="driver", pid=1000)
        self.current = Task(self.driver, "driver", next(self.numbers))
        self.current.greenlet = getcurrent()
        self.main = self.current

    # -- clocks ----------------------------------------------------------------------------------

    def monotonic(self) -> float:
        process = self.current.process
        return process.offset + self.now * process.rate

    def wall(self) -> float:
        """Return the time of day of the running process, in seconds since 1970."""
        return self.database_time().timestamp() + self.current.process.wall_offset

    def database_time(self) -> datetime:
        return EPOCH + timedelta(seconds=self.now - START)

    # -- threads ---------------------------------------------------------------------------------

    def spawn(self, run: Callable[[], None], name: str, process: Process | None = None) -> Task:
        task = Task(process or self.current.process, name, next(self.numbers))

        def body() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - a thread that dies is a violation
                self.violation("crash", f"{task.name} died of {error!r}")
            task.is_done = True
            self.wake_all(task.locals.pop("joiners", {}))  # type: ignore[arg-type]
            self.switch()

        task.greenlet = greenlet(body, parent=self.main.greenlet)
        self.graveyard.append(task)
        self._make_ready(task)
        return task

    def kill(self, process: Process) -> None:
        """End a process at this moment, whatever its threads do; they never run again."""
        if not process.alive:
            return
        self.trace("kill", process.name)
        process.alive = False
        self.ready = [each for each in self.ready if each.process is not process]
        process.held.clear()
        for each in process.on_kill:
            each()
        if self.current.process is process:
            self.switch()

    def suspend(self, process: Process, seconds: float) -> None:
        """Stop all threads of a process for a while."""
        self.trace("suspend", process.name, seconds)
        process.suspended = True
        process.held += [each for each in self.ready if each.process is process]
        self.ready = [each for each in self.ready if each.process is not process]
        self.at(self.now + seconds, lambda: self._resume(process))
        if self.current.process is process:
            self.give_way()

    def _resume(self, process: Process) -> None:
        self.trace("resume", process.name)
        process.suspended = False
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    # -- waiting ---------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        heappush(self.timers, (when, next(self.order), act))

    def block(self, timeout: float | None = None) -> bool:
        """Wait until ``wake`` (True) or for ``timeout`` seconds of this process's clock (False)."""
        task = self.current
        token = task.token = next(self.order)
        task.was_woken = False
        if timeout is not None:
            seconds = max(timeout, 0.0) / task.process.rate
            self.at(self.now + seconds + TICK, lambda: self._expire(task, token))
        self.switch()
        return task.was_woken

    def _expire(self, task: Task, token: int) -> None:
        if task.token == token:
            task.token = 0
            self._make_ready(task)

    def wake(self, task: Task) -> None:
        if task.token:
            task.token, task.was_woken = 0, True
            self._make_ready(task)

    def wake_all(self, tasks: dict[Task, None]) -> None:
        for each in list(tasks):
            self.wake(each)
        tasks.clear()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.block(seconds)
        else:
            self.give_way()

    def give_way(self) -> None:
        """Let another thread run, or go on."""
        self._make_ready(self.current)
        self.switch()

    def maybe_give_way(self) -> None:
        if self.preemption and self.random.random() < self.preemption and not self.current.quiet:
            self.give_way()

    def _make_ready(self, task: Task) -> None:
        process = task.process
        if process.suspended:
            process.held.append(task)
        elif process.alive:
            self.ready.append(task)

    def switch(self) -> None:
        """Run the next thread; return when this one is chosen again."""
        me, task = self.current, self._choose()
        self._count_turn(task)
        if task is me:
            return
        loop = asyncio._get_running_loop()
        running = asyncio.current_task(loop) if loop is not None else None
        if loop is not None:  # Python keeps both for the real thread, of which there is one
            if running is not None:
                asyncio.tasks._leave_task(loop, running)  # type: ignore[attr-defined]
            asyncio._set_running_loop(None)
        self.current = task
        task.greenlet.switch()
        if loop is not None:
            asyncio._set_running_loop(loop)
            if running is not None:
                asyncio.tasks._enter_task(loop, running)  # type: ignore[attr-defined]

    def _choose(self) -> Task:
        while not self.ready:
            if not self.timers:
                raise Stalled
            when, _, act = heappop(self.timers)
            self.now = max(self.now, when)
            act()
        ready = self.ready
        place = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _count_turn(self, task: Task) -> None:
        if self.now > task.second + 1:
            task.second, task.turns = self.now, 0
        task.turns += 1
        if task.turns == MAX_TURNS and task is not self.main:
            self.violation("spin", f"{task.name} of {task.process.name} took {MAX_TURNS} turns")

    # -- the trace -------------------------------------------------------------------------------

    def trace(self, what: str, *about: Any) -> None:
        """Add a line to the history; its digest shows whether two histories are the same."""
        task = self.current
        line = f"{self.now - START:.6f} {task.process.name} {task.name} {what} {about}"
        self.digest.update(line.encode())
        if self.lines is not None:
            parts = " ".join(" ".join(map(str, about)).split())
            self.lines.append(f"{line[: -len(str(about))]}{parts}")


scheduler = Scheduler()
