"""The doorbell: a commit wakes the workers of other processes; its loss costs only latency."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.doorbell.base import database_identity
from django_outbox.doorbell.local import Local
from django_outbox.worker import claimer
from tests.reach.children import Site
from tests.table import PLACED, insert, listening, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

FAR = {"POLL_INTERVAL": 60, "PROBE_INTERVAL": 60}  # seconds; only a notification is quicker
REDIS = "redis://127.0.0.1:6379/0"
CLOSED = "redis://127.0.0.1:1/0"  # no server listens there


def redis_client() -> Any:
    redis = pytest.importorskip("redis")
    client = redis.Redis.from_url(REDIS)
    try:
        client.ping()
    except redis.ConnectionError:
        client.close()
        pytest.skip("no Redis at 127.0.0.1:6379")
    return client


def needs_postgres() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has NOTIFY")


@contextmanager
def an_ear(directory: Path) -> Iterator[Callable[[], int]]:
    """Add a socket among those of the workers; yield a function that counts its notifications."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.setblocking(False)
    ear.bind(str(directory / f"{database_identity('default')}.test"))
    heard = 0

    def rings() -> int:
        nonlocal heard
        while True:
            try:
                ear.recv(16)
            except BlockingIOError:
                return heard
            heard += 1

    try:
        yield rings
    finally:
        ear.close()


def local(directory: Path) -> dict[str, str]:
    return {"kind": "local", "directory": str(directory)}


@pytest.fixture
def bells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory for sockets, whose paths may have at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="bells") as directory:
        yield Path(directory)


# -- from one process to another -------------------------------------------------------------------


def rings_at(kind: str, directory: Path) -> dict[str, Any]:
    """Return the ``DOORBELL`` setting for a kind; skip the test where it is not available."""
    if kind == "postgres":
        needs_postgres()
        return {"kind": "postgres"}
    if kind == "redis":
        redis_client().close()
        return {"kind": "redis", "url": REDIS}
    return local(directory)


def ears(kind: str, directory: Path) -> int:
    """Return how many workers listen."""
    if kind == "postgres":
        return len(listeners())
    if kind == "redis":
        with redis_client() as client:
            channel = f"django_outbox_{database_identity('default')}"
            return int(client.pubsub_numsub(channel)[0][1])
    return len([*directory.iterdir()])


def listeners() -> list[int]:
    """Return the server's process ids of the sessions that LISTEN."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'LISTEN%%'",
            [],
        )
        return [pid for (pid,) in cursor.fetchall()]


# -- notifications ---------------------------------------------------------------------------------


def test_w19_one_transaction_rings_once_and_only_after_its_commit(
    settings: Any, bells: Path
) -> None:
    settings.OUTBOX = {"DOORBELL": local(bells), "DOORBELL_INTERVAL": 0}
    with an_ear(bells) as rings:
        with transaction.atomic():
            for _ in range(5):
                outbox.write(PLACED)
            outbox.write_many([outbox.Event(event_type=PLACED) for _ in range(5)])
            assert rings() == 0
        assert rings() == 1
        with transaction.atomic():
            outbox.write(PLACED, deliver_after=3600)  # a worker must learn the new due time
        assert rings() == 2


def test_488_commits_that_come_close_together_ring_each(
    settings: Any, monkeypatch: pytest.MonkeyPatch, bells: Path
) -> None:
    """At random moments some do; only a steady load is announced at the interval."""
    monkeypatch.setattr(doorbell, "LOOP_COMMITS", 1000)
    now = time.monotonic()
    monkeypatch.setattr("django_outbox.doorbell.time.monotonic", lambda: now)
    settings.OUTBOX = {"DOORBELL": local(bells), "DOORBELL_INTERVAL": 0.03}

    def write_some() -> None:
        for _ in range(20):
            write()

    with an_ear(bells) as rings:
        write_some()
        assert rings() == 4  # the last is more than 0.1 s ahead
        now += 0.11
        write_some()
        assert rings() == 4  # a steady load gathers for four intervals
        now += 0.02
        write_some()
        assert rings() == 5  # and for as many again
        now += 1.0
        write_some()
        assert rings() == 9  # it was over


def test_488_a_loop_of_commits_rings_seldom(
    settings: Any, monkeypatch: pytest.MonkeyPatch, bells: Path
) -> None:
    """A notification costs as much as the event, so a loop must not pay for each."""
    now = time.monotonic()
    monkeypatch.setattr("django_outbox.doorbell.time.monotonic", lambda: now)
    settings.OUTBOX = {"DOORBELL": local(bells), "DOORBELL_INTERVAL": 0.005}
    with an_ear(bells) as rings:
        for _ in range(20):
            now += 0.001
            write()
        assert rings() == 4  # three, until it is known for a loop; then one after two intervals
        now += 0.0025
        write()
        assert rings() == 5  # it is over


def test_488_what_slow_rings_keep_quiet_about_is_not_missed(
    settings: Any, bells: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may send none for longer than the interval; workers poll again after that time."""
    monkeypatch.setattr(claimer, "PROBATION", 0.0)  # else it polls soon after its start
    settings.OUTBOX = {"DOORBELL": local(bells), "DOORBELL_INTERVAL": 0.2, **FAR}
    seen: list[float] = []
    with listening(lambda event: seen.append(time.monotonic())), outbox.Worker():
        wait_until(lambda: ears("local", bells) == 1, what="an ear")
        insert()  # as another process would write it
        doorbell.ring(connection)
        wait_until(lambda: len(seen) == 1, what="what was there at the ring")
        wait_until(lambda: time.monotonic() > seen[0] + 0.3, what="the first look is over")
        insert()
        wait_until(lambda: len(seen) == 2, what="what came without a ring")


