"""Custom doorbells, both notifying and listening, and invalid values of DOORBELL."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import override_settings

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.worker import claimer, threads
from tests.table import insert, listening, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

FAR = {"POLL_INTERVAL": 60, "PROBE_INTERVAL": 60}  # seconds; only a notification is quicker
DELIVERED: Callable[[outbox.Event], None] = lambda event: None  # noqa: E731


class Bell:
    """A doorbell within one process; its listener connections record the calls they get."""

    made: list[tuple[str, str]] = []  # (alias, option) of each instance
    ears: list[Ear] = []
    sure = False

    def __init__(self, alias: str, *, room: str = "none") -> None:
        type(self).made.append((alias, room))

    def ring(self, connection: Any) -> None:
        assert not connection.in_atomic_block  # after the commit, in autocommit
        for each in self.ears:
            each.rung.set()

    def ear(self) -> Ear:
        type(self).ears.append(Ear(self.sure))
        return self.ears[-1]


class Ear:
    def __init__(self, sure: bool) -> None:
        self.sure = sure
        self.rung = threading.Event()
        self.calls: list[tuple[str, str]] = []  # (method, thread)
        self.timeouts: list[float] = []
        self.failing: dict[str, int] = {}  # how many more times a method fails

    def _note(self, name: str) -> None:
        self.calls.append((name, threading.current_thread().name))
        if self.failing.get(name, 0):
            self.failing[name] -= 1
            raise ConnectionError(f"no {name} today")

    def listen(self) -> None:
        self._note("listen")

    def wait(self, timeout: float) -> bool:
        self.timeouts.append(timeout)
        self._note("wait")
        heard = self.rung.wait(timeout)
        self.rung.clear()
        return heard

    def close(self) -> None:
        self._note("close")

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


PATH = f"{__name__}.Bell"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("made", []), ("ears", []), ("sure", False)):
        monkeypatch.setattr(Bell, name, empty)
    monkeypatch.setattr(claimer, "PROBATION", 0.0)  # else it polls soon after its start


@pytest.fixture
def worker(settings: Any) -> Iterator[outbox.Worker]:
    settings.OUTBOX = {"DOORBELL": PATH, **FAR}
    with listening(DELIVERED), outbox.Worker() as worker:
        wait_until(lambda: "wait" in Bell.ears[0].names(), what="an ear")
        yield worker


# -- listening -------------------------------------------------------------------------------------


def test_a_ring_wakes_the_worker(worker: outbox.Worker) -> None:
    for count in range(1, 4):
        insert()  # as another process would write it
        doorbell.ring(connection)
        wait_until(lambda count=count: statuses() == {"DONE": count}, what="a delivery")
    assert Bell.made == [("default", "none")]
    assert len(Bell.ears) == 1


def test_one_thread_listens_waits_and_closes(settings: Any) -> None:
    settings.OUTBOX = {"DOORBELL": PATH, **FAR}
    with outbox.Worker():
        (ear,) = Bell.ears
        wait_until(lambda: ear.names().count("wait") >= 3, what="waits")
    names = ear.names()
    assert names[0] == "listen"
    assert names[-1] == "close"
    assert {*names[1:-1]} == {"wait"}
    assert {thread for _, thread in ear.calls} == {"outbox-default-doorbell"}
    assert all(0 < each <= 1 for each in ear.timeouts)


@pytest.mark.parametrize("method", ["listen", "wait"])
def test_after_an_error_it_listens_again_and_what_was_missed_is_found(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(threads, "BACKOFF", (0.02, 0.05))
    settings.OUTBOX = {"DOORBELL": PATH, **FAR}
    with (
        caplog.at_level(logging.WARNING, "django_outbox"),
        listening(DELIVERED),
        outbox.Worker() as worker,
    ):
        (ear,) = Bell.ears
        wait_until(lambda: "wait" in ear.names(), what="an ear")
        default = worker._gates.by_queue["default"]
        wait_until(lambda: default.poll_at > claimer.monotonic() + 30, what="a long wait")
        before = ear.names().count("listen")
        insert()  # without a notification
        ear.failing = {"wait": 1, **({"listen": 3} if method == "listen" else {})}
        wait_until(lambda: statuses() == {"DONE": 1}, what="what was written while it was deaf")
        wait_until(lambda: "works again" in caplog.text, what="an ear that works")
    again = ear.names().count("listen") - before
    assert again == (1 if method == "wait" else 4)
    failed = [each for each in caplog.records if "doorbell failed" in each.getMessage()]
    assert len(failed) == 1  # the first of consecutive errors
    assert ear.names().count("close") == 1


def test_an_error_of_close_is_logged_and_the_worker_stops(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {"DOORBELL": PATH, **FAR}
    with caplog.at_level(logging.WARNING, "django_outbox"):
        worker = outbox.Worker()
        worker.start()
        (ear,) = Bell.ears
        wait_until(lambda: "wait" in ear.names(), what="an ear")
        ear.failing = {"close": 1}
        assert worker.stop() is True
    assert "doorbell not closed error=no close today" in caplog.text


@pytest.mark.parametrize("sure", [False, True])
def test_one_that_is_sure_needs_no_probe(settings: Any, sure: bool) -> None:
    Bell.sure = sure
    settings.OUTBOX = {"DOORBELL": PATH, "POLL_INTERVAL": 60, "PROBE_INTERVAL": 0.05}
    with listening(DELIVERED), outbox.Worker() as worker:
        (ear,) = Bell.ears
        wait_until(lambda: "wait" in ear.names(), what="an ear")
        wait_until(lambda: ear.names().count("wait") >= 3, what="its word")
        if sure:
            default = worker._gates.by_queue["default"]
            wait_until(lambda: default.poll_at > claimer.monotonic() + 30, what="a rest")
        insert()  # without a notification
        waits = ear.names().count("wait")
        if not sure:
            wait_until(lambda: statuses() == {"DONE": 1}, what="the probe delivers")
            return
        wait_until(lambda: ear.names().count("wait") >= waits + 4, what="many probes' time")
        assert statuses() == {"NEW": 1}
        doorbell.ring(connection)
        wait_until(lambda: statuses() == {"DONE": 1}, what="the ring delivers")


# -- invalid doorbells -----------------------------------------------------------------------------


class Mute:
    """An incomplete doorbell: it can notify, but nothing can listen."""

    def __init__(self, alias: str) -> None:
        """Nothing to open."""

    def ring(self, connection: Any) -> None:
        """Notify nothing."""


class Broken:
    def __init__(self, alias: str) -> None:
        raise LookupError("no key")


USELESS: dict[str, tuple[Any, str, str]] = {
    "misspelt": ("postgress", "is 'postgress'; expected one of auto,", 'Did you mean "postgres"?'),
    "unknown": ("carrier pigeon", "is 'carrier pigeon'", "settings reference"),
    "unknown kind": ({"kind": "lokal"}, "is 'lokal'", 'Did you mean "local"?'),
    "no name": ({"kind": 5}, "is 5; expected", "settings reference"),
    "no module": ("nowhere.Bell", "cannot be imported", "Correct the dotted path."),
    "no attribute": (f"{__name__}.Nothing", "cannot be imported", "Correct the dotted path."),
    "no callable": (f"{__name__}.PATH", "which is 'tests.", "Expected a class."),
    "no ear": (f"{__name__}.Mute", "which has no method ear.", "ring(connection) and ear()"),
    "neither": (f"{__name__}.forget_me", "no method ring and no ear", "ring(connection)"),
    "broken": (f"{__name__}.Broken", "could not be made: LookupError", "Correct its options."),
    "option": (
        {"kind": "local", "dir": "x"},
        "'dir'. Its options are: directory.",
        'Did you mean "directory"?',
    ),
    "no option": ({"kind": PATH, "colour": 1}, "Its options are: room.", "leave them out"),
    "unfit": ({"kind": "local", "directory": 5}, "could not be made", "Correct its options."),
    "no PostgreSQL": (
        {"kind": "postgres", "database": "othr"},
        "is not a PostgreSQL database",
        '"local" there',
    ),
    "no url": ({"kind": "redis", "url": "nonsense"}, "could not be made", "Correct its options."),
}


def forget_me(alias: str) -> object:
    return object()


def found() -> list[Any]:
    return [each for each in run_checks(tags=["django_outbox"]) if "DOORBELL" in each.msg]


@pytest.mark.parametrize("name", USELESS)
def test_e002_a_doorbell_that_is_none(name: str) -> None:
    value, says, hint = USELESS[name]
    if name == "no url":
        pytest.importorskip("redis")
    with override_settings(OUTBOX={"DOORBELL": value}):
        [error] = found()
        assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
        assert says in error.msg
        assert hint in error.hint
        with pytest.raises(ImproperlyConfigured, match="DOORBELL"):
            outbox.Worker()


def test_e002_redis_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with override_settings(OUTBOX={"DOORBELL": {"kind": "redis"}}):
        [error] = found()
    assert error.id == "django_outbox.E002"
    assert "pip install django-transactional-outbox[redis]" in error.msg


def test_commits_under_one_that_is_none_log_one_line_and_no_traceback(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {"DOORBELL": "postgress"}
    with caplog.at_level(logging.DEBUG):
        for _ in range(20):
            write()
    assert statuses() == {"NEW": 20}
    (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (line.name, line.levelname, line.exc_info) == ("django_outbox", "WARNING", None)
    assert 'Did you mean "postgres"?' in line.getMessage()
