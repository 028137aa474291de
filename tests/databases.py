"""Choose the database of a test run, and start a server for it if needed.

``OUTBOX_TEST_DB`` names the vendor (sqlite, postgres, mariadb or mysql), ``DATABASE_URL`` a running
server. If no server is named, a private one is started, and stopped when the process that started
it ends. Its URL is put into the environment, so that child processes use the same database.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from tests import servers

SCHEMES: dict[str, tuple[str, ...]] = {
    "sqlite": ("sqlite",),
    "postgres": ("postgres",),
    "postgresql": ("postgres",),
    "mysql": ("mariadb", "mysql"),  # OUTBOX_TEST_DB says which
}
OPTIONS: dict[str, dict[str, Any]] = {
    # In DEFERRED mode, a transaction that reads before it writes cannot wait for the lock.
    "sqlite": {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    },
    "postgres": {},
    "mariadb": {"charset": "utf8mb4"},
    "mysql": {"charset": "utf8mb4"},
}


def databases() -> dict[str, dict[str, Any]]:
    """Return Django's ``DATABASES``: ``default`` and, on the same server, ``other``."""
    default = _settings(database_url())
    other_url = os.environ.get("DATABASE_URL_OTHER")
    other = _settings(other_url) if other_url else {**default, "NAME": f"{default['NAME']}_other"}
    for settings in (default, other):
        settings["TEST"] = {"NAME": _test_name(settings["NAME"])}
    return {"default": default, "other": other}


def environment(aliases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the environment that makes a child process use these databases (settings by alias)."""
    return {
        "OUTBOX_TEST_DB": vendor(),
        "DATABASE_URL": _url(aliases["default"]),
        "DATABASE_URL_OTHER": _url(aliases["other"]),
    }


def vendor() -> str:
    """Return sqlite, postgres, mariadb or mysql, as ``OUTBOX_TEST_DB`` or ``DATABASE_URL`` says."""
    named = os.environ.get("OUTBOX_TEST_DB")
    if named and named not in OPTIONS:
        raise ImproperlyConfigured(
            f"OUTBOX_TEST_DB is {named!r}; expected one of {', '.join(OPTIONS)}."
        )
    return named or next(iter(_vendors(os.environ.get("DATABASE_URL", ""))), "sqlite")


def durable() -> bool:
    """Return whether a server started here makes commits durable: only benchmarks ask for it.

    The data of tests does not outlive the run.
    """
    return bool(os.environ.get("OUTBOX_TEST_DURABLE"))


def database_url() -> str:
    """Return the run's database URL, starting a server if none is named; children inherit it."""
    if not is_named():
        own = _sqlite_file if vendor() == "sqlite" else _start
        os.environ["DATABASE_URL"] = own()
    return os.environ["DATABASE_URL"]


def is_named() -> bool:
    """Return whether ``DATABASE_URL`` names a database of the run's vendor."""
    return vendor() in _vendors(os.environ.get("DATABASE_URL", ""))


# --- starting a server --------------------------------------------------------------------


def _sqlite_file() -> str:
    # Only a name: Django creates and removes the test database, and mypy's plugin creates none.
    return f"sqlite:///{tempfile.gettempdir()}/outbox-{os.getpid()}.sqlite3"


def _start() -> str:
    server = servers.make(vendor(), _scratch(), durable=durable())
    server.start()
    _at_end(server.stop)
    return f"{server.url.rpartition('/')[0]}/outbox"  # Django creates its test database next to it


def _scratch() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="outbox-"))
    _at_end(lambda: shutil.rmtree(directory, ignore_errors=True))
    return directory


def _at_end(stop: Callable[[], object]) -> None:
    """Call ``stop`` when this process ends, but not when a fork of it does."""
    started_by = os.getpid()
    atexit.register(lambda: stop() if os.getpid() == started_by else None)


# --- URLs and settings ----------------------------------------------------------------------


def _vendors(url: str) -> tuple[str, ...]:
    return SCHEMES.get(url.partition("://")[0], ())


def _settings(url: str) -> dict[str, Any]:
    settings: dict[str, Any] = {**dj_database_url.parse(url)}
    vendor, *_ = _vendors(url) or ("sqlite",)
    settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **OPTIONS[vendor]}
    return settings


def _url(settings: dict[str, Any]) -> str:
    if vendor() == "sqlite":
        return f"sqlite:///{settings['NAME']}"
    user, password, host, name = (
        quote(str(settings.get(part) or ""), safe="")
        for part in ("USER", "PASSWORD", "HOST", "NAME")
    )
    scheme = "postgres" if vendor() == "postgres" else "mysql"
    port = f":{settings['PORT']}" if settings.get("PORT") else ""
    return f"{scheme}://{user}{f':{password}' if password else ''}@{host}{port}/{name}"


def _test_name(name: str) -> str:
    """Return the name of the test database: ``outbox`` → ``test_outbox``, also for a file."""
    path = Path(name)
    return str(path.with_name(f"test_{path.name}"))
