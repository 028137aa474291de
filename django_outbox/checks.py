"""System checks: what is wrong or unwise, with an id, a hint and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

from . import conf, dialects, hooks, registry
from .conf import Settings
from .models import OutboxEvent, missing_table

Configs = Sequence[AppConfig] | None


AWAITED = ("METRICS_NAMESPACE", "REDACT")


DELIVERING = (
    "EMBEDDED", "WORKERS", "PROCESSES", "ASYNC_CONCURRENCY", "HOT_QUEUE_CAPACITY",
    "COLD_QUEUE_CAPACITY", "FAIRNESS", "MAX_ATTEMPTS", "RETRY", "POLL_INTERVAL", "POLL_BATCH_SIZE",
    "PROBE_INTERVAL", "SKIP_RECENT", "LEASE", "MAX_RESCUES", "UNROUTABLE", "UNROUTABLE_GRACE",
    "DOORBELL", "DOORBELL_INTERVAL", "DEFER_LIMIT", "INTERCEPTORS", "ORDERING", "ON_DEAD",
    "STOP_ON_FIRST_FAILURE",
)  # fmt: skip


@register("django_outbox")
def check_settings(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E001 a setting is unknown or unfit; E002 a path leads nowhere; E003 two of them clash."""
    faults = conf.problems()
    if faults:
        return [Error(each.message, hint=each.hint, id="django_outbox.E001") for each in faults]
    return [*_unresolved(), *_clashes(conf.current()), *_awaited(conf.current())]


def _unresolved() -> Iterator[CheckMessage]:
    for load in (
        hooks.serializer, hooks.retry_policy, hooks.interceptors,
        hooks.writer_hooks, hooks.context_providers,
    ):  # fmt: skip
        try:
            load()
        except ImproperlyConfigured as error:
            yield Error(str(error), hint="Correct the dotted path.", id="django_outbox.E002")


def _clashes(settings: Settings) -> Iterator[CheckMessage]:
    if settings.DRAIN_TIMEOUT >= settings.LEASE:
        yield Error(
            f'OUTBOX["DRAIN_TIMEOUT"] ({settings.DRAIN_TIMEOUT:g} s) is not below OUTBOX["LEASE"] '
            f"({settings.LEASE:g} s).",
            hint="A worker must end before others may take what it holds.",
            id="django_outbox.E003",
        )

    if (
        settings.MODE == "ordered"
        and settings.ORDERING == "global"
        and settings.UNROUTABLE == "dead"
        and settings.UNROUTABLE_GRACE > 0
    ):
        yield Error(
            'OUTBOX["ORDERING"] is "global", where one event that nobody listens to would hold up '
            f'all others for OUTBOX["UNROUTABLE_GRACE"] ({settings.UNROUTABLE_GRACE:g} s).',
            hint='Set OUTBOX["UNROUTABLE_GRACE"] = 0.',
            id="django_outbox.E003",
        )


def _awaited(settings: Settings) -> Iterator[CheckMessage]:
    """W005: what later releases will do must not seem to be done already."""
    if idle := _given(settings, AWAITED):
        yield Warning(
            f"These settings have no effect in this release: {', '.join(idle)}.",
            hint="Leave them out until the changelog names them.",
            id="django_outbox.W005",
        )


def _given(settings: Settings, names: Sequence[str]) -> list[str]:
    """Return which of these settings are not at their default."""
    default = Settings()
    return [name for name in names if getattr(settings, name) != getattr(default, name)]


