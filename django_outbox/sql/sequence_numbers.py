"""Number the events of each stream (the events of one key) in the order of their commits.

The upsert of a key's row blocks other writers of the key until commit. So the order of ``seq`` is
the order of commits, whatever the clocks say. ``seq`` is also the stream's version: every change
that makes an event pending raises it in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..conf import current
from ..events import split_stream
from ..queue_settings import DEFAULT_QUEUE, PARKED
from .statements import Statements
from .values import SQL, in_parts

# A stream, how many numbers it needs, and the queue of its first new event; None: it gets none.
Place = tuple[str, int, str | None]
Places = Sequence[Place]

STREAMS = 190  # per statement: with five parameters each, below the 999 that Django knows of SQLite

# New due time of a stream that gets an event. Here a head that waits for its retry blocks it:
UNLESS_SET = "COALESCE({row}due_at, {now})"
# Here it does not, and only the due time of a lease is kept:
UNLESS_LEASED = "CASE WHEN {row}locked_by IS NULL THEN {now} ELSE {row}due_at END"

# When its queue changes: if nothing was pending in it, or if it is parked, too.
IDLE = "{row}due_at IS NULL"
IDLE_OR_PARKED = f"({IDLE} OR {{row}}queue LIKE '{PARKED}%%')"


class SequenceNumbers(Statements):
    on_conflict = "ON CONFLICT (stream) DO UPDATE SET"
    noted = "{}"  # SQL for a number that the response to the statement is to have

    def number(self, places: Places) -> dict[str, int]:
        """Take numbers in each stream and make it due; return the last number of each.

        A new stream starts at the clock, so that a key's numbers never go back after a purge.
        """
        return {name: seq for some in _parts(places) for name, seq in self._number(some).items()}

    def touch(self, places: Places) -> None:
        """Give streams that get events a new version, and make them due."""
        for some in _parts(places):
            self._run(*self._upsert(some, due=due_of_followers()))

    def wake_streams(self, streams: Sequence[str], *, queue: str = DEFAULT_QUEUE) -> None:
        """Give streams a new version and make them due, even if purged or waiting for a retry.

        ``queue`` is that of streams in which nothing was pending, and of those that are parked,
        as another event may be the first one now.
        """
        for places in _parts([(stream, 1, queue) for stream in dict.fromkeys(streams)]):
            self._run(*self._upsert(places, due=UNLESS_LEASED, moved=IDLE_OR_PARKED))

    def _number(self, places: Places) -> Mapping[str, int]:
        upsert, params = self._upsert(places, due=due_of_followers())
        return dict(self._rows(f"{upsert} RETURNING stream, seq", params))

    def _upsert(self, places: Places, *, due: str, moved: str = IDLE) -> SQL:
        """Return the statement and its parameters. It locks rows in the order of ``places``."""
        row, (alias, new) = f"{self._stream}.", self._new_row
        seq = self.noted.format(f"{self.now_micros} + %s")
        rows = ", ".join(
            f"(%s, %s, %s, {seq}, {'NULL' if queue is None else self.now}, %s)"
            for _, _, queue in places
        )
        if any(queue is None for _, _, queue in places):  # some get no event
            due = f"CASE WHEN {new.format('due_at')} IS NULL THEN {{row}}due_at ELSE {due} END"
        # The clock is constant within a statement, so it cancels out: the count remains.
        next_seq = self.noted.format(f"{row}seq + 1 + {new.format('seq')} - {self.now_micros}")
        sql = f"""INSERT INTO {self._stream} (stream, {self.key}, lane, seq, due_at, queue)
            VALUES {rows}{alias} {self.on_conflict}
            queue = CASE WHEN {moved.format(row=row)} THEN {new.format("queue")}
                ELSE {row}queue END,
            seq = {next_seq}, due_at = {due.format(row=row, now=self.now)}"""
        return sql, [
            value
            for name, count, queue in places
            for value in (name, *reversed(split_stream(name)), count - 1, queue or DEFAULT_QUEUE)
        ]

    @property
    def _new_row(self) -> tuple[str, str]:
        """Return the alias of the row that was to be inserted, and the SQL of its columns."""
        return "", "EXCLUDED.{}"


def due_of_followers() -> str:
    settings = current()
    if settings.MODE == "writer_only":  # no worker leases; the purge needs the last write's time
        return UNLESS_LEASED
    return UNLESS_SET if settings.STOP_ON_FIRST_FAILURE else UNLESS_LEASED


def _parts(places: Places) -> Iterator[Places]:
    """Split by statement. Streams are sorted: writers of the same ones wait and do not deadlock.

    The keys' own come first, as in a write: other lanes may have names that sort before ":".
    """
    return in_parts(sorted(places, key=lambda each: (each[0][0] != ":", each)), STREAMS)
