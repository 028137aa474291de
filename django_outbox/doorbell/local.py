"""Doorbell for workers on the same host: a Unix datagram to each of them."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from django.db.backends.base.base import BaseDatabaseWrapper

from ..log import first_line
from .base import Ear, database_identity

logger = logging.getLogger("django_outbox")

WARN_EVERY = 60.0  # seconds between two warnings, at least
# Bytes of a directory. macOS takes paths of 103, Linux of 107; a slash and the name are 31.
MAX_DIRECTORY = 72


class Local:
    """Notifies one socket per worker in a directory.

    A process that may create a socket there may notify the workers, and do nothing else to them.
    ``directory`` must exist, and its mode decides which users share it. Without it the directory
    is private to the user of the process, as where its path is too long for a socket.
    """

    def __init__(self, alias: str, *, directory: str | None = None) -> None:
        self._given = None if directory is None else Path(directory)
        self._prefix = f"{database_identity(alias)}."
        self._faulty: frozenset[str] = frozenset()  # sockets already reported
        self._warn_at = 0.0  # monotonic; no warning before

    def ring(self, connection: BaseDatabaseWrapper) -> None:
        directory, faulty = self.directory(), dict[str, OSError]()  # by the socket's name
        # A new socket costs 10 µs, and leaves nothing to close later or to share across a fork.
        with _datagram_socket() as sender:
            for path in directory.iterdir():
                if path.name.startswith(self._prefix):
                    try:
                        _send(sender, path)
                    except OSError as error:  # only this socket: notify the others
                        faulty[path.name] = error
        if faulty or self._faulty:
            self._report(faulty)

    def _report(self, faulty: dict[str, OSError]) -> None:
        """Log sockets not reported before; two threads at the same time may log twice."""
        new = [*faulty.keys() - self._faulty]
        if new and (now := time.monotonic()) >= self._warn_at:
            self._faulty, self._warn_at = frozenset(faulty), now + WARN_EVERY
            logger.warning(
                "some workers could not be woken; they poll socket=%s sockets=%d error=%s",
                new[0],
                len(new),
                first_line(faulty[new[0]]),
            )
        else:
            self._faulty &= faulty.keys()

    def ear(self) -> Ear:
        if self._given is not None and _is_too_long(self._given):
            logger.warning(
                'OUTBOX["DOORBELL"]["directory"] too long for sockets; using a private one path=%s',
                self._given,
            )
        return LocalEar(self, self._prefix)

    def directory(self) -> Path:
        """Return the directory of the sockets: the given one, or one private to this user."""
        if self._given is not None and not _is_too_long(self._given):
            return self._given
        path = Path(tempfile.gettempdir(), f"django_outbox_{os.getuid()}")
        if _is_too_long(path):
            path = Path("/tmp", path.name)  # noqa: S108 - its owner and mode are checked
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a directory of ours alone (mode 0700)")
        return path


class LocalEar:
    sure = False  # receives nothing from writers on other hosts

    def __init__(self, doorbell: Local, prefix: str) -> None:
        self._doorbell, self._prefix = doorbell, prefix
        self._open = ExitStack()  # the socket, and its file

    def listen(self) -> None:
        self.close()
        directory = self._doorbell.directory()
        name = f"{self._prefix}{os.getpid()}.{secrets.token_hex(3)}"
        self._socket = self._open.enter_context(_datagram_socket())
        # Writers must not find the socket under its name before they may write to it.
        self._path = directory / f".{name}"
        self._open.callback(lambda: self._path.unlink(missing_ok=True))
        self._socket.bind(str(self._path))
        _set_mode(self._path, directory.stat().st_mode)
        self._path = self._path.rename(directory / name)

    def wait(self, timeout: float) -> bool:
        self._socket.settimeout(timeout)
        try:
            self._socket.recv(16)
        except TimeoutError:
            if not self._path.exists():
                raise ConnectionError(f"{self._path} was removed") from None
            return False
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
        return True

    def close(self) -> None:
        self._open.close()


def _set_mode(path: Path, directory_mode: int) -> None:
    """Let users who may create sockets in the directory, by its mode, write to a new socket.

    Never follows a link: in a shared directory another user could replace the socket by one.
    """
    mode = 0o600 | 3 * (directory_mode & 0o022)  # to write, and to read as well
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(path, mode, follow_symlinks=False)  # noqa: PTH101 - Path.chmod is not safer
        return
    number = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        Path(f"/proc/self/fd/{number}").chmod(mode)
    finally:
        os.close(number)


def _send(sender: socket.socket, path: Path) -> None:
    """Notify one worker; ``OSError`` if the file is not a socket or we may not write to it."""
    try:
        sender.sendto(b"!", str(path))
    except (BlockingIOError, FileNotFoundError):
        pass  # enough notifications wait there already, or it was removed since we listed it
    except ConnectionRefusedError:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK)) from None
            # Its worker was killed. In a sticky directory only that worker's user may remove it.
            with suppress(PermissionError):
                path.unlink()


def _is_too_long(directory: Path) -> bool:
    return len(os.fsencode(directory)) > MAX_DIRECTORY


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made