@pytest.mark.parametrize("mode", [{"ENABLED": False}, {"MODE": "writer_only"}])
def test_154_nobody_is_rung_when_nothing_is_handed_over(
    settings: Any, bells: Path, mode: dict[str, Any]
) -> None:
    settings.OUTBOX = {"DOORBELL": local(bells), **mode}
    with an_ear(bells) as rings:
        write()
        assert rings() == 0


def test_489_a_ring_tells_nothing_of_the_event(settings: Any, bells: Path) -> None:
    settings.OUTBOX = {"DOORBELL": local(bells)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(bells / f"{database_identity('default')}.test"))
        write(payload={"secret": "s3cret"})
        assert len(ear.recv(1000)) == 1


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_nobody_is_rung(settings: Any, bells: Path) -> None:
    """A TestCase never commits, so there is nothing to deliver."""
    settings.OUTBOX = {"DOORBELL": local(bells)}
    with an_ear(bells) as rings:
        with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
            write()
        assert len(callbacks) == 1
        assert rings() == 0


# -- a doorbell that does not work -----------------------------------------------------------------


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records]
    return [each for each in found if "doorbell failed" in each and "polling" in each]


class Moody:
    """A custom doorbell, given by dotted path, that fails unless ``works`` is set."""

    works = False
    rings = 0

    def __init__(self, alias: str) -> None:
        assert alias == "default"

    def ring(self, connection: Any) -> None:
        if not type(self).works:
            raise ConnectionError("not today")
        type(self).rings += 1

    def ear(self) -> Any:
        raise NotImplementedError


def test_486_a_failed_ring_is_tried_again_later_and_told_once(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "BACKOFF", (0.02, 0.1))
    monkeypatch.setattr(Moody, "works", False)
    monkeypatch.setattr(Moody, "rings", 0)
    settings.OUTBOX = {"DOORBELL": "tests.test_doorbell.Moody", "DOORBELL_INTERVAL": 0}
    notifier = doorbell._notifier("default")
    assert notifier is not None

    def failed() -> bool:
        write()
        return notifier._failures >= 3

    def rung() -> int:
        write()
        return Moody.rings

    with caplog.at_level(logging.WARNING, "django_outbox"):
        wait_until(failed, what="three failures")
        Moody.works = True
        wait_until(rung, what="a ring, now that it works")
        assert len(failures(caplog)) == 1
        Moody.works = False
        write()
        assert len(failures(caplog)) == 2  # a new failure, logged again


@pytest.mark.parametrize(
    "bell",
    [None, {"kind": "redis", "url": CLOSED}, {"kind": "local", "directory": "/nowhere"}],
    ids=["none", "redis down", "no directory"],
)
def test_20_without_a_bell_the_probe_delivers(settings: Any, bell: Any) -> None:
    if isinstance(bell, dict) and bell["kind"] == "redis":
        pytest.importorskip("redis")
    settings.OUTBOX = {"DOORBELL": bell, "POLL_INTERVAL": 60, "PROBE_INTERVAL": 0.1}
    seen: list[str] = []
    with listening(lambda event: seen.append(event.source)), outbox.Worker():
        for count in range(1, 4):
            insert()  # as another process would write it
            wait_until(lambda count=count: statuses() == {"DONE": count}, what="a delivery")
    assert seen == ["cold"] * 3


