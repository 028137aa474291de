"""Health of real worker processes: live and ready, and what a probe can do to them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from django_outbox import Worker
from django_outbox.process.probes import Probes
from django_outbox.worker import worker as worker_room
from django_outbox.worker.threads import Health, Loop
from tests.fleet import wait_until
from tests.reach.children import Child, Site, is_alive, workers_show
from tests.table import statuses, write
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
PORT = ("--health-port", "0")
QUICK: dict[str, Any] = {"LEASE": 1.5, "DRAIN_TIMEOUT": 1, "POLL_INTERVAL": 0.2, "LOCK_WAIT": 1}


@dataclass(frozen=True)
class Answer:
    code: int
    body: dict[str, Any]

    @property
    def reasons(self) -> str:
        return " ".join(self.body.get("reasons", []))


def ask(port: int, path: str, *, host: str = "127.0.0.1", method: str = "GET") -> Answer | None:
    """Send a request as a probe does; return None without an answer."""
    connection = HTTPConnection(host, port, timeout=20)
    try:
        connection.request(method, path)
        found = connection.getresponse()
        text = found.read()
        return Answer(found.status, json.loads(text) if text else {})
    except OSError:
        return None
    finally:
        connection.close()


def port_of(child: Child) -> int:
    found = re.search(r"\d+$", child.says(r"health port open address=\S+ port=\d+"))
    assert found
    return int(found[0])


def wait_for(port: int, path: str, code: int) -> Answer:
    def look() -> Answer | None:
        found = ask(port, path)
        return found if found and found.code == code else None

    answer = wait_until(look, what=f"{code} of {path}")
    assert answer is not None
    return answer


# -- processes -------------------------------------------------------------------------------------


def test_a_worker_is_live_and_then_ready_until_it_drains(site: Site, tmp_path: Path) -> None:
    until = tmp_path / "go on"
    with site.worker(*PORT, DRAIN_TIMEOUT=60) as child:
        port = port_of(child)
        assert wait_for(port, "/ready", 200).body == {"status": "ok"}
        assert ask(port, "/live") == Answer(200, {"status": "ok"})
        write(1, "reach.gated", payload={"until": str(until)})
        wait_until(lambda: Effect.objects.filter(phase="start").exists(), what="the listener")
        child.tell(signal.SIGTERM)
        draining = wait_for(port, "/ready", 503)
        assert draining.body == {"status": "unwell", "reasons": ["default: draining"]}
        assert ask(port, "/live") == Answer(200, {"status": "ok"})
        until.touch()
        assert child.wait() == 0
    assert statuses() == {"DONE": 1}


def test_a_stopped_process_is_not_live_and_its_supervisor_says_so(site: Site) -> None:
    with site.worker(*PORT, "--processes", "2", **QUICK) as child:
        port = port_of(child)
        victim = min(workers_show(2))
        wait_for(port, "/ready", 200)
        os.kill(victim, signal.SIGSTOP)
        answer = wait_for(port, "/live", 503)
        assert f"process {victim}: silent for" in answer.reasons
        assert ask(port, "/ready").code == 503  # type: ignore[union-attr]
        os.kill(victim, signal.SIGCONT)
        wait_for(port, "/live", 200)
        wait_for(port, "/ready", 200)
        assert child.stop() == 0


def test_children_do_not_keep_the_port_of_a_killed_supervisor(site: Site, tmp_path: Path) -> None:
    until = tmp_path / "go on"
    with site.worker(*PORT, "--processes", "2", WORKERS=1, DRAIN_TIMEOUT=60) as child:
        port = port_of(child)
        workers_show(2)
        wait_for(port, "/ready", 200)
        processes = child.children
        write(2, "reach.gated", payload={"until": str(until)})
        wait_until(lambda: Effect.objects.filter(phase="start").count() == 2, what="two starts")
        child.tell(signal.SIGKILL)
        child.wait()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # no port in use
            taken.bind(("127.0.0.1", port))
        assert any(map(is_alive, processes))
        until.touch()
        wait_until(lambda: not any(map(is_alive, processes)), what="an end of the children")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_is_taken_is_told(site: Site, processes: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with site.worker("--health-port", str(port), "--processes", str(processes)) as child:
            assert child.wait() == 1
            assert f"The health port {port} of 127.0.0.1 cannot be opened" in child.output
            assert "Traceback" not in child.output


# -- the port, in this process ---------------------------------------------------------------------


class Front:
    """Answers probes in a thread of this process, as a worker's main thread does."""

    def __init__(self, look: Any, host: str = "127.0.0.1", file: Path | None = None) -> None:
        self.probes = Probes(health_port=(host, 0), heartbeat_file=file)
        self.probes.open()
        assert self.probes._server
        self.port = int(self.probes._server.server_address[1])
        self._ended = threading.Event()
        self._look = look
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            self.probes.publish(self._look)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self.probes.close()


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front(lambda: Health(unready=("x",)))
    yield front
    front.close()


