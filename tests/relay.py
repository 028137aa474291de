"""A TCP relay in front of a server, the test's database if none is named: to open, and to cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import connection


class Relay:
    """Forwards a local port to the server; while it is closed, connecting is refused.

    ``connect`` returns a new connection to the server; without one it is the test's database.
    """

    def __init__(self, connect: Callable[[], socket.socket] | None = None) -> None:
        self._connect = connect or _connect
        self.pairs: list[socket.socket] = []  # both ends of what is forwarded
        self._through = threading.Event()
        self._listening: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def open(self) -> None:
        self._through.set()
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        listening.listen(50)
        self._listening = listening
        self._start(self._accept, listening)

    def hold(self) -> None:
        """Keep what is sent to oneself, and say nothing: connections stay, half open."""
        self._through.clear()

    def release(self) -> None:
        """Let through what was held."""
        self._through.set()

    def cut(self) -> None:
        """Refuse new connections and break the open ones."""
        self._through.set()
        listening, self._listening = self._listening, None
        if listening is not None:
            _shut(listening)
        for each in self.pairs:
            _shut(each)
        for thread in self._threads:
            thread.join(10)
        self.pairs.clear()
        self._threads.clear()

    def settings(self) -> dict[str, Any]:
        """The default database's settings, by way of the relay."""
        return {**connection.settings_dict, "HOST": "127.0.0.1", "PORT": self.port}

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                try:
                    server = self._connect()
                except OSError:  # it is away
                    client.close()
                    continue
                self.pairs += [client, server]
                self._start(self._forward, client, server)
                self._start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._through.wait()
                target.sendall(data)
        _shut(source)
        _shut(target)

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="test-relay", daemon=True)
        self._threads.append(thread)
        thread.start()


def _connect() -> socket.socket:
    """Connect to the server; a host that is a path is a Unix socket or, PostgreSQL, its place."""
    settings = connection.settings_dict
    host, port = str(settings["HOST"] or "127.0.0.1"), settings["PORT"]
    if not host.startswith("/"):
        default = 5432 if connection.vendor == "postgresql" else 3306
        return socket.create_connection((host, int(port or default)))
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{host}/.s.PGSQL.{port or 5432}" if connection.vendor == "postgresql" else host)
    return server


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
