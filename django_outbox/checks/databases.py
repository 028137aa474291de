"""System checks of each database: modes, schema, tables, isolation, charset, statements, pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

from .. import conf
from ..inspection.listeners import different_listeners, live_registries
from ..models import OutboxEvent, missing_table
from ..sql import DIALECTS, can_notify, dialect_of, is_in_memory
from .servers import of_server

Configs = Sequence[AppConfig] | None

STATEMENT_PER_PAYLOAD = 4  # times: payload and headers, every character escaped


@register("django_outbox")
def check_sqlite(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W020 SQLite transactions that are not IMMEDIATE. This opens no connection."""
    for alias in aliases():
        if connections[alias].vendor != "sqlite":
            continue
        mode = connections.settings[alias].get("OPTIONS", {}).get("transaction_mode") or ""
        if str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
            yield Warning(
                f"The SQLite database {alias!r} begins its transactions DEFERRED. In a test "
                'with a running worker, 43 % of the business transactions failed with "database '
                'is locked".',
                hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE", '
                '"init_command": "PRAGMA journal_mode=WAL"}.',
                id="django_outbox.W020",
            )


@register(Tags.database)
def check_databases(
    app_configs: Configs, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    """Report W021 no WAL; E022 no schemas; W023 no tables; W026 isolation; W027 packet size.

    Of its server E024 unknown, E028 same protocol only, W025 and W054 old server or driver, E056
    statements in the binary log, E057 a charset that lacks characters, W061 several nodes that
    take writes. Also W058 live workers with other listeners than this process.
    """
    for alias in sorted(set(databases or ()).intersection(aliases())):
        connection = connections[alias]
        yield from of_server(connection)
        if connection.vendor not in DIALECTS:
            continue
        yield from (*_journal_mode(connection), *_schema(connection), *_tables(connection))
        yield from (*_isolation(connection), *_statement_size(connection))
        yield from (*_statement_log(connection), *_charset(connection))
        yield from _different_listeners(connection)


def _journal_mode(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if connection.vendor != "sqlite" or is_in_memory(connection):
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        journal = str(cursor.fetchone()[0])
    if journal.lower() != "wal":
        yield Warning(
            f"The SQLite database {connection.alias!r} keeps its journal in {journal!r} mode, "
            "where readers wait for every writer.",
            hint='Set OPTIONS = {"init_command": "PRAGMA journal_mode=WAL"}.',
            id="django_outbox.W021",
        )


def _schema(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if connection.vendor != "postgresql" and not conf.problems() and conf.current().SCHEMA:
        yield Error(
            f'OUTBOX["SCHEMA"] is set, but {connection.alias!r} is not a PostgreSQL database.',
            hint='Leave it out; OUTBOX["TABLE_PREFIX"] works everywhere.',
            id="django_outbox.E022",
        )


def _isolation(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if conf.problems() or conf.current().MODE != "ordered":
        return  # in other modes it is unknown which events have keys
    if level := dialect_of(connection).failing_isolation():
        yield Warning(
            f"The transactions of {connection.alias!r} are {level}. A write with a key, and in "
            'OUTBOX["MODE"] "ordered" nearly all have one, fails there with a serialization error '
            "if another transaction has written to the key meanwhile.",
            hint="Use READ COMMITTED; or repeat such transactions, and silence this check.",
            id="django_outbox.W026",
        )


def _statement_size(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    found = dialect_of(connection).variables("max_allowed_packet")
    if not found or conf.problems():
        return
    largest, most = int(found["max_allowed_packet"]), conf.current().MAX_PAYLOAD_BYTES
    if STATEMENT_PER_PAYLOAD * most > largest:
        yield Warning(
            f"The database {connection.alias!r} takes statements of at most {largest} bytes "
            f'(max_allowed_packet), but OUTBOX["MAX_PAYLOAD_BYTES"] is {most}. A write above that '
            "would lose the connection, and with it the business transaction.",
            hint=f"Expected a max_allowed_packet of at least {STATEMENT_PER_PAYLOAD} times the "
            "payload: it and headers of the same size, each character escaped.",
            id="django_outbox.W027",
        )


def _statement_log(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if conf.problems() or conf.current().MODE == "writer_only":
        return  # no worker
    found = dialect_of(connection).variables("log_bin", "binlog_format")
    if found == {"log_bin": "ON", "binlog_format": "STATEMENT"}:
        yield Error(
            f"The server of {connection.alias!r} writes statements to its binary log "
            "(binlog_format=STATEMENT). Workers use READ COMMITTED, where it then refuses every "
            "change of a row with error 1665: nothing would be delivered.",
            hint="Set binlog_format=ROW, the default of MySQL, or MIXED.",
            id="django_outbox.E056",
        )


def _charset(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if charset := dialect_of(connection).weak_charset():
        yield Error(
            f"The connection {connection.alias!r} has the charset {charset}, which lacks "
            "characters. Writes with one of them are refused.",
            hint='Set "charset": "utf8mb4" in the OPTIONS of the database.',
            id="django_outbox.E057",
        )


def _tables(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if not MigrationRecorder(connection).has_table():
        return  # the very first migrate runs checks too, and needs no reminder
    if missing := missing_table(connection.alias):
        yield Warning(missing, hint="Migrate before writing.", id="django_outbox.W023")


def _different_listeners(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if missing_table(connection.alias) or conf.problems() or conf.current().MODE == "writer_only":
        return
    if found := different_listeners(live_registries(connection.alias)):
        yield Warning(
            f"The live workers of {connection.alias!r} have other listeners than this process. "
            f"Not all have {', '.join(repr(each['listener']) for each in found)}.",
            hint="During a deploy, that is expected. Otherwise restart the workers with this "
            "release; outbox_status --listeners names them.",
            id="django_outbox.W058",
        )


def aliases() -> list[str]:
    """Return the aliases of the databases that have the outbox tables."""
    return [alias for alias in connections if router.allow_migrate_model(alias, OutboxEvent)]


# -- connection pools and transaction poolers ------------------------------------------------------


POOLER_PORTS = ("6432", "6543")  # PgBouncer's, and the one that hosting providers use
DEFAULT_POOL_SIZE = 4  # connections: psycopg's default for min_size, and for max_size if unset


@register("django_outbox")
def check_connections(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W051 a pool smaller than the worker's threads; W052 LISTEN through a pooler."""
    if conf.problems() or conf.current().MODE == "writer_only":
        return
    for alias in aliases():
        if connections[alias].vendor == "postgresql":
            yield from (*_pool(alias), *_pooler(alias))


def _pool(alias: str) -> Iterator[CheckMessage]:
    pool = connections.settings[alias].get("OPTIONS", {}).get("pool")
    if not pool:
        return
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size") or options.get("min_size", DEFAULT_POOL_SIZE)
    queues = conf.current().queues.values()
    threads = sum(each.WORKERS for each in queues)
    if isinstance(size, int) and size < threads:
        yield Warning(
            f"The connection pool of {alias!r} has at most {size} connections, but a worker runs "
            f"listeners in {threads} threads, those of all queues: they would wait for each other, "
            "and fail in the end.",
            hint=f'Set OPTIONS["pool"]["max_size"] to {threads} or more; async listeners that use '
            f"the database want up to {sum(each.ASYNC_CONNECTIONS for each in queues)} more "
            '(OUTBOX["ASYNC_CONNECTIONS"]). The engine\'s own connections are separate.',
            id="django_outbox.W051",
        )


def _pooler(alias: str) -> Iterator[CheckMessage]:
    listens_on = _listens_on(alias)
    if listens_on not in connections:
        return
    settings = connections.settings[listens_on]
    if reason := _pooler_sign(settings):
        yield Warning(
            f"Workers of {alias!r} would LISTEN on {listens_on!r}, where {reason}: it looks like "
            "a pooler in transaction mode, through which no notification arrives. Workers poll "
            'every OUTBOX["PROBE_INTERVAL"] instead.',
            hint="Add an alias that goes to PostgreSQL directly, and name it: "
            'OUTBOX["DOORBELL"] = {"kind": "postgres", "database": "direct"}.',
            id="django_outbox.W052",
        )


def _listens_on(alias: str) -> str:
    """Return the alias on which a worker of ``alias`` listens; empty if it does not listen."""
    doorbell = conf.current().DOORBELL
    options = doorbell if isinstance(doorbell, dict) else {"kind": doorbell}
    if options["kind"] == "auto":
        return alias if can_notify(connections[alias]) else ""
    return str(options.get("database") or alias) if options["kind"] == "postgres" else ""


def _pooler_sign(settings: dict[str, Any]) -> str | None:
    """Return which setting suggests a pooler in transaction mode; None if there is none."""
    if settings.get("DISABLE_SERVER_SIDE_CURSORS"):
        return "DISABLE_SERVER_SIDE_CURSORS is set"
    if str(settings.get("PORT") or "") in POOLER_PORTS:
        return f"PORT is {settings['PORT']}"
    return None
