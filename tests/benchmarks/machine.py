"""On what a run was made: hardware, versions, and how the server keeps its promises."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import django
import psutil
from django.db import connection

DRIVERS = {"postgresql": "psycopg", "mysql": "mysqlclient"}
QUERIES = {
    "postgresql": "SELECT name, setting FROM pg_settings WHERE name IN "
    "('fsync', 'synchronous_commit', 'shared_buffers', 'autovacuum')",
    "mysql": "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('innodb_flush_log_at_trx_commit', 'innodb_buffer_pool_size', 'sync_binlog')",
}


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def software() -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "django": django.get_version(),
        "revision": revision(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def server() -> dict[str, Any]:
    """Describe the database that is connected."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            settings = {
                name: cursor.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("journal_mode", "synchronous")
            }
        return {"name": f"SQLite {sqlite3.sqlite_version}", "driver": "sqlite3", **settings}
    with connection.cursor() as cursor:
        cursor.execute("SELECT version()")
        name = cursor.fetchone()[0]
        cursor.execute(QUERIES[connection.vendor])
        settings = dict(cursor.fetchall())
    name = " ".join(name.split()[:2]) if connection.vendor == "postgresql" else name
    driver = DRIVERS[connection.vendor]
    return {"name": name, "driver": f"{driver} {version(driver)}", **settings}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def revision() -> str:
    """Return the commit that was measured, with a + if the package differs from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", ":/django_outbox"])
    except (OSError, subprocess.CalledProcessError):
        return version_of_package()
    return commit + "+" * bool(changed)


def version_of_package() -> str:
    try:
        return version("django-transactional-outbox")
    except PackageNotFoundError:
        return "unknown"
