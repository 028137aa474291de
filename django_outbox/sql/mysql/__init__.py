"""MySQL and MariaDB: no partial indexes, no UPDATE … RETURNING, and scanned rows are locked."""

from __future__ import annotations

from ..base.dialect import Dialect
from .claim import MySQLEventLeases
from .settle import MySQLSettling
from .streams import MySQLStreams
from .upkeep import MySQLUpkeep


class MySQL(MySQLSettling, MySQLEventLeases, MySQLStreams, MySQLUpkeep, Dialect):
    now = "UTC_TIMESTAMP(6)"
    now_plus = "UTC_TIMESTAMP(6) + INTERVAL %s SECOND"
    # UNIX_TIMESTAMP() would read the session's local time, in which one hour a year repeats.
    now_micros = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    key = "`key`"
    # MariaDB sorted all rows of the queue: the name is a literal of the connection's collation, so
    # it does not take the column for constant.
    by_queue = ""
