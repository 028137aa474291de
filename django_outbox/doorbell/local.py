"""The doorbell of one host: a Unix datagram to every worker."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from django.db.backends.base.base import BaseDatabaseWrapper

from .ends import Ear, database_identity


class Local:
    """A socket per worker in a private directory; who may write there may ring, no more.

    ``directory`` may name one that exists; its mode is respected.
    """

    def __init__(self, alias: str, *, directory: str | None = None) -> None:
        self._given = directory
        self._prefix = f"{database_identity(alias)}."

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        # A socket for each ring, ten microseconds: nothing to close later, or to share by a fork.
        with _datagram_socket() as sender:
            for path in self.directory().glob(f"{self._prefix}*"):
                _send(sender, path)

    def ear(self) -> Ear:
        return LocalEar(self, self._prefix)

    def directory(self) -> Path:
        """Return the directory of the sockets: the one that was given, or a private one of ours."""
        if self._given is not None:
            return Path(self._given)
        path = Path(tempfile.gettempdir()) / f"django_outbox_{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a directory of ours alone (mode 0700)")
        return path


class LocalEar:
    sure = False  # writers on other hosts are not heard

    def __init__(self, bell: Local, prefix: str) -> None:
        self._bell, self._prefix = bell, prefix
        self._socket: socket.socket | None = None
        self._path: Path | None = None

    def listen(self) -> None:
        self.close()
        name = f"{self._prefix}{os.getpid()}.{secrets.token_hex(3)}"
        path = self._bell.directory() / name
        self._socket = _datagram_socket()
        self._socket.bind(str(path))
        self._path = path

    def wait(self, timeout: float) -> bool:
        assert self._socket is not None and self._path is not None
        self._socket.settimeout(timeout)
        try:
            self._socket.recv(16)
        except TimeoutError:
            if not self._path.exists():
                raise ConnectionError(f"{self._path} was removed") from None
            return False
        self._take_what_waits()
        return True

    def _take_what_waits(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(16)
        except BlockingIOError:
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def _send(sender: socket.socket, path: Path) -> None:
    try:
        sender.sendto(b"!", str(path))
    except BlockingIOError:
        pass  # rings enough are waiting there
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)  # its worker was killed


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made
