"""How the database carries a statement out: which plans read or sort a whole table."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connection, models, transaction

from django_outbox.conf import index_name

EXPLAIN = {
    "postgresql": "EXPLAIN",
    "sqlite": "EXPLAIN QUERY PLAN",
    "mysql": "EXPLAIN FORMAT=TRADITIONAL",  # MySQL 9 would answer with a tree
}
READS = "^(Handler_read|Handler_icp_attempts|Sort_rows)"
LARGE = 400  # rows: what a statement about 50 may look at, of 5,000


def analyze(model: type[models.Model]) -> None:
    """Have the database learn what a table holds."""
    table = connection.ops.quote_name(model._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}{table}")
        if connection.vendor == "mysql":
            cursor.fetchall()


def large_steps(works: dict[str, Callable[[], object]]) -> dict[str, list[dict[str, Any]]]:
    """Return, by the name of the work, the steps of its statements that are large.

    MariaDB's plans count what a LIMIT leaves unread, and deleted rows that are not purged yet:
    there a statement that in fact read few rows has no large step.
    """
    sent = {name: _sent(work) for name, work in works.items()}
    assert all(sent.values())
    return {
        name: steps
        for name, found in sent.items()
        for sql, params, read in found
        if read is None or read > LARGE
        if (steps := [step for step in explain(sql, params) if is_large(step)])
    }


def statements(work: Callable[[], object]) -> list[tuple[str, Any]]:
    """Return the statements that ``work`` sends; undo what they did."""
    return [(sql, params) for sql, params, _ in _sent(work)]


def sent(work: Callable[[], object]) -> list[str]:
    """Return the statements that ``work`` sends on this thread's connection."""
    found: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        found.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        work()
    return found


def _sent(work: Callable[[], object]) -> list[tuple[str, Any, int | None]]:
    """Return the statements that ``work`` sends, and the rows that each read, where that is told.

    What they did is undone.
    """
    sent: list[tuple[str, Any, int | None]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        before = _rows_read()
        result = execute(sql, params, many, context)
        after = _rows_read()
        read = None if before is None or after is None else after - before
        sent.append((sql, params, read))
        return result

    with transaction.atomic(), connection.execute_wrapper(note):
        work()
        transaction.set_rollback(True)
    return [each for each in sent if "outbox_" in each[0]]


def _rows_read(on: Any = connection) -> int | None:
    """Return the rows that MySQL or MariaDB has read in this session; None on others."""
    if on.vendor != "mysql":
        return None
    # Past Django's wrappers: the one that counts would count this too.
    with contextlib.closing(on.connection.cursor()) as cursor:
        cursor.execute(f"SHOW SESSION STATUS WHERE variable_name REGEXP '{READS}'")
        return sum(int(count) for _, count in cursor.fetchall())


@contextlib.contextmanager
def undone(on: Any) -> Iterator[None]:
    """Undo what a block does; a connection of the engine acts as if no transaction were open."""
    if on is connection:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)
        return
    with on.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")


def effort(work: Callable[[], object], on: Any = connection) -> int:
    """Return what the statements of ``work`` cost on a database; undo what they did.

    PostgreSQL counts rows that its plans read, MySQL and MariaDB reads, SQLite hundreds of steps.
    """
    cost = 0

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal cost
        if on.vendor == "postgresql":
            cost += sum(map(_rows_in, _analyzed(on, sql, params)))
            return execute(sql, params, many, context)
        before = _rows_read(on)
        result = execute(sql, params, many, context)
        cost += (_rows_read(on) or 0) - (before or 0)
        return result

    steps = itertools.count()
    with undone(on):
        if on.vendor == "sqlite":
            on.connection.set_progress_handler(lambda: next(steps) and 0, 100)
        try:
            with on.execute_wrapper(note):
                work()
        finally:
            if on.vendor == "sqlite":
                on.connection.set_progress_handler(None, 0)
    return cost + next(steps)


def _analyzed(on: Any, sql: str, params: Any) -> list[dict[str, Any]]:
    """Return the steps of a prepared statement as PostgreSQL carries them out; undo them.

    It is prepared once for each connection: a plan that holds for any values is kept.
    """
    from psycopg import ClientCursor

    number = itertools.count(1)
    name = f"s{zlib.crc32(sql.encode())}"
    body = re.sub("%[s%]", lambda found: f"${next(number)}" if found[0] == "%s" else "%", sql)
    with ClientCursor(on.connection) as cursor:
        cursor.execute("SELECT 1 FROM pg_prepared_statements WHERE name = %s", [name])
        if not cursor.fetchone():
            cursor.execute(f"PREPARE {name} AS {body}".encode())
        given = f"({', '.join(['%s'] * len(params))})" if params else ""
        cursor.execute("SAVEPOINT analyzed")
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE {name}{given}", params)
        ((answer,),) = cursor.fetchall()
        cursor.execute("ROLLBACK TO SAVEPOINT analyzed")
    return nodes((answer if isinstance(answer, list) else json.loads(answer))[0]["Plan"])


def _rows_in(step: dict[str, Any]) -> int:
    """Return how many rows a step of a plan has read or sorted."""
    kinds = ("Filter", "Index Recheck", "Join Filter")
    removed = sum(step.get(f"Rows Removed by {each}", 0) for each in kinds)
    read = step["Actual Rows"] if re.search("Scan|Sort", step["Node Type"]) else 0
    return int((read + removed) * step["Actual Loops"])


def uses(index: str, sql: str, params: Any) -> int:
    """Return how many steps of a statement's plan use an index, by its name without the prefix."""
    place = {"postgresql": "Index Name", "sqlite": "detail", "mysql": "key"}[connection.vendor]
    name = re.compile(rf"\b{index_name(index)}\b")
    return sum(bool(name.search(str(step.get(place) or ""))) for step in explain(sql, params))


def explain(sql: str, params: Any) -> list[dict[str, Any]]:
    json_too = " (FORMAT JSON)" * (connection.vendor == "postgresql")
    with connection.cursor() as cursor:
        cursor.execute(f"{EXPLAIN[connection.vendor]}{json_too} {sql}", params)
        if connection.vendor == "postgresql":
            (answer,) = cursor.fetchone()
            return nodes((answer if isinstance(answer, list) else json.loads(answer))[0]["Plan"])
        names = [each[0] for each in cursor.description]
        return [dict(zip(names, each, strict=True)) for each in cursor.fetchall()]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    children = plan.pop("Plans", [])
    return [plan, *(each for child in children for each in nodes(child))]


def is_large(step: dict[str, Any]) -> bool:
    """Say whether a step of a plan reads or sorts the whole table."""
    if connection.vendor == "postgresql":
        # What was vacuumed while it was empty costs nothing, and is scanned in spite of an index.
        is_scan = step["Node Type"] == "Seq Scan" and step["Total Cost"] > 0
        return is_scan or step["Plan Rows"] > LARGE
    if connection.vendor == "sqlite":
        detail = str(step["detail"])
        by_index = "USING INDEX" in detail or "USING COVERING INDEX" in detail
        return detail.startswith("SCAN") and "outbox_" in detail and not by_index
    of_ours = bool(step["table"]) and not str(step["table"]).startswith("<")
    return of_ours and (step["type"] == "ALL" or int(step["rows"] or 0) > LARGE)
