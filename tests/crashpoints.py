"""Crash points: ``OUTBOX_CRASH_AT=point[:N]`` ends a worker process there, the N-th time.

``testapp`` installs this in processes that have the variable; the package itself does not know it.
A point whose function is gone fails at the start, so that no test passes for lack of a crash.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

VARIABLE = "OUTBOX_CRASH_AT"
KILLED = 137  # the exit code of a process that SIGKILL ended, as a shell sees it
SOME = 3  # decisions that must wait before a crash in the middle of settling them: one per thread


def install() -> None:
    """Install the crash point that the environment names, if any."""
    if named := os.environ.get(VARIABLE):
        point, _, nth = named.partition(":")
        POINTS[point](Fuse(int(nth or 1)))


class Fuse:
    """Ends the process at the N-th call of ``light()``, which any thread may call."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self._lock = threading.Lock()

    def light(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                os._exit(KILLED)


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., object] | None = None,
    after: Callable[[Any], object] | None = None,
) -> None:
    """Wrap a method: call ``before`` with its arguments and ``after`` with its result."""
    method = getattr(owner, name)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        answer = method(*args, **kwargs)
        if after is not None:
            after(answer)
        return answer

    setattr(owner, name, wrapped)


def after_claim(fuse: Fuse) -> None:
    """Crash when leases are committed but no thread of this process has them yet."""

    def after(rows: Any) -> None:
        if rows:
            fuse.light()

    around(_dialect(), "claim", after=after)


def after_hot_claim(fuse: Fuse) -> None:
    """Crash at the same point, with leases of events that this process itself wrote."""
    claims = threading.local()

    def before(self: Any, claim: Any) -> None:
        claims.hot = claim.ids is not None

    def after(rows: Any) -> None:
        if rows and claims.hot:
            fuse.light()

    around(_dialect(), "claim", before=before, after=after)


def before_listener(fuse: Fuse) -> None:
    from django_outbox.delivery.call import Call

    around(Call, "make", before=lambda *args: fuse.light())


def after_listener(fuse: Fuse) -> None:
    """Crash when the effect is there but the listener's outcome is not known yet."""
    from django_outbox.delivery.call import Call

    around(Call, "make", after=lambda answer: fuse.light())


def in_atomic_settle(fuse: Fuse) -> None:
    """Crash when an atomic listener's effect and decision are written but not committed."""
    from django_outbox.delivery.delivery import Delivery

    around(Delivery, "commit", after=lambda written: fuse.light())


def before_settle(fuse: Fuse) -> None:
    from django_outbox.worker import settler

    around(settler, "write", before=lambda *args, **kwargs: fuse.light())


def after_settle(fuse: Fuse) -> None:
    """Crash when the decisions are committed but this process still holds the leases."""
    from django_outbox.worker import settler

    around(settler, "write", after=lambda nothing: fuse.light())


def mid_batch(fuse: Fuse) -> None:
    """Crash when the DONE events of a batch are settled but its retries are not."""
    from django_outbox.worker.settler import Settler

    def wait_for_some(self: Any) -> None:
        while len(self._decisions) < SOME:
            time.sleep(0.005)  # between two checks

    around(Settler, "step", before=wait_for_some)
    finish = Settler._finish

    def half_way(self: Any, part: Any) -> None:
        finish(self, part)
        if self._unsettled:
            fuse.light()

    Settler._finish = half_way  # type: ignore[method-assign]


def in_heartbeat(fuse: Fuse) -> None:
    """Crash when leases are renewed but not committed."""
    renewing = threading.local()

    def begin(*args: Any, **kwargs: Any) -> None:
        renewing.now = True

    def end(answer: Any) -> None:
        renewing.now = False

    def after(count: Any) -> None:
        if getattr(renewing, "now", False):
            fuse.light()

    around(_dialect(), "renew", before=begin, after=end)
    around(_dialect(), "_run", after=after)


def in_purge(fuse: Fuse) -> None:
    """Crash when one batch is deleted and the next is not."""
    from django_outbox.worker import housekeeper

    batches = vars(housekeeper)["purge_events"]

    def until_the_fuse(alias: str, **given: Any) -> Iterator[int]:
        for count in batches(alias, **given):
            fuse.light()
            yield count

    vars(housekeeper)["purge_events"] = until_the_fuse


POINTS: dict[str, Callable[[Fuse], None]] = {
    point.__name__: point
    for point in (
        after_claim,
        after_hot_claim,
        before_listener,
        after_listener,
        in_atomic_settle,
        before_settle,
        after_settle,
        mid_batch,
        in_heartbeat,
        in_purge,
    )
}


def _dialect() -> Any:
    """Return the dialect class whose statements the worker runs."""
    from django.db import connection

    from django_outbox.sql import dialect_of

    return type(dialect_of(connection))
