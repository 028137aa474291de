"""A program of somebody else that listeners call: fast, slow, or not there at all."""

from __future__ import annotations

import socketserver
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = 1.0  # seconds that a listener waits for its answer


class Receiver:
    """An HTTP server on a port of its own that keeps the ids it was sent."""

    def __init__(self) -> None:
        self.received: set[str] = set()
        self.takes = 0.0  # seconds that an answer takes
        with socketserver.TCPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
            self.port: int = probe.server_address[1]
        self._server: ThreadingHTTPServer | None = None

    def come(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                event_id = self.rfile.read(int(self.headers["Content-Length"])).decode()
                time.sleep(receiver.takes)
                receiver.received.add(event_id)
                self.send_response(204)
                self.end_headers()

            def log_request(self, *args: object) -> None:
                """Say nothing: the standard one writes a line for each call."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def go(self) -> None:
        """End: from now on nobody answers."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def call(port: int, event_id: str) -> None:
    """Send an id; raise ``OSError`` if it is not taken."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=event_id.encode())
    with urllib.request.urlopen(request, timeout=ANSWER):
        pass
