"""Virtual locks, threads, queues, clocks and event loops; ``install`` puts them into the library.

Call it before anything else is imported. From then on nothing in this process waits in the kernel.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Task, scheduler

MEANS_NO_TIMEOUT = (None, -1)


class Lock:
    """A lock that several threads may want; who gets it, the scheduler chooses."""

    def __init__(self) -> None:
        self.owner: Task | None = None
        self.depth = 0
        self.waiting: dict[Task, None] = {}

    def acquire(self, blocking: bool = True, timeout: float | None = -1) -> bool:
        scheduler.maybe_give_way()
        me = scheduler.current
        while self.owner is not None:
            if not blocking:
                return False
            self.waiting[me] = None
            limited = None if timeout in MEANS_NO_TIMEOUT else timeout
            if not scheduler.block(limited) and limited is not None:
                self.waiting.pop(me, None)
                return False
        self.owner, self.depth = me, 1
        return True

    def release(self) -> None:
        if self.owner is None:
            raise RuntimeError("release unlocked lock")
        self.owner, self.depth = None, 0
        if self.waiting:
            scheduler.wake_all(self.waiting)

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self.owner is scheduler.current

    def _at_fork_reinit(self) -> None:
        self.owner, self.depth = None, 0


class RLock(Lock):
    """A lock that its owner may take again."""

    def acquire(self, blocking: bool = True, timeout: float | None = -1) -> bool:
        if self.owner is scheduler.current:
            self.depth += 1
            return True
        return super().acquire(blocking, timeout)

    def release(self) -> None:
        if self.owner is not scheduler.current:
            raise RuntimeError("cannot release un-acquired lock")
        if self.depth > 1:
            self.depth -= 1
        else:
            super().release()


class Condition:
    """A condition variable."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: dict[Task, None] = {}

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, me = self._lock, scheduler.current
        if lock.owner is not me:
            raise RuntimeError("cannot wait on un-acquired lock")
        depth = lock.depth
        lock.depth = 1
        self._waiting[me] = None
        lock.release()
        woken = scheduler.block(timeout)
        self._waiting.pop(me, None)
        lock.acquire()
        lock.depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else scheduler.monotonic() + timeout
        while not (found := predicate()):
            left = None if until is None else until - scheduler.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for task in list(self._waiting)[:n]:
            del self._waiting[task]
            scheduler.wake(task)

    def notify_all(self) -> None:
        scheduler.wake_all(self._waiting)


class Event:
    """A flag that threads wait for."""

    def __init__(self) -> None:
        self._flag = False
        self._waiting: dict[Task, None] = {}

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        scheduler.wake_all(self._waiting)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            self._waiting[scheduler.current] = None
            scheduler.block(timeout)
            self._waiting.pop(scheduler.current, None)
        return self._flag


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: dict[Task, None] = {}

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiting:
            task = next(iter(self._waiting))
            del self._waiting[task]
            scheduler.wake(task)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = None if timeout is None else scheduler.monotonic() + timeout
        while not self._items:
            left = None if until is None else until - scheduler.monotonic()
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._waiting[scheduler.current] = None
            scheduler.block(left)
            self._waiting.pop(scheduler.current, None)
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Local:
    """``threading.local``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Local:
        self = object.__new__(cls)
        object.__setattr__(self, "_given", (args, kwargs))
        return self

    def __getattribute__(self, name: str) -> Any:
        values = _values_of(self)
        if name == "__dict__":
            return values
        return values[name] if name in values else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _values_of(self)[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del _values_of(self)[name]
        except KeyError:
            raise AttributeError(name) from None


def _values_of(local: Local) -> dict[str, Any]:
    """Return what a ``local`` holds for the running thread."""
    values = scheduler.current.locals.get(local)
    if values is None:
        values = scheduler.current.locals[local] = {}
        if (kind := type(local)).__init__ is not object.__init__:
            args, kwargs = object.__getattribute__(local, "_given")
            kind.__init__(local, *args, **kwargs)
    return values


class Thread:
    """``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Any = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
        context: Any = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or getattr(target, "__name__", "thread"), daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = scheduler.spawn(self.run, self.name)
        self._task.thread = self
        scheduler.maybe_give_way()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and not self._task.is_done:
            joiners = self._task.locals.setdefault("joiners", {})
            joiners[scheduler.current] = None  # type: ignore[index]
            scheduler.block(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    native_id = ident


def current_thread() -> Any:
    task = scheduler.current
    if task.thread is None:
        task.thread = Thread(name=task.name)
        task.thread._task = task
    return task.thread


class EventLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, whose clock is the scheduler's."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._waiting: Task | None = None
        self._is_woken = False

    def select(self, timeout: float | None) -> list[Any]:
        if not self._is_woken and (timeout is None or timeout > 0):
            self._waiting = scheduler.current
            scheduler.block(timeout)
            self._waiting = None
        else:
            scheduler.maybe_give_way()
        self._is_woken = False
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._is_woken = True
        if self._waiting is not None:
            scheduler.wake(self._waiting)

    def time(self) -> float:
        return scheduler.monotonic()


def install() -> None:
    """Replace what threads, clocks and randomness are made of, for the whole process."""
    threading.Lock = threading._allocate_lock = Lock  # type: ignore[misc,attr-defined,assignment]
    threading.RLock = RLock  # type: ignore[misc,assignment]
    threading.Condition = Condition  # type: ignore[misc,assignment]
    threading.Event = Event  # type: ignore[misc,assignment]
    threading.Thread = Thread  # type: ignore[misc,assignment]
    threading.local = Local  # type: ignore[misc,assignment]
    threading.current_thread = current_thread
    threading.get_ident = _thread.get_ident = lambda: scheduler.current.number
    threading._active = {scheduler.main.number: threading.main_thread()}  # type: ignore[attr-defined]
    queue.SimpleQueue = SimpleQueue  # type: ignore[misc,assignment]
    asyncio.new_event_loop = asyncio.events.new_event_loop = EventLoop
    time.monotonic = time.perf_counter = scheduler.monotonic
    time.clock_gettime = lambda clock: scheduler.monotonic()
    time.process_time = lambda: 0.0
    time.sleep = scheduler.sleep
    time.time = scheduler.wall
    time.time_ns = lambda: int(scheduler.wall() * 1e9)
    os.urandom = secrets.token_bytes = random.randbytes  # type: ignore[assignment]
    secrets.token_hex = lambda nbytes=None: random.randbytes(nbytes or 32).hex()
    os.getpid = lambda: scheduler.current.process.pid
    socket.gethostname = lambda: "host"
