"""What befalls the database and the ways to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.receiver import Receiver
from tests.faults.rig import NotHere, Rig
from tests.faults.scenarios.registry import ALL, MIX, SERVERS, scenario
from tests.relay import Relay
from tests.waiting import wait_until


# Row W14.
@scenario(*SERVERS)
def restart(rig: Rig) -> None:
    """The database server is stopped, or crashes, and comes back."""
    ways = ["fast", "immediate"] if rig.database == "postgres" else ["kill"]
    restarts = rig.pick(ci=len(ways), full=10)
    outage = rig.pick(ci=1.0, full=4.0)
    rig.outbox["LEASE"] = 30.0  # longer than any outage: no worker may lose what it holds
    rig.start_workers(rig.pick(ci=2, full=4))
    events, span = rig.pick(ci=800, full=50_000), restarts * (outage + 4)
    rig.start_writers(2, events=events, rate=events / span, keys=50, **MIX)
    rig.wait_until_they_run()
    for number in rig.schedule(restarts, rig.pick(ci=(0.5, 1.5), full=(1.0, 4.0))):
        rig.restart(ways[number % len(ways)], outage)
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("longest way back after an outage, s", max(rig.back), most=5, timed=True)
    rig.measure("a worker's part of a processor in an outage", max(rig.spent), most=0.2, timed=True)
    rig.measure("a worker's log lines a second in an outage", max(rig.said), most=3, timed=True)


# Rows 352; W18.
@scenario(*ALL)
def downstream(rig: Rig) -> None:
    """A service that listeners call is slow, then down; then workers are replaced in turn."""
    rig.outbox["RETRY"] = {"policy": "exponential", "base": 0.1, "cap": 2.0, "max_attempts": 1000}
    rig.outbox["LEASE"], rig.outbox["DRAIN_TIMEOUT"] = 10.0, 5.0  # longer than any answer takes
    lasts = rig.pick(ci=1.0, full=20.0)
    rig.start_workers(2)
    rig.wait_until_they_run()
    receiver = Receiver()
    rate = rig.pick(ci=40, full=100, sqlite=40)
    rig.start_writers(
        1, events=int(rate * 7 * lasts), rate=rate, keys=20, keyed=0.3, calls=receiver.port
    )
    time.sleep(lasts)  # it is late
    receiver.come()
    time.sleep(2 * lasts)  # it is fast, and so warm
    memory = [worker.memory_info().rss for worker in rig.workers]
    receiver.takes = 0.3
    time.sleep(lasts)  # it is slow
    receiver.takes = 0.0
    receiver.go()
    with rig.fault("receiver away"):
        time.sleep(lasts)  # nobody answers
    growth = [
        worker.memory_info().rss / before - 1
        for worker, before in zip(rig.workers, memory, strict=True)
    ]
    receiver.come()
    for number in range(len(rig.workers)):
        rig.roll(number)
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
    receiver.go()
    called = rig.started()
    rig.measure("events that the receiver never got", len(called - receiver.received), most=0)
    rig.measure("memory that grew meanwhile, part", max(growth), most=0.1, timed=True)


# Rows 500; W4.
@scenario(*SERVERS)
def terminate(rig: Rig) -> None:
    """All sessions are ended again and again: those of workers, listeners and writers."""
    storms(rig, rig.pick(ci=6, full=300), pause=(0.4, 0.8))


# Row X8.
@scenario("postgres")
def pools(rig: Rig) -> None:
    """Every process has a connection pool (psycopg's), whose sessions are ended again and again."""
    # A pool that meets dead sessions pauses for a second or more before it tries others.
    way = {"OPTIONS": {"pool": {"min_size": 2, "max_size": 16}}, "CONN_HEALTH_CHECKS": True}
    rig.environment["FAULTS_POOLED"] = json.dumps(way)
    storms(rig, rig.pick(ci=2, full=40), pause=(2.0, 5.0))


def storms(rig: Rig, rounds: int, pause: tuple[float, float]) -> None:
    # A lease is longer than a worker is without a session; no poll hides a doorbell that is mute.
    rig.outbox |= {"LEASE": 8.0, "POLL_INTERVAL": 4.0}
    rig.start_workers(rig.pick(ci=2, full=4))
    events = rig.pick(ci=800, full=50_000)
    rig.start_writers(2, events=events, rate=events / rounds / sum(pause) * 2, keys=50, **MIX)
    rig.wait_until_they_run()
    ended = sum(rig.terminate_sessions() for _ in rig.schedule(rounds, pause))
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("sessions terminated", ended, least=rounds)
    rig.measure("wait of an event after them, s", rig.wait_for_delivery(), most=1, timed=True)
    rig.settle_down()


# Row W4.
@scenario("postgres")
def halfopen(rig: Rig) -> None:
    """The LISTEN connection goes silent without an error."""
    relay = Relay()
    relay.open()
    poll = rig.outbox["POLL_INTERVAL"] = 3.0
    rig.outbox["DOORBELL"] = {"kind": "postgres", "database": "direct"}
    rig.environment["FAULTS_DIRECT"] = json.dumps({"HOST": "127.0.0.1", "PORT": relay.port})
    try:
        rig.start_workers(1)
        rig.wait_until_they_run()
        for number in rig.schedule(rig.pick(ci=1, full=10), (1.0, 2.0)):
            rig.write("plain", {})
            with rig.fault("silence"):
                relay.hold()
                began = time.monotonic()
                while len(rig.logged("LISTEN receives nothing")) <= number:
                    rig.write("plain", {})
                    time.sleep(0.2)  # between two events
                    assert time.monotonic() - began < 60, "the silence was not noticed"
                noticed = time.monotonic() - began
            rig.measure("silence noticed after, s", noticed, most=15, timed=True)
            relay.cut()
            relay.open()
            wait_until(lambda: relay.pairs, within=60, what="another connection")
            rig.write("plain", {})
        rig.settle_down()
        rig.measure(
            "longest wait of an event, s", rig.longest_wait(), most=1.2 * poll + 1, timed=True
        )
    finally:
        relay.cut()


# Row X8.
@scenario("postgres")
def pooler(rig: Rig) -> None:
    """Everything goes through PgBouncer in transaction mode, where LISTEN receives nothing."""
    with pgbouncer(rig) as port:
        way = {"HOST": "127.0.0.1", "PORT": port, "DISABLE_SERVER_SIDE_CURSORS": True}
        rig.environment["FAULTS_POOLED"] = json.dumps(way)
        rig.start_workers(rig.pick(ci=2, full=4))
        kills = rig.pick(ci=3, full=40)
        rate = rig.pick(ci=0, full=250)  # 0: as fast as they can
        rig.start_writers(2, events=rig.pick(ci=600, full=20_000), rate=rate, keys=50, **MIX)
        rig.wait_until_they_run()
        for _ in rig.schedule(kills, (0.5, 1.5)):
            rig.kill(rig.one_that_runs())
        rig.wait_for_writers()
        rig.wait_until_logged("LISTEN receives nothing", 1)
        rig.settle_down()
        rig.stop_workers()  # while there still is a way to the database


@contextmanager
def pgbouncer(rig: Rig) -> Iterator[int]:
    """Run a PgBouncer in front of the server; yield its port."""
    binary = shutil.which("pgbouncer", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
    if binary is None:
        raise NotHere("there is no pgbouncer")
    relay = Relay()  # for it may be another user, to whom the server's socket is closed
    relay.open()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    place = Path(tempfile.mkdtemp(prefix="outbox-"))
    users, file = place / "users", place / "pgbouncer.ini"
    users.write_text('"postgres" ""\n')
    file.write_text(
        f"[databases]\n* = host=127.0.0.1 port={relay.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {users}\npool_mode = transaction\ndefault_pool_size = 20\n"
        "ignore_startup_parameters = options,extra_float_digits\n"
    )
    command = [binary, str(file)]
    if os.getuid() == 0:  # which it refuses to be
        place.chmod(0o755)
        command[1:1] = ["-u", "nobody"]
    with rig.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port), within=30, what="pgbouncer answers")
        yield port
    finally:
        process.terminate()
        process.wait(30)
        relay.cut()
        shutil.rmtree(place)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
