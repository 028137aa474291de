"""Connections that are too few for a worker's threads, or are passed on by a pooler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Warning, register
from django.db import connections

from .. import conf, dialects
from .databases import Configs, aliases

POOLER_PORTS = ("6432", "6543")  # PgBouncer's, and that of hosts which run one
MIN_SIZE = 4  # of psycopg's pool where it is not told; its greatest size then, too


@register("django_outbox")
def check_connections(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W051 a pool smaller than the worker's threads; W052 LISTEN through a pooler."""
    if conf.problems() or conf.current().MODE == "writer_only":
        return []
    return [
        message
        for alias in aliases()
        if connections[alias].vendor == "postgresql"
        for message in (*_pool(alias), *_pooler(alias))
    ]


def _pool(alias: str) -> Iterator[CheckMessage]:
    pool = connections.settings[alias].get("OPTIONS", {}).get("pool")
    if not pool:
        return
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size") or options.get("min_size", MIN_SIZE)
    threads = conf.current().WORKERS
    if isinstance(size, int) and size < threads:
        yield Warning(
            f"The connection pool of {alias!r} has at most {size} connections, but a worker runs "
            f'listeners in {threads} threads (OUTBOX["WORKERS"]): they would wait for each other, '
            "and fail in the end.",
            hint=f'Set OPTIONS["pool"]["max_size"] to {threads} or more; async listeners that use '
            "the database want one each beside that. The engine's own connections are apart.",
            id="django_outbox.W051",
        )


def _pooler(alias: str) -> Iterator[CheckMessage]:
    listens_on = _listens_on(alias)
    if listens_on not in connections:
        return
    settings = connections.settings[listens_on]
    if reason := _looks_pooled(settings):
        yield Warning(
            f"Workers of {alias!r} would LISTEN on {listens_on!r}, where {reason}: it looks like "
            "a pooler in transaction mode, through which no notification arrives. Events are found "
            'by looking every OUTBOX["PROBE_INTERVAL"] instead.',
            hint="Add an alias that goes to PostgreSQL directly, and name it: "
            'OUTBOX["DOORBELL"] = {"kind": "postgres", "database": "direct"}.',
            id="django_outbox.W052",
        )


def _listens_on(alias: str) -> str:
    """Return the alias on which a worker of this one listens; empty: it does not."""
    doorbell = conf.current().DOORBELL
    options = doorbell if isinstance(doorbell, dict) else {"kind": doorbell}
    if options["kind"] == "auto":
        return alias if dialects.of(connections[alias]).notifies else ""
    return str(options.get("database") or alias) if options["kind"] == "postgres" else ""


def _looks_pooled(settings: dict[str, Any]) -> str | None:
    """Say what in the settings of an alias one writes for a pooler in transaction mode."""
    if settings.get("DISABLE_SERVER_SIDE_CURSORS"):
        return "DISABLE_SERVER_SIDE_CURSORS is set"
    if str(settings.get("PORT") or "") in POOLER_PORTS:
        return f"PORT is {settings['PORT']}"
    return None