@register("django_outbox")
def check_writer_only(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W006 in writer_only nothing is delivered: what serves delivery has no effect."""
    if conf.problems() or conf.current().MODE != "writer_only":
        return []
    idle = _given(conf.current(), DELIVERING)
    idle += [each.where for each in registry.listeners()]
    if not idle:
        return []
    return [
        Warning(
            f'In OUTBOX["MODE"] "writer_only" these have no effect: {", ".join(idle)}.',
            hint="Events are only written, for others to read; leave the rest out.",
            id="django_outbox.W006",
        )
    ]


@register("django_outbox")
def check_listeners(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E010, E012 a listener or its fallback cannot be called; E011 two claim one place; E013."""
    found: list[CheckMessage] = []
    for each in registry.listeners():
        if fault := each.fault:
            hint = "Give it the signature (event)."
            found.append(Error(fault, hint=hint, id="django_outbox.E010"))
        if fault := each.payload_fault:
            hint = "Give its fields types that JSON can hold, importable where the class stands."
            found.append(Error(fault, hint=hint, id="django_outbox.E013"))
        if fault := each.fallback_fault:
            hint = "Give it the signature (event, failure)."
            found.append(Error(fault, hint=hint, id="django_outbox.E012"))
    hint = "Remove one of them, or give the second listener a name."
    found += [Error(text, hint=hint, id="django_outbox.E011") for text in registry.conflicts]
    return found


@register("django_outbox")
def check_routing(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E040, W041 no business row is written where the outbox is, so they cannot commit together."""
    outbox = router.db_for_write(OutboxEvent)
    business, others = set[str](), set[str]()
    for model in apps.get_models():
        if model._meta.app_label != OutboxEvent._meta.app_label:
            is_djangos = model.__module__.startswith("django.contrib.")
            (others if is_djangos else business).add(router.db_for_write(model))
    if not business or outbox in business:
        return []
    text = (
        f"The outbox is written on {outbox!r}, but the project's models on {sorted(business)}: an "
        "event does not commit together with the change that it tells of."
    )
    hint = (
        "Route django_outbox to where the business rows are. If each write and worker names its "
        "database (using=, --database), silence this check."
    )
    if outbox in others or not business.isdisjoint(_aliases()):
        return [Warning(text, hint=hint, id="django_outbox.W041")]
    return [Error(text, hint=hint, id="django_outbox.E040")]


@register("django_outbox")
def check_atomic(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E042 what an atomic listener's app writes is on a database without the outbox."""
    found: list[CheckMessage] = []
    for each in (each for each in registry.listeners() if each.atomic):
        config = apps.get_containing_app_config(registry.label(each.call))
        written = {router.db_for_write(model) for model in config.get_models()} if config else set()
        if written and written.isdisjoint(_aliases()):
            text = (
                f"{each.where} has atomic=True, but the models of its app are written on "
                f"{sorted(written)}, where the outbox has no table: they would not commit together."
            )
            hint = "Leave atomic=True out and make the listener idempotent."
            found.append(Error(text, hint=hint, id="django_outbox.E042"))
    return found


@register("django_outbox")
def check_sqlite(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W020 SQLite transactions that are not IMMEDIATE; needs no connection."""
    found: list[CheckMessage] = []
    for alias in _aliases():
        if connections[alias].vendor != "sqlite":
            continue
        mode = connections.settings[alias].get("OPTIONS", {}).get("transaction_mode") or ""
        if str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
            found.append(
                Warning(
                    f"The SQLite database {alias!r} begins its transactions DEFERRED. Beside a "
                    'worker, 43 % of the business transactions failed with "database is locked".',
                    hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE", '
                    '"init_command": "PRAGMA journal_mode=WAL"}.',
                    id="django_outbox.W020",
                )
            )
    return found


@register(Tags.database)
def check_databases(
    app_configs: Configs, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W021 no WAL; E022 no schemas there; W023 no tables; W024 unknown; W025, W026 its ways."""
    found: list[CheckMessage] = []
    for alias in sorted(set(databases or ()).intersection(_aliases())):
        connection = connections[alias]
        found += [*_journal(connection), *_schema(connection), *_tables(connection)]
        found += [*_dialect(connection), *_isolation(connection)]
    return found


def _journal(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if connection.vendor != "sqlite" or dialects.is_in_memory(connection):
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
            f'OUTBOX["SCHEMA"] is set, but {connection.alias!r} is no PostgreSQL database.',
            hint='Leave it out; OUTBOX["TABLE_PREFIX"] works everywhere.',
            id="django_outbox.E022",
        )


def _dialect(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if connection.vendor not in dialects.DIALECTS:
        yield Warning(
            f"The outbox was never tested on {connection.vendor}, the database of "
            f"{connection.alias!r}.",
            hint="Use PostgreSQL, MySQL, MariaDB or SQLite.",
            id="django_outbox.W024",
        )
    elif connection.vendor == "mysql" and not connection.features.has_select_for_update_skip_locked:
        yield Warning(
            f"The database {connection.alias!r} has no SKIP LOCKED. Several workers are correct "
            "there, but a renewal of leases may meet a deadlock, and is repeated.",
            hint="Upgrade to MySQL 8.0.1 or MariaDB 10.6.",
            id="django_outbox.W025",
        )


def _isolation(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if conf.problems() or conf.current().MODE != "ordered":
        return  # elsewhere nobody knows which events have keys
    if level := dialects.of(connection).failing_isolation(connection):
        yield Warning(
            f"The transactions of {connection.alias!r} are {level}. A write with a key, and in "
            'OUTBOX["MODE"] "ordered" nearly all have one, fails there with a serialization error '
            "if another transaction has written to the key meanwhile.",
            hint="Use READ COMMITTED; or repeat such transactions, and silence this check.",
            id="django_outbox.W026",
        )


def _tables(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if not MigrationRecorder(connection).has_table():
        return  # the first migrate of all, which checks too, needs no reminder
    if missing := missing_table(connection.alias):
        yield Warning(missing, hint="Migrate before writing.", id="django_outbox.W023")


def _aliases() -> list[str]:
    """The aliases that hold the outbox's tables."""
    return [alias for alias in connections if router.allow_migrate_model(alias, OutboxEvent)]


@register("django_outbox")
def check_embedded(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W030 embedded workers live by requests: what falls due without traffic waits for one."""
    if conf.problems() or not conf.current().EMBEDDED:
        return []
    return [
        Warning(
            'OUTBOX["EMBEDDED"] is True: a worker starts with the first request of a process. '
            "Retries, delayed events and what a lost process held wait until some process has one.",
            hint="Run one outbox_worker beside the web server; then silence this check.",
            id="django_outbox.W030",
        )
    ]
