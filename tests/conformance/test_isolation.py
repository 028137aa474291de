"""The worker's connections and atomic listeners are READ COMMITTED, whatever the default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from django.db import connection, connections

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of, engine_connection
from tests.sessions import sessions, terminate_other_sessions
from tests.table import in_thread, listening, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

STRICT = ["REPEATABLE READ", "SERIALIZABLE"]
ONCE = outbox.Fixed(0.02, max_attempts=1)


def needs(vendor: str, why: str) -> None:
    if connection.vendor != vendor:
        pytest.skip(why)


@contextmanager
def role_default(name: str, value: str) -> Iterator[None]:
    """Let new sessions of our role begin with this setting, in this test's database only."""
    database = connection.ops.quote_name(connection.settings_dict["NAME"])
    change = f"ALTER ROLE CURRENT_USER IN DATABASE {database}"
    with connection.cursor() as cursor:
        cursor.execute(f"{change} SET {name} = %s", [value])
    connection.close()
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"{change} RESET {name}")
        connection.close()


@pytest.fixture(params=STRICT)
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make sessions begin at a stricter level, without Django's ``isolation_level``."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one level")
    if connection.vendor == "postgresql":
        with role_default("default_transaction_isolation", request.param.lower()):
            yield request.param
        return
    options = {
        **connections.settings["default"]["OPTIONS"],
        "isolation_level": None,  # Django's default would override the session's
        "init_command": f"SET SESSION TRANSACTION ISOLATION LEVEL {request.param}; "
        "SET autocommit = 1 /*M! , SESSION innodb_snapshot_isolation = ON */",
    }
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    yield request.param


def level(asked: Any) -> str:
    """Return the isolation of a statement; on MySQL that of the session's transactions."""
    question = "SHOW transaction_isolation"
    if asked.vendor == "mysql":
        question = f"SELECT @@{'tx' if asked.mysql_is_mariadb else 'transaction'}_isolation"
    with asked.cursor() as cursor:
        cursor.execute(question)
        return str(cursor.fetchone()[0]).replace("-", " ").upper()


def levels_of_engine() -> tuple[str, str]:
    """Return the isolation of a single statement, and of one in a transaction."""
    with closing(engine_connection("default", lock_wait=1)) as own:
        alone = level(own)
        own.set_autocommit(False)
        inside = level(own)
        own.rollback()
        own.set_autocommit(True)
    return alone, inside


def shown_by_engine_and_yours(setting: str) -> tuple[str, str]:
    """Return what a setting of PostgreSQL is for the engine, and for an application."""

    def show(asked: Any) -> str:
        with closing(asked), asked.cursor() as cursor:
            cursor.execute(f"SHOW {setting}")
            return str(cursor.fetchone()[0])

    engine = in_thread(lambda: show(engine_connection("default", lock_wait=1))).result(20)
    return engine, in_thread(lambda: show(connection)).result(20)


# -- the worker's connections ----------------------------------------------------------------------


def test_engine_connections_are_read_committed_whatever_the_default(strict: str) -> None:
    assert in_thread(lambda: level(connection)).result(20) == strict
    assert in_thread(levels_of_engine).result(20) == ("READ COMMITTED", "READ COMMITTED")


def test_engine_connections_are_read_committed_whatever_the_url_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs("postgresql", "only libpq takes options")
    mine = {
        **connections.settings["default"]["OPTIONS"],
        "options": r"-c default_transaction_isolation=repeatable\ read -c work_mem=5MB",
        "isolation_level": 4,  # psycopg's SERIALIZABLE
    }
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", mine)
    assert in_thread(lambda: level(connection)).result(20) == "REPEATABLE READ"
    assert in_thread(levels_of_engine).result(20) == ("READ COMMITTED", "READ COMMITTED")


def test_their_statements_are_never_compiled() -> None:
    """With scans switched off, the estimated cost would trigger it even for three rows."""
    needs("postgresql", "only PostgreSQL compiles statements")
    assert shown_by_engine_and_yours("jit") == ("off", "on")


def test_their_sessions_may_be_idle_whatever_the_default() -> None:
    """Where the server ends idle sessions, each thread of a worker reported a broken one."""
    needs("postgresql", "only PostgreSQL has the setting")
    with role_default("idle_session_timeout", "30s"):
        assert shown_by_engine_and_yours("idle_session_timeout") == ("0", "30s")


