"""MySQL and MariaDB: sequence numbers and leases of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError

from ...conf import index_name
from ..base.insert import Inserting
from ..base.sequence_numbers import (
    IF_IDLE,
    Places,
    due_of_followers,
    due_unless_left_out,
    upsert_values,
)
from ..base.streams import StreamLeases
from ..values import StreamQuery

DUPLICATE_ENTRY = 1062
SELECTS = 50  # in a UNION: with more, each costs twice as much to plan


class MySQLStreams(StreamLeases, Inserting):
    # -- sequence numbers --------------------------------------------------------------------------

    def _insert(self, sql: str, params: list[Any], *, may_clash: bool) -> int:
        # INSERT IGNORE would hide other errors too; error 1062 leaves the transaction usable.
        try:
            return super()._insert(sql, params, may_clash=False)
        except IntegrityError as error:
            if may_clash and error.args[0] == DUPLICATE_ENTRY:
                return 0
            raise

    def _number(self, places: Places) -> Mapping[str, int]:
        if len(places) > 1:
            return super()._number(places)
        sql, params = self._upsert(places, due=due_of_followers())
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return {places[0][0]: int(cursor.lastrowid)}  # part of the statement's response

    def _upsert(self, places: Places, *, due: str) -> tuple[str, list[Any]]:
        stream = self._stream
        rows = ", ".join(
            f"(%s, %s, %s, LAST_INSERT_ID({self.now_micros} + %s), "
            f"{'NULL' if queue is None else self.now}, %s)"
            for _, _, queue in places
        )
        # MySQL warns about VALUES() on each statement; MariaDB has no row alias.
        is_mariadb = self.connection.mysql_is_mariadb  # type: ignore[attr-defined]
        alias, new = ("", "VALUES({})") if is_mariadb else (" AS new", "new.{}")
        idle = IF_IDLE.format(row=f"{stream}.", new=new.format("queue"))
        due = due_unless_left_out(due, places, new=new.format("due_at"))
        sql = (
            f"INSERT INTO {stream} (stream, `key`, lane, seq, due_at, queue) "
            f"VALUES {rows}{alias} ON DUPLICATE KEY UPDATE queue = {idle}, "
            f"seq = LAST_INSERT_ID({stream}.seq + 1 + {new.format('seq')} - {self.now_micros}), "
            f"due_at = {due.format(row=f'{stream}.', now=self.now)}"
        )
        return sql, upsert_values(places)

    # -- leases ------------------------------------------------------------------------------------

    def _next_in_order(self, read: StreamQuery) -> list[str]:
        due = f" AND deliver_at <= {self.now}" if read.only_due_retries else ""
        return ["status = 0", f"status = 2{due}", *["status = 3"] * read.dead_too]  # as the index

    @property
    def _events_in_order(self) -> str:
        # For a key with half of all rows, the optimizer would scan and sort them despite LIMIT.
        return f"{self._event} FORCE INDEX ({index_name('outbox_event_stream')})"
