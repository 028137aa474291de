"""Upkeep: pauses, named leases, deletions, and what checks ask of a server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .claim import EventLeases
from .insert import Inserting
from .values import PRIMARY_KEYS, PauseTimes, seconds_between


class Upkeep(EventLeases, Inserting):
    always: Mapping[str, str] = {}  # by table, a condition that a DELETE by primary key needs

    # -- pauses ------------------------------------------------------------------------------------

    def pauses(self) -> dict[tuple[str, str], PauseTimes]:
        """Return every pause by its kind and name; of kind "operation" too, if one is open.

        A worker asks for both together, because it asks about once a second.
        """
        now = self._in_utc(self.now)
        sql = f"""SELECT id, kind, name, {now}, {self._in_utc("until")}, pause_seconds
            FROM {self._table("outbox_pause")}
            UNION ALL SELECT id, 'operation', '', {now}, NULL, NULL
            FROM {self._table("outbox_operation")} WHERE state = 'open'"""
        return {
            (kind, name): PauseTimes(pause, seconds_between(now, until), length or 0.0)
            for pause, kind, name, now, until, length in self._rows(sql)
        }

    # -- circuit breakers --------------------------------------------------------------------------

    def open_breaker(self, *, queue: str, pause: float, reason: str) -> bool:
        """Open a queue's circuit breaker for ``pause`` seconds; return False if it is open."""
        sql = f"""INSERT INTO {self._table("outbox_pause")}
                (kind, name, reason, paused_at, paused_by, until, pause_seconds)
            VALUES ('breaker', %s, %s, {self.now}, '', {self.now_plus}, %s)"""
        return self._insert(sql, [queue, reason, pause, pause], may_clash=True) == 1

    def probe_breaker(self, *, queue: str, lease: float) -> bool:
        """Win the probe of a breaker whose pause is over, for ``lease`` seconds; or lose it."""
        sql = f"""UPDATE {self._table("outbox_pause")} SET until = {self.now_plus}
            WHERE kind = 'breaker' AND name = %s AND until <= {self.now}"""
        return self._run(sql, [lease, queue]) == 1

    def extend_breaker(self, *, queue: str, pause: float, kept: float) -> None:
        """End a probe: pause for another ``pause`` seconds; remember ``kept`` as its length."""
        sql = f"""UPDATE {self._table("outbox_pause")} SET until = {self.now_plus},
            pause_seconds = %s WHERE kind = 'breaker' AND name = %s"""
        self._run(sql, [pause, kept, queue])

    def close_breaker(self, *, queue: str) -> bool:
        """Close a queue's circuit breaker; return whether it was open."""
        sql = f"DELETE FROM {self._table('outbox_pause')} WHERE kind = 'breaker' AND name = %s"
        return self._run(sql, [queue]) == 1

    # -- named leases ------------------------------------------------------------------------------

    def take_lease(self, *, name: str, me: str, lease: float) -> bool:
        """Claim or renew the named lease for ``lease`` seconds; return whether ``me`` holds it."""
        table = self._table("outbox_lease")
        sql = f"""UPDATE {table} SET locked_by = %s, locked_until = {self.now_plus}
            WHERE name = %s
            AND (locked_by = %s OR locked_by IS NULL OR locked_until <= {self.now})"""
        if self._run(sql, [me, lease, name, me]):
            return True
        made = self._insert(f"INSERT INTO {table} (name) VALUES (%s)", [name], may_clash=True)
        return made == 1 and self.take_lease(name=name, me=me, lease=lease)

    def note_lease(self, *, name: str, me: str, lease: float | None, state: str) -> bool:
        """Save the state of a named lease; renew it for ``lease`` seconds, or with None release it.

        Return whether ``me`` held it.
        """
        held, given = ("%s", self.now_plus), [me, lease]
        if lease is None:
            held, given = ("NULL", "NULL"), []
        sql = f"""UPDATE {self._table("outbox_lease")} SET state = %s, locked_by = {held[0]},
            locked_until = {held[1]} WHERE name = %s AND locked_by = %s"""
        return self._run(sql, [state, *given, name, me]) == 1

    # -- deletions ---------------------------------------------------------------------------------

    def delete(self, table: str, *, ids: Sequence[Any]) -> int:
        """Delete rows that the caller has locked, by primary key; return how many."""
        if not ids:
            return 0
        where, given = self._one_of(ids, PRIMARY_KEYS[table])
        from_table = self.deleted_by_id.format(self._table(table))
        return self._run(f"DELETE {from_table} WHERE {where}{self.always.get(table, '')}", given)

    # -- questions to the server -------------------------------------------------------------------

    def failing_isolation(self) -> str | None:
        """Return the isolation level if writers that waited for a key fail at it, else None."""
        return None

    def unstorable(self, texts: Iterable[str]) -> str | None:
        """Return a character that this connection cannot send unchanged; None: it can send all.

        Costs no statement. Here, every character can be sent or is refused.
        """
        return None

    def weak_charset(self) -> str | None:
        """Return the connection's charset if it does not have every character."""
        return None

    def variables(self, *names: str) -> dict[str, str]:
        """Return settings of a MySQL server by name; none of a server that has no such settings."""
        return {}

    def estimated_rows(self) -> int:
        """Return the approximate number of events by the database's statistics; 0: unknown."""
        return max([int(row[0] or 0) for row in self._rows(*self._estimate())], default=0)

    @abstractmethod
    def _estimate(self) -> tuple[str, list[Any]]:
        """Return the SELECT of the approximate number of events, and its parameters."""

    # -- connections of the engine -----------------------------------------------------------------

    @abstractmethod
    def prepare_engine(self, settings: dict[str, Any], *, lock_wait: float) -> None:
        """Change an engine thread's copied settings before it connects; ``lock_wait``: seconds."""

    def cluster(self) -> str | None:
        """Return the kind of cluster in which several nodes take writes; None if it is in none."""
        return None

    def begin_session(self) -> bool:
        """Set up a session of a worker; return whether other nodes take writes, too."""
        return False

    def guard_engine(self) -> None:
        """Set up what an engine thread's connection needs and settings cannot express."""
