"""Health probes of a worker process: an HTTP port, and a file that is touched while it is live.

The thread that waits for signals answers, one request at a time, each within a second. So the
supervisor, which forks, needs no threads. An answer also shows that a signal would be received.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import socketserver
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final, cast

from django.core.exceptions import ImproperlyConfigured

from ..log import first_line
from ..worker.threads import Health

logger = logging.getLogger("django_outbox")

Address = tuple[str, int]
GetHealth = Callable[[], Health]

TOUCH_INTERVAL: Final = 1.0  # seconds between two touches of the heartbeat file


class Probes:
    """The HTTP port and the heartbeat file. ``open`` and ``close`` may be called again."""

    def __init__(
        self, *, health_port: Address | None = None, heartbeat_file: Path | None = None
    ) -> None:
        self._address, self._file = health_port, heartbeat_file
        self._server: _Server | None = None
        self._touch_at = 0.0  # monotonic
        self._is_touched = True  # the last try succeeded

    @property
    def interval(self) -> float:
        """Seconds that may pass between two calls of ``publish``."""
        return 0.05 if self._address else 0.5

    def open(self) -> None:
        """Open the port and touch the file; raise ``ImproperlyConfigured`` if one of them fails."""
        try:
            if self._file:
                self._file.touch()
            if self._address and self._server is None:
                self._server = _Server(self._address)
                host, port = self._server.server_address[:2]
                logger.info("health port open address=%s port=%d", host, port)
        except (OSError, OverflowError) as error:
            on = "The health port {1} of {0}".format(*self._address) if self._address else ""
            file = f"The heartbeat file {str(self._file)!r}" if self._file else ""
            what = " or ".join(filter(None, (file, on)))
            raise ImproperlyConfigured(f"{what} cannot be opened: {error}") from error

    def close(self) -> None:
        if self._server is not None:
            self._server.server_close()
            self._server = None

    def publish(self, get_health: GetHealth) -> None:
        """Answer a request that waits; touch the file if it is time and the process is live."""
        if self._server is not None:
            self._server.get_health = get_health
            self._server.handle_request()
        if self._file and time.monotonic() >= self._touch_at and get_health().is_live:
            self._touch_at = time.monotonic() + TOUCH_INTERVAL
            self._touch(self._file)

    def _touch(self, path: Path) -> None:
        """Touch the file; log only the first of consecutive errors, as its age shows the rest."""
        was, self._is_touched = self._is_touched, True
        try:
            path.touch()
        except OSError as error:
            self._is_touched = False
            if was:
                logger.error("heartbeat file not touched error=%s", first_line(error))


class _Server(HTTPServer):
    timeout = 0  # seconds that handle_request waits for a request
    request_queue_size = 16
    get_health: GetHealth

    def __init__(self, address: Address) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Answer)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up our own name in the DNS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a probe that has disconnected needs no answer."""


class _Answer(BaseHTTPRequestHandler):
    """Answers ``/live`` and ``/ready`` with 200, or with 503 and the reasons."""

    timeout = 0.5  # seconds for the request, and for the response
    server_version, sys_version = "django-outbox", ""

    def setup(self) -> None:
        super().setup()
        # Read once, as a slow client would hold up the thread that receives signals.
        self.rfile = io.BytesIO(self.connection.recv(8192))

    def do_GET(self) -> None:
        health = cast("_Server", self.server).get_health()
        path = self.path.partition("?")[0].rstrip("/")
        found = {"/live": health.dead, "/ready": health.dead + health.unready}
        if path not in found:
            self._send(404, {"status": "unknown path", "paths": [*found]})
        elif reasons := found[path]:
            self._send(503, {"status": "unwell", "reasons": reasons})
        else:
            self._send(200, {"status": "ok"})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def _send(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Log nothing: probes send a request every few seconds."""
