"""SQLite: one writer at a time; times are UTC text of 26 characters, by the host's clock."""

from __future__ import annotations

from ..base.dialect import Dialect
from .claim import SQLiteEventLeases
from .upkeep import SQLiteUpkeep


class SQLite(SQLiteEventLeases, SQLiteUpkeep, Dialect):
    """The clock is SQLite's own, so that all processes share it. Its resolution is 1 ms."""

    row_lock = ""
    now = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now')"
    now_plus = "strftime('%%Y-%%m-%%d %%H:%%M:%%f000', 'now', %s || ' seconds')"
    now_micros = (
        "(CAST(strftime('%%s', 'now') AS INTEGER) * 1000000 "
        "+ CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000)"
    )
