"""``Halving``: which parts of a failed batch to call again, to find the events that fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

# Failed calls in a row after which it may be an outage. One event that fails causes no two in a
# row: the half without it succeeds.
OUTAGE_AFTER = 8
FIRST_SPLIT = 3  # calls: the whole and its two halves


class Halving:
    """Iterates over the parts to call, the whole first; ``note`` tells it how each call ended.

    It goes breadth first, so that a half without a fault ends a row of failures soon. It stops if
    both halves of the whole fail with the same type of exception, or after ``OUTAGE_AFTER``
    failures in a row. Single events are not split.
    """

    def __init__(self, whole: list[Any]) -> None:
        self._queue: deque[tuple[list[Any], BaseException | None]] = deque([(whole, None)])
        self._errors: list[type[BaseException] | None] = []  # of the parts so far
        self._failures = 0  # in a row

    def __iter__(self) -> Iterator[list[Any]]:
        while not self.is_over:
            self._errors.append(None)
            yield self._queue.popleft()[0]

    @property
    def is_over(self) -> bool:
        """Return whether nothing is to be called any more."""
        return not self._queue or self._is_outage

    def note(self, part: list[Any], error: BaseException | None) -> None:
        """Note how the call of the last part ended, if there was one; an error halves it."""
        self._errors[-1] = None if error is None else type(error)
        self._failures = 0 if error is None else self._failures + 1
        if error is not None and len(part) > 1:
            middle = (len(part) + 1) // 2
            self._queue += [(part[:middle], error), (part[middle:], error)]

    def rest(self) -> list[tuple[list[Any], BaseException | None]]:
        """Return the parts that are not called again, each with the error of a call with it."""
        return [*self._queue]

    @property
    def _is_outage(self) -> bool:
        if self._failures >= OUTAGE_AFTER:
            return True
        if len(self._errors) != FIRST_SPLIT:
            return False
        _, first, second = self._errors
        return first is not None and first is second
