"""System checks for connection pools that are too small, and for transaction poolers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Warning, register
from django.db import connections

from .. import conf
from ..sql import can_notify
from .databases import Configs, aliases

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
