"""A local doorbell that several system users share, and sockets that cannot be notified."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_outbox.doorbell import local
from django_outbox.doorbell.base import database_identity
from django_outbox.doorbell.local import Local
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

A_USER, ANOTHER, GROUP = 65534, 1, 4242  # nobody and daemon, members of one group
SHARED = {"group": 0o2770, "all users": 0o1777}
WOKEN, NOT_WOKEN = 0, 1  # exit codes

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")


@pytest.fixture
def bells() -> Iterator[Path]:
    """Create a directory for sockets, whose paths are limited to 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="bells", dir="/tmp") as directory:
        yield Path(directory)


def shared(directory: Path, by: str) -> None:
    os.chown(directory, 0, GROUP)
    directory.chmod(SHARED[by])


def become(uid: int, *, groups: list[int]) -> None:
    """Become this user, irreversibly."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)


@contextmanager
def child(uid: int, work: Callable[[int], int], *, groups: tuple[int, ...] = (GROUP,)) -> Any:
    """Fork a process of another user; ``work`` may write to a pipe and returns the exit code.

    A fork, not a command, since the other user may not be able to read this package.
    """
    ear, mouth = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests' pools
        pid = os.fork()
    if not pid:
        code = 99
        try:
            become(uid, groups=[*groups])
            code = work(mouth)
        finally:
            os._exit(code)
    os.close(mouth)
    process = Process(pid, ear)
    try:
        yield process
    finally:
        process.end()


class Process:
    def __init__(self, pid: int, ear: int) -> None:
        self.pid, self._ear, self._code = pid, ear, None
        os.set_blocking(ear, False)
        self._said = b""

    def said(self) -> bytes:
        with suppress(BlockingIOError):
            self._said += os.read(self._ear, 65_536)
        return self._said

    def code(self) -> int:
        """Wait for its end; return the exit code."""

        def look() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            return pid != 0

        wait_until(look, what="its end")
        return int(str(self._code))

    def end(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._ear)


def listen(directory: Path) -> Callable[[int], int]:
    """Listen as a worker does: open a socket, report that, and wait for a notification."""

    def work(mouth: int) -> int:
        ear = Local("default", directory=str(directory)).ear()
        ear.listen()
        os.write(mouth, b"listening")
        heard = ear.wait(15)
        ear.close()
        return WOKEN if heard else NOT_WOKEN

    return work


def ring(directory: Path, times: int = 1) -> Callable[[int], int]:
    """Notify as a writer does; report which lines were logged."""

    def work(mouth: int) -> int:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("django_outbox").addHandler(handler)
        bell = Local("default", directory=str(directory))
        for _ in range(times):
            bell.ring(connection)
        os.write(mouth, json.dumps(lines).encode())
        return 0

    return work


# -- users -----------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("by", SHARED)
def test_workers_of_other_users_are_woken(bells: Path, by: str) -> None:
    """Each of two users rings the other's worker, and his own."""
    shared(bells, by)
    with child(A_USER, listen(bells)) as theirs, child(ANOTHER, listen(bells)) as own:
        for each in (theirs, own):
            wait_until(each.said, what="an ear")
        with child(ANOTHER, ring(bells)) as writer:
            assert writer.code() == 0
            assert json.loads(writer.said()) == []
        assert (theirs.code(), own.code()) == (WOKEN, WOKEN)


@needs_root
def test_who_is_not_of_the_group_rings_nobody_and_is_told(bells: Path) -> None:
    shared(bells, "group")

    def try_it(mouth: int) -> int:
        try:
            Local("default", directory=str(bells)).ring(connection)
        except PermissionError:
            return 17
        return 0

    with child(A_USER, listen(bells)) as worker:
        wait_until(worker.said, what="an ear")
        with child(ANOTHER, try_it, groups=()) as writer:
            assert writer.code() == 17


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        (0o700, 0o600),
        (0o750, 0o600),
        (0o2770, 0o660),
        (0o755, 0o600),
        (0o777, 0o666),
        (0o1777, 0o666),
    ],
    ids=oct,
)
@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_a_socket_is_open_to_those_who_may_create_one_beside_it(
    bells: Path, directory: int, expected: int, mask: int
) -> None:
    bells.chmod(directory)
    ear = Local("default", directory=str(bells)).ear()
    before = os.umask(mask)
    try:
        ear.listen()
    finally:
        os.umask(before)
    (path,) = bells.iterdir()
    assert stat.S_IMODE(path.lstat().st_mode) == expected
    assert path.name.startswith(database_identity("default"))
    ear.close()
    assert not [*bells.iterdir()]


def test_a_link_in_the_place_of_a_socket_opens_nothing(bells: Path) -> None:
    """A user who may write to the directory could put a link there before the mode is set."""
    secret, link = bells / "secret", bells / "link"
    secret.touch(0o600)
    link.symlink_to(secret)
    with pytest.raises(OSError, match="non-socket"):
        local._set_mode(link, 0o777)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


# -- sockets that cannot be notified ---------------------------------------------------------------


def bound(path: Path, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    return made


def closed(path: Path) -> Any:
    """Create the socket of a live worker of an old release, which only its own user may notify."""
    made = bound(path)
    path.chmod(0o755)
    os.chown(path, A_USER, A_USER)
    return made


def stale(path: Path) -> None:
    bound(path).close()
    path.chmod(0o666)
    os.chown(path, A_USER, A_USER)


FAULTS: dict[str, tuple[Callable[[Path], Any], bool]] = {  # and whether a warning is logged
    "closed to us": (closed, True),
    "stale": (stale, False),
    "no socket": (lambda path: path.touch(), True),
    "a directory": (lambda path: path.mkdir(), True),
    "a stream": (lambda path: bound(path, socket.SOCK_STREAM), True),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), False),
}


@needs_root
@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_cannot_be_rung_keeps_no_other_from_it(bells: Path, fault: str) -> None:
    """There are four of each kind, in the order of the directory, which is sticky."""
    shared(bells, "all users")
    make, is_told = FAULTS[fault]
    with ExitStack() as stack:
        for n in range(4):
            made = make(bells / f"{database_identity('default')}.foreign-{n}")
            if made is not None:
                stack.callback(made.close)
        mine = [bound(bells / f"{database_identity('default')}.mine-{n}") for n in range(4)]
        for n, each in enumerate(mine):
            stack.callback(each.close)
            each.setblocking(False)
            os.chown(bells / f"{database_identity('default')}.mine-{n}", ANOTHER, ANOTHER)
        before = {*bells.iterdir()}
        with child(ANOTHER, ring(bells, times=5)) as writer:
            assert writer.code() == 0
            lines = json.loads(writer.said())
        for each in mine:
            assert each.recv(16)
        assert len(lines) == is_told  # once, not per notification or socket
        assert all("could not be woken" in line and "sockets=4" in line for line in lines)
        assert {*bells.iterdir()} == before  # only its own user may remove a stale one


@needs_root
def test_a_stale_one_of_another_user_is_removed_where_that_is_allowed(bells: Path) -> None:
    shared(bells, "group")
    path = bells / f"{database_identity('default')}.foreign"
    stale(path)
    with child(ANOTHER, ring(bells)) as writer:
        assert writer.code() == 0
        assert json.loads(writer.said()) == []
    assert not path.exists()


def test_what_is_no_socket_is_never_removed(bells: Path) -> None:
    path = bells / f"{database_identity('default')}.notes"
    path.write_text("not ours")
    Local("default", directory=str(bells)).ring(connection)
    assert path.read_text() == "not ours"
