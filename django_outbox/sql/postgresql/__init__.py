"""PostgreSQL: one statement per claim, array parameters and SKIP LOCKED."""

from __future__ import annotations

from ..base.dialect import Dialect
from .claim import PostgresEventLeases
from .settle import PostgresSettling
from .streams import PostgresStreams
from .upkeep import PostgresUpkeep


class PostgreSQL(PostgresSettling, PostgresEventLeases, PostgresStreams, PostgresUpkeep, Dialect):
    now = "statement_timestamp()"
    now_plus = "statement_timestamp() + %s * interval '1 second'"
    now_micros = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
    owned_by_key = " OFFSET 0"  # keeps the planner from making the subquery a join