# -- the directory of local doorbells --------------------------------------------------------------


@pytest.fixture
def temporary(bells: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the private directory will be created."""
    monkeypatch.setattr(tempfile, "tempdir", str(bells))
    return bells / f"django_outbox_{os.getuid()}"


def test_19_the_directory_is_private(settings: Any, temporary: Path) -> None:
    settings.OUTBOX = {"DOORBELL": "local", **FAR}
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id)), outbox.Worker():
        # Its name begins with a dot until it can be notified.
        (path,) = wait_until(lambda: [*temporary.glob("[!.]*")], what="a socket")
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
        (event_id,) = insert()
        doorbell.ring(connection)
        wait_until(lambda: seen == [event_id], what="a delivery")
    assert not [*temporary.iterdir()]


@pytest.mark.parametrize("fault", ["others may enter", "a link", "a file"])
def test_19_a_directory_that_others_could_use_is_refused(
    settings: Any, temporary: Path, bells: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    if fault == "others may enter":
        temporary.mkdir()
        temporary.chmod(0o755)
    elif fault == "a link":
        (bells / "elsewhere").mkdir(mode=0o700)
        temporary.symlink_to(bells / "elsewhere")
    else:
        temporary.write_text("")
    settings.OUTBOX = {"DOORBELL": "local", "PROBE_INTERVAL": 0.1}
    with caplog.at_level(logging.WARNING, "django_outbox"):
        write(3)
        write(3)
    assert len(failures(caplog)) == 1
    with listening(lambda event: None), outbox.Worker():
        wait_until(lambda: statuses() == {"DONE": 6}, what="the probe delivers")


def test_a_directory_may_have_a_long_path(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers and writers use a private directory, as sockets cannot have such paths."""
    path = tmp_path.joinpath(*["d" * 60] * 3)
    path.mkdir(parents=True)
    worker, writer = (Local("default", directory=str(path)) for _ in range(2))
    with closing(worker.ear()) as ear:
        ear.listen()
        assert [*temporary.iterdir()]
        writer.ring(connection)
        assert ear.wait(10)
    line = 'OUTBOX["DOORBELL"]["directory"] too long for sockets; using a private one'
    assert caplog.messages == [f"{line} path={path}"]
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    assert Local("default").directory().parent == Path("/tmp")


def test_19_a_killed_workers_socket_is_removed_by_the_next_ring(
    settings: Any, database_env: dict[str, str], tmp_path: Path, bells: Path
) -> None:
    settings.OUTBOX = {"DOORBELL": local(bells)}
    with Site(database_env, tmp_path).worker(DOORBELL=local(bells)) as child:
        wait_until(lambda: [*bells.glob("[!.]*")], within=30, what="a socket")  # under its name
        child.stop(signal.SIGKILL)
    assert [*bells.iterdir()]
    write()
    assert not [*bells.iterdir()]


def test_a_socket_that_was_removed_is_made_again(settings: Any, bells: Path) -> None:
    """For example by a cleaner of temporary files."""
    settings.OUTBOX = {"DOORBELL": local(bells), **FAR}
    with listening(lambda event: None), outbox.Worker():
        # Its name begins with a dot until the worker listens.
        (first,) = wait_until(lambda: [*bells.glob("[!.]*")], what="a socket")
        first.unlink()
        wait_until(lambda: {*bells.glob("[!.]*")} - {first}, what="another")
        insert()
        doorbell.ring(connection)
        wait_until(lambda: statuses() == {"DONE": 1}, what="a delivery")


# -- forks -----------------------------------------------------------------------------------------


def test_a_fork_rings_by_itself(settings: Any, bells: Path) -> None:
    settings.OUTBOX = {"DOORBELL": local(bells), "DOORBELL_INTERVAL": 60}
    with an_ear(bells) as rings:
        doorbell.ring(connection)
        assert rings() == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other tests' pools left threads
            pid = os.fork()
        if not pid:
            try:
                doorbell.ring(connection)  # the parent's interval does not apply to the child
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert rings() == 2
        doorbell.ring(connection)
        assert rings() == 2  # within the parent's interval
