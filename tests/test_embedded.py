"""``EMBEDDED=True``: the process that serves a request delivers what the request wrote."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.db import OperationalError, connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxWorker
from django_outbox.process import embedded
from django_outbox.writing.on_commit import hot_queues
from tests.fleet import wait_until
from tests.reach.children import Child, Site, holds_a_database, is_alive, nothing_is_left
from tests.table import in_thread, listening, now, statuses, write
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

WSGI, ASGI = "tests.reach.wsgi:application", "tests.reach.asgi:application"
GUNICORN = ("gunicorn", WSGI, "--workers", "2", "--bind", "{address}")
SERVERS = {
    "gunicorn": GUNICORN,
    "gunicorn preloaded": (*GUNICORN, "--preload"),
    "gunicorn threads": (*GUNICORN, "--worker-class", "gthread", "--threads", "4"),
    "gunicorn threads preloaded": (*GUNICORN, "--preload", "--threads", "4"),
    "uvicorn": ("uvicorn", ASGI, "--host", "127.0.0.1", "--port", "{port}"),
    "uvicorn workers": ("uvicorn", ASGI, "--port", "{port}", "--workers", "2"),
    "runserver": ("django", "runserver", "--noreload", "{address}"),
    # Django kills the process that serves a quarter of a second after Ctrl-C, whatever it does.
    "runserver reloading": ("django", "runserver", "{address}"),
}
# Workers poll only at their start, so only the hot queue delivers quickly.
FAR = {"POLL_INTERVAL": 600, "PROBE_INTERVAL": 600, "DOORBELL": None}
MANY = 400  # events, of which a server that is stopped leaves some, however slow the machine


class Server:
    """A web server that runs the site, and a client for it."""

    def __init__(self, child: Child, port: int) -> None:
        self.child, self._url = child, f"http://127.0.0.1:{port}"

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=30) as answer:
            return dict(json.load(answer))

    def write(self, **fields: Any) -> dict[str, Any]:
        query = "&".join(f"{name}={value}" for name, value in fields.items())
        return self.get(f"write?{query}")

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.child.pid), *self.child.children]


@contextmanager
def serving(name: str, env: dict[str, str], logs: Path, **settings: Any) -> Iterator[Server]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [part.format(port=port, address=address) for part in SERVERS[name]]
    with Site(env, logs).run(*command, **{"EMBEDDED": True, **settings}) as child:
        child.says("Listening at|Uvicorn running|Starting .*development server")
        wait_until(lambda: listens(port), what=f"{name} at {address}")
        yield Server(child, port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def effects(phase: str | None = None) -> dict[str, Effect]:
    found = Effect.objects.filter(**({"phase": phase} if phase else {}))
    return {each.event_id: each for each in found}


def write_in_every_process(server: Server, count: int) -> list[dict[str, Any]]:
    """Send requests until ``count`` processes have answered and had their events delivered."""
    answers: list[dict[str, Any]] = []

    def all_answered() -> bool:
        with ThreadPoolExecutor(6) as pool:
            answers.extend(pool.map(lambda _: server.write(), range(6)))
        return len({each["pid"] for each in answers}) >= count

    wait_until(all_answered, what=f"answers of {count} processes")
    return answers


# -- commit to listener in one process -------------------------------------------------------------


def stop(server: Server) -> str:
    """Stop the server as a user would, and wait until all its processes have ended."""
    everyone = server.processes
    if "development server" in server.child.output:
        server.child.tell(signal.SIGINT, group=True)  # Ctrl-C in a terminal
    else:
        server.child.tell(signal.SIGTERM)
    code = server.child.wait()
    wait_until(lambda: not any(map(is_alive, everyone)), what=f"an end of {everyone}")
    return f"exit {code}"


@pytest.mark.parametrize("name", ["gunicorn", "gunicorn preloaded"])
def test_39_nothing_is_started_or_opened_before_the_fork(
    name: str, database_env: dict[str, str], tmp_path: Path
) -> None:
    loads = 1 if "preloaded" in name else 2
    with serving(name, database_env, tmp_path) as server:
        for said, times in (("Booting worker", 2), ("site is loaded", loads)):
            server.child.says("(?s)" + ".*".join([said] * times))
        wait_until(lambda: len(server.processes) == 3)
        master, *workers = server.processes
        assert [each.num_threads() for each in workers] == [1, 1]
        assert not any(map(holds_a_database, server.processes))
        write_in_every_process(server, 2)
        assert not holds_a_database(master)
        assert all(each.num_threads() > 1 for each in workers)
        assert all(holds_a_database(each) for each in workers)
        stop(server)


def test_39_the_first_request_starts_the_worker_though_it_writes_nothing(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    """So events left by an earlier process are delivered without a write in this one."""
    (left,) = write(event_type="reach.noted")
    with serving("gunicorn", database_env, tmp_path) as server:
        answer = server.get("threads")
        wait_until(lambda: statuses() == {"DONE": 1}, what="DONE")
        assert effects()[left].pid in [each.pid for each in server.child.children]
        again = next(
            found
            for found in iter(lambda: server.get("threads"), None)
            if found["pid"] == answer["pid"]
        )
        assert [each for each in again["names"] if each.startswith("outbox-default-")]
        stop(server)
    nothing_is_left()


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gunicorn", "uvicorn", "runserver"])
def test_at_exit_what_runs_is_finished_and_the_rest_released(
    name: str, database_env: dict[str, str], tmp_path: Path
) -> None:
    """One thread, many events: when the server is stopped, one runs and others wait."""
    with serving(name, database_env, tmp_path, WORKERS=1, **FAR) as server:
        ids = server.write(type="reach.slow", seconds=0.05, count=MANY)["ids"]
        wait_until(lambda: effects("start"), what="a start")
        stop(server)
    started = effects("start")
    assert [*effects("end")] == [*started]
    assert statuses() == {"DONE": len(started), "NEW": MANY - len(started)}
    rest = OutboxEvent.objects.filter(pk__in=ids).pending()
    assert {*rest.values_list("locked_by", "attempts", "rescues")} <= {(None, 0, 0)}
    nothing_is_left()


# -- forks and checks ------------------------------------------------------------------------------


def test_a_development_server_says_once_that_events_wait(caplog: pytest.LogCaptureFixture) -> None:
    def times_advised() -> int:
        embedded.install()
        caplog.clear()
        for _ in range(2):
            with transaction.atomic():
                outbox.write("order.placed")
                outbox.write("order.placed")
        return ["events wait" in each.getMessage() for each in caplog.records].count(True)

    assert times_advised() == 1
    row = {"id": "w", "pid": 1, "info": "{}", "started_at": now(), "heartbeat_at": now()}
    OutboxWorker.objects.create(hostname="h", **row)
    assert times_advised() == 0


def test_17_a_forked_child_has_no_worker(settings: Any) -> None:
    settings.OUTBOX = {"DOORBELL": None}
    asked: list[str] = []
    with listening(lambda event: None), outbox.Worker():
        assert hot_queues.by_alias
        assert in_child(lambda: [*hot_queues.by_alias]) == []
        hot_queues.start_worker = asked.append
        try:
            hot_queues.of("default")  # this process has a worker and starts no other
            assert in_child(lambda: hot_queues.of("default") or asked) == ["default"]
        finally:
            hot_queues.start_worker = None
            hot_queues._started.clear()
        write()
        wait_until(lambda: statuses() == {"DONE": 1}, what="the parent's worker goes on")
    assert asked == []


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="only SQLite keeps locks by process")
def test_17_a_fork_inherits_no_lock_of_a_worker(settings: Any) -> None:
    settings.OUTBOX = {"DOORBELL": None}
    inside, go_on = threading.Event(), threading.Event()

    def listener(event: outbox.Event) -> None:
        Effect.objects.create(event_id=event.event_id, pid=0, phase="end")
        inside.set()
        assert go_on.wait(30)  # it keeps SQLite's only write lock meanwhile

    def end_it() -> None:
        wait_until(lambda: not hot_queues.by_alias, what="the stop of the worker before the fork")
        go_on.set()

    def writes() -> str:
        connection.settings_dict["OPTIONS"]["timeout"] = 20
        try:
            Effect.objects.create(event_id="child", pid=0, phase="end")
        except OperationalError as error:
            return str(error)
        return "written"

    with listening(listener, atomic=True):
        embedded.start("default")
        try:
            write()
            assert inside.wait(30)
            connection.close()
            ending = in_thread(end_it)
            assert in_child(writes) == "written"
            ending.result(30)
            write()
            wait_until(lambda: statuses() == {"DONE": 2}, what="the parent's worker is back")
        finally:
            go_on.set()
            embedded.stop()
    assert in_child(lambda: [*hot_queues.by_alias]) == []
    assert not hot_queues.by_alias  # the stopped worker is not started again


def in_child(answer: Any) -> Any:
    """Return the result of ``answer``, called in a fork of this process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what we test
        pid = os.fork()
    if not pid:
        try:
            os.write(writer, json.dumps(answer()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)