@pytest.mark.parametrize(
    ("path", "code"),
    [("/live", 200), ("/ready/", 503), ("/ready?verbose=1", 503), ("/", 404), ("/metrics", 404)],
    ids=str,
)
def test_the_paths(front: Front, path: str, code: int) -> None:
    assert ask(front.port, path).code == code  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"nonsense\r\n\r\n", b"GET /live", b"\x16\x03\x01\x02"],
    ids=["nothing", "one byte", "nonsense", "half a line", "TLS"],
)
def test_who_asks_badly_holds_up_nobody_for_long(front: Front, sent: bytes) -> None:
    bad = socket.create_connection(("127.0.0.1", front.port))
    bad.sendall(sent)
    try:
        assert ask(front.port, "/live") == Answer(200, {"status": "ok"})
    finally:
        bad.close()


def test_a_file_is_not_touched_for_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    probes = Probes(heartbeat_file=path)
    probes.open()
    os.utime(path, (1, 1))
    probes.publish(lambda: Health(dead=("x",)))
    assert path.stat().st_mtime == 1
    probes.publish(lambda: Health(unready=("x",)))
    assert path.stat().st_mtime > 1


# -- what threads report ---------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(poll_interval=0.2)
    yield worker
    worker.stop()


def ready(worker: Worker) -> None:
    wait_until(lambda: worker.health().is_ready, what=f"{worker.health()}")


def test_before_the_start_and_after_the_stop_a_worker_is_not_ready(
    worker: Worker, django_assert_num_queries: Any
) -> None:
    assert worker.health() == Health(unready=("default: starting",))
    worker.start()
    ready(worker)
    with django_assert_num_queries(0):
        worker.health()
    worker.stop()
    assert worker.health() == Health(unready=("default: draining",))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_death(worker: Worker) -> None:
    """That a process ends with any of its threads is tested in test_failing_surroundings."""
    worker.start()
    ready(worker)
    loop: Loop = worker._settler_loop
    loop._step = lambda: exec("raise SystemExit")  # type: ignore[func-returns-value]
    loop.wake()
    wait_until(lambda: not worker.health().is_live, what="its death")
    assert worker.health().dead == (f"{loop.name} has ended",)


def test_a_step_that_lasts_too_long_is_trouble_and_then_death(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    worker.start()
    ready(worker)
    step = worker._claimer_loop._step
    worker._claimer_loop._step = lambda: worker_room.act(lambda: go_on.wait(60) and 0.0)
    worker._claimer_loop.wake()
    try:
        monkeypatch.setattr(worker_room, "UNREADY_AFTER", 0)
        wait_until(lambda: not worker.health().is_ready, what="trouble")
        assert worker.health().is_live
        monkeypatch.setattr(worker_room, "DEAD_AFTER", (0, 0.5))
        wait_until(lambda: not worker.health().is_live, what="death")
        assert "has been in one step for" in worker.health().dead[0]
    finally:
        worker._claimer_loop._step = step
        go_on.set()
    monkeypatch.undo()
    ready(worker)
