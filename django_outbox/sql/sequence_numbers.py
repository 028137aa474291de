"""Number the events of each stream (the events of one key) in the order of their commits.

The upsert of a key's row blocks other writers of the key until commit. So the order of ``seq`` is
the order of commits, whatever the clocks say. ``seq`` is also the stream's version: every change
that makes an event pending raises it in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..conf import current
from ..events import split_stream
from ..queue_settings import DEFAULT_QUEUE
from .statements import Statements
from .values import marks

# A stream, how many numbers it needs, and the queue of its first new event; None: it gets none.
Place = tuple[str, int, str | None]
Places = Sequence[Place]

STREAMS = 190  # per statement: with five parameters each, below the limit of 999 in old SQLite

# New due time of a stream that gets an event. Here a head that waits for its retry blocks it:
UNLESS_SET = "COALESCE({row}due_at, {now})"
# Here it does not, and only the due time of a lease is kept:
UNLESS_LEASED = "CASE WHEN {row}locked_by IS NULL THEN {now} ELSE {row}due_at END"


# New queue of a stream that gets an event, which is its head if nothing else was pending:
IF_IDLE = "CASE WHEN {row}due_at IS NULL THEN {new} ELSE {row}queue END"


class SequenceNumbers(Statements):
    def number(self, places: Places) -> dict[str, int]:
        """Take numbers in each stream and make it due; return the last number of each.

        A new stream starts at the clock, so that a key's numbers never go back after a purge.
        """
        last: dict[str, int] = {}
        for some in _parts(places):
            last.update(self._number(some))
        return last

    def touch(self, places: Places) -> None:
        """Give streams that get events a new version, and make them due."""
        for some in _parts(places):
            self._run(*self._upsert(some, due=due_of_followers()))

    def wake_streams(self, streams: Sequence[str], *, queue: str = DEFAULT_QUEUE) -> None:
        """Give streams a new version and make them due, even if purged or waiting for a retry.

        ``queue`` is that of streams in which nothing was pending.
        """
        for places in _parts([(stream, 1, queue) for stream in dict.fromkeys(streams)]):
            self._run(*self._upsert(places, due=UNLESS_LEASED))

    def _number(self, places: Places) -> Mapping[str, int]:
        self._run(*self._upsert(places, due=due_of_followers()))
        streams = [stream for stream, _, _ in places]
        return dict(
            self._rows(
                f"SELECT stream, seq FROM {self._stream} WHERE stream IN ({marks(streams)})",
                streams,
            )
        )

    def _upsert(self, places: Places, *, due: str) -> tuple[str, list[Any]]:
        """Return the statement and its parameters. It locks rows in the order of ``places``."""
        rows = ", ".join(
            f"(%s, %s, %s, {self.now_micros} + %s, {'NULL' if queue is None else self.now}, %s)"
            for _, _, queue in places
        )
        idle = IF_IDLE.format(row="st.", new="EXCLUDED.queue")
        due = due_unless_left_out(due, places, new="EXCLUDED.due_at")
        sql = (
            f"INSERT INTO {self._stream} AS st "
            f"(stream, key, lane, seq, due_at, queue) VALUES {rows} "
            # The clock is constant within a statement, so it cancels out: the count remains.
            f"ON CONFLICT (stream) DO UPDATE SET queue = {idle}, "
            f"seq = st.seq + 1 + EXCLUDED.seq - {self.now_micros}, "
            f"due_at = {due.format(row='st.', now=self.now)}"
        )
        return sql, upsert_values(places)


def upsert_values(places: Places) -> list[Any]:
    return [
        value
        for stream, count, queue in places
        for value in (stream, *reversed(split_stream(stream)), count - 1, queue or DEFAULT_QUEUE)
    ]


def due_unless_left_out(due: str, places: Places, *, new: str) -> str:
    """Return the due time of streams of which some get no event; ``new`` is NULL for these."""
    if all(queue is not None for _, _, queue in places):
        return due
    return f"CASE WHEN {new} IS NULL THEN {{row}}due_at ELSE {due} END"


def due_of_followers() -> str:
    settings = current()
    if settings.MODE == "writer_only":  # no worker leases; the purge needs the last write's time
        return UNLESS_LEASED
    return UNLESS_SET if settings.STOP_ON_FIRST_FAILURE else UNLESS_LEASED


def _parts(places: Places) -> Iterator[Places]:
    """Split by statement. Streams are sorted: writers of the same ones wait and do not deadlock."""
    places = sorted(places)
    for start in range(0, len(places), STREAMS):
        yield places[start : start + STREAMS]
