"""SQLite with the scheduler's clock. Statements take time, wait for locks, stall, and get lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

from django.db.backends.sqlite3 import base

from tests.simulation.scheduler import Process, Task, scheduler

base.register_functions = lambda connection: None  # Django's hundred, of which none is used
LOCKED = ("database is locked", "database table is locked")


class Server:
    """What all connections share: the order of writers, who looks on, and what goes wrong."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.waiting: dict[Task, None] = {}  # threads that wait for the writers' lock
        self.changed: Callable[[], None] = lambda: None  # called after each statement
        # Seconds that a statement takes before it takes effect, and after that.
        self.before: Callable[[str], float] = lambda sql: 0.0
        self.after: Callable[[str], float] = lambda sql: 0.0
        # What a statement raises, which then has done nothing; ``bool``: in a transaction.
        self.fails: Callable[[str, Any, bool], Exception | None] = lambda *given: None
        self.loses_answer: Callable[[str], bool] = lambda sql: False


server = Server()


class Connection(sqlite3.Connection):
    """A session of a simulated process, which ends with it."""

    patience = 5.0  # seconds that it waits for the lock of writers
    is_lost = False  # an answer was lost: it can only be closed
    process: Process

    def commit(self) -> None:
        if self.in_transaction:
            run(self, "COMMIT", (), super().commit)

    def rollback(self) -> None:
        if self.in_transaction:
            super().rollback()
            scheduler.wake_all(server.waiting)

    def close(self) -> None:
        super().close()
        if self.end in self.process.on_kill:
            self.process.on_kill.remove(self.end)
        scheduler.wake_all(server.waiting)

    def end(self) -> None:
        """End the session because its process was killed."""
        if self.in_transaction:  # a cursor that is not exhausted would keep it open, and its locks
            super().rollback()
        super().close()
        scheduler.wake_all(server.waiting)


class Cursor(base.SQLiteCursorWrapper):
    def convert_query(self, query: str, *, param_names: Any = None) -> str:
        return converted(query)

    def execute(self, query: str, params: Any = None) -> Any:
        return run(
            self.connection, query, params, lambda: super(Cursor, self).execute(query, params)
        )

    def executemany(self, query: str, param_list: Any) -> Any:
        act = super().executemany
        return run(self.connection, query, param_list, lambda: act(query, param_list))


@cache
def converted(query: str) -> str:
    """Return a statement with the parameters as SQLite has them; each is played many times."""
    return base.FORMAT_QMARK_REGEX.sub("?", query).replace("%%", "%")


class DatabaseWrapper(base.DatabaseWrapper):
    def get_new_connection(self, conn_params: Any) -> Any:
        given = {**conn_params, "timeout": 0, "factory": Connection}
        scheduler.maybe_give_way()
        connection = super().get_new_connection(given)
        connection.patience = conn_params.get("timeout", Connection.patience)
        connection.process = scheduler.current.process
        connection.process.on_kill.append(connection.end)
        connection.execute("PRAGMA synchronous = OFF")
        for arguments in (2, 3):
            connection.create_function("strftime", arguments, strftime, deterministic=True)
        return connection

    def create_cursor(self, name: str | None = None) -> Any:
        return self.connection.cursor(factory=Cursor)

    def is_usable(self) -> bool:
        return not self.connection.is_lost


def run(connection: Any, sql: str, params: Any, act: Callable[[], Any]) -> Any:
    """Execute a statement, as a server far away would."""
    if connection.is_lost:
        raise sqlite3.OperationalError("the connection was lost")
    is_inside = connection.in_transaction
    scheduler.sleep(server.before(sql))
    if error := server.fails(sql, params, is_inside):
        scheduler.trace("failed", type(error), sql)
        raise error
    until = scheduler.now + connection.patience
    while True:
        try:
            found = act()
            break
        except sqlite3.OperationalError as error:
            if is_inside or str(error) not in LOCKED or scheduler.now >= until:
                scheduler.trace("error", error, sql, params)
                raise
        server.waiting[scheduler.current] = None
        scheduler.block(until - scheduler.now)
        server.waiting.pop(scheduler.current, None)
    scheduler.trace("sql", getattr(found, "rowcount", ""), sql, params)
    server.changed()
    if not connection.in_transaction:
        scheduler.wake_all(server.waiting)
        if server.loses_answer(sql):
            connection.is_lost = True
            scheduler.trace("lost answer")
            raise sqlite3.OperationalError("the connection was lost")
    scheduler.sleep(server.after(sql))
    return found


def strftime(template: str, when: str | None, shift: str | None = "0") -> str | None:
    """SQLite's function for the two formats that the engine uses, with the scheduler's clock."""
    if when is None or shift is None:
        return None
    assert when == "now", when
    now = scheduler.database_time() + timedelta(seconds=float(shift.split()[0]))
    if template == "%s":
        return str(int(now.timestamp()))
    seconds = f"{now.second:02d}.{now.microsecond // 1000:03d}"
    return now.strftime(template.replace("%f", seconds))
