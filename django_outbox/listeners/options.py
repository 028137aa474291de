"""The options of a listener, and what is wrong with a value: types, queue, titles, batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ..exceptions import seconds
from ..queue_settings import NAME as QUEUE_NAME

TITLE_LENGTH: Final = 255  # characters of a title, in the column of an event
MAX_SIZE = 500  # events in a call; a settle writes as many rows at best
MAX_WITHIN = 1.0  # seconds
SHRINK = 4  # a batch of events that failed once is at most this part of a fresh one
FAILURES_BEFORE_ALONE = 2


@dataclass(frozen=True, slots=True)
class Batching:
    """The options of a batch listener."""

    size: int  # events in a call, at most
    within: float = 0.0  # seconds that the first event may wait for more
    per_key: int = 1  # consecutive events of one key in a call, at most

    def size_after(self, attempts: int, max_attempts: int) -> int:
        """Return the largest batch for an event with so many failed executions.

        Its last execution is its own: an event whose neighbour fails must not die of it.
        """
        if attempts == 0:
            return self.size
        if attempts >= FAILURES_BEFORE_ALONE or attempts + 1 >= max_attempts:
            return 1
        return max(self.size // SHRINK, 1)


def batching(batch: Any, within: Any, per_key: Any) -> Batching | None:
    """Return the options as given to ``@listener``; None if ``batch`` is.

    Raises ``ValueError`` for options that no call can have.
    """
    if batch is None:
        for name, value, default in (("within", within, 0.0), ("per_key", per_key, 1)):
            if value != default:
                raise ValueError(f"{name} is {value!r} without batch; expected batch= too.")
        return None
    _check_count("batch", batch, MAX_SIZE)
    _check_count("per_key", per_key, batch)
    wait = seconds(within, of="within")
    if wait > MAX_WITHIN:
        raise ValueError(f"within is {within!r}; expected 0 to {MAX_WITHIN:g} seconds.")
    return Batching(batch, wait, per_key)


def _check_count(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}; expected a whole number from 1 to {most}.")


def check_queue(name: Any) -> None:
    """Raise ``ValueError`` for what cannot be the name of a queue."""
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise ValueError(f"queue is {name!r}; expected the name of a queue in OUTBOX['QUEUES'].")


def former_titles(given: Any) -> tuple[str, ...]:
    """Return the option ``formerly``; ``ValueError`` unless it is a list or tuple of titles."""
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"formerly is {given!r}; expected a tuple or list of titles.")
    for each in given:
        if not isinstance(each, str) or not 1 <= len(each) <= TITLE_LENGTH:
            raise ValueError(
                f"formerly has {each!r}; expected titles of 1 to {TITLE_LENGTH} characters, such "
                "as 'order.placed mail'."
            )
    return tuple(given)