def test_behind_a_transaction_pooler_they_are_too(
    strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session settings and startup options are ruled out: the pool would pass them on."""
    needs("postgresql", "Django has its mark of a transaction pooler for PostgreSQL alone")
    monkeypatch.setitem(connections.settings["default"], "DISABLE_SERVER_SIDE_CURSORS", True)

    def ask() -> tuple[tuple[str, str], str, Any]:
        found = levels_of_engine()
        with closing(engine_connection("default", lock_wait=1)) as own:
            single = level(own)
            with own.connection.cursor() as cursor:  # the driver's cursor, without our wrapper
                cursor.execute("SHOW transaction_isolation")
                session = cursor.fetchone()[0]
            return found, single, (session, own.settings_dict["OPTIONS"].get("options"))

    found, single, (session, options) = in_thread(ask).result(20)
    assert found == ("READ COMMITTED", "READ COMMITTED")
    assert single == "READ COMMITTED"
    assert session.upper() == strict  # unchanged for the next client of the pool
    assert options is None


def test_behind_a_pooler_an_error_leaves_no_transaction(
    strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("postgresql", "Django has its mark of a transaction pooler for PostgreSQL alone")
    monkeypatch.setitem(connections.settings["default"], "DISABLE_SERVER_SIDE_CURSORS", True)

    def ask() -> str:
        with closing(engine_connection("default", lock_wait=1)) as own:
            with own.cursor() as cursor:
                with pytest.raises(Exception, match="nowhere"):
                    cursor.execute("SELECT nothing FROM nowhere")
                cursor.execute("SELECT 1")
            return str(own.connection.info.transaction_status.name)

    assert in_thread(ask).result(20) == "IDLE"


@pytest.mark.parametrize("pooled", [False, True])
def test_a_worker_delivers_everything_there(
    settings: Any, strict: str, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims, settles in every way, renews and releases."""
    monkeypatch.setitem(connections.settings["default"], "DISABLE_SERVER_SIDE_CURSORS", pooled)
    settings.OUTBOX = {"LEASE": 1.2, "DRAIN_TIMEOUT": 1}

    def listener(event: outbox.Event) -> Any:
        n = event.payload["n"]
        if n % 5 == 1 and not event.attempts:
            raise LookupError
        return outbox.Dead("no") if n % 5 == 2 else None

    with listening(listener, retry=outbox.Fixed(0.02)), outbox.Worker():
        write(50)
        write(10, key="one")
        write(10, key="two")
        wait_until(lambda: statuses() == {"DONE": 56, "DEAD": 14}, what="all settled")


# -- atomic listeners ------------------------------------------------------------------------------


@contextmanager
def taking_time() -> Iterator[list[str]]:
    """Register an atomic listener that reads the database and waits until its lease is renewed."""
    levels: list[str] = []

    def listener(event: outbox.Event) -> None:
        assert Effect.objects.count() == 0
        if connection.vendor == "postgresql":
            levels.append(level(connection))
        Effect.objects.create(event_id=event.event_id, pid=0, phase="once")
        begun = in_thread(lambda: row(event.event_id).available_at).result(15)
        wait_until(
            lambda: in_thread(lambda: row(event.event_id).available_at).result(15) > begun,
            what="a renewal",
        )

    with listening(listener, atomic=True, retry=ONCE):
        yield levels


@pytest.mark.parametrize("by", ["worker", "drain"])
def test_a_renewed_lease_breaks_no_atomic_listener(settings: Any, strict: str, by: str) -> None:
    settings.OUTBOX = {"LEASE": 1.2, "DRAIN_TIMEOUT": 1}
    with taking_time() as levels:
        (event_id,) = write()
        if by == "drain":
            assert in_thread(outbox.drain).result(30) == 1
        else:
            with outbox.Worker():
                wait_until(lambda: not OutboxEvent.objects.pending().exists(), what="an end")
    assert row(event_id).last_error is None
    assert statuses() == {"DONE": 1}
    assert Effect.objects.count() == 1
    assert levels == ["READ COMMITTED"] * (connection.vendor == "postgresql")


def test_a_connection_is_asked_once_where_it_is_read_committed() -> None:
    """A call of an atomic listener must not cost a round trip."""
    needs("postgresql", "MySQL is told before each transaction")
    sent: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append(sql)
        return execute(sql, params, many, context)

    def begin() -> None:
        with connection.execute_wrapper(note):
            for _ in range(3):
                with dialect_of(connection).read_committed():
                    level(connection)
        connection.close()
        with connection.execute_wrapper(note), dialect_of(connection).read_committed():
            level(connection)

    in_thread(begin).result(20)
    question = "SHOW transaction_isolation"
    assert sent == [question, *[question] * 3, question, question]  # each level() queries it, too


def test_a_session_that_ended_while_idle_costs_an_atomic_listener_nothing() -> None:
    """MySQL gets the level before each transaction; that statement notices a dead session."""
    needs("mysql", "elsewhere nothing is sent before the listener's own first statement")

    def begin_twice() -> None:
        for event_id in ("before", "after"):
            with dialect_of(connection).read_committed():
                Effect.objects.create(event_id=event_id, pid=0)
            in_thread(end_all_others).result(20)
        connection.close()

    def end_all_others() -> None:
        terminate_other_sessions()
        wait_until(lambda: sessions() == 1, what="all other sessions ended")
        connection.close()

    in_thread(begin_twice).result(20)
    connection.close()  # its session was ended, too
    assert Effect.objects.count() == 2


def test_where_it_is_stricter_each_transaction_is_changed_and_nothing_else(strict: str) -> None:
    def begin() -> tuple[list[str], str]:
        found = []
        for _ in range(2):
            with dialect_of(connection).read_committed():
                found.append(level(connection))
        return found, level(connection)

    inside, after = in_thread(begin).result(20)
    if connection.vendor == "postgresql":  # MySQL's variable is the session's
        assert inside == ["READ COMMITTED"] * 2
    assert after == strict
