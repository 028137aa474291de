"""A receiver of webhooks on this machine, which answers what a test gives it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

Answer = tuple[int, dict[str, str], bytes]


class Receiver:
    """Stores the requests that it gets; ``answer`` decides on the response."""

    def __init__(self, *, certificate: tuple[Path, Path] | None = None, port: int = 0) -> None:
        self.received: list[tuple[str, dict[str, str], bytes]] = []  # path, headers, body
        self.connections, self.in_flight, self.most = 0, 0, 0
        self.answer: Callable[[str, bytes], Answer] = lambda path, body: (204, {}, b"")
        self.hold = threading.Event()  # unset: requests wait
        self.hold.set()
        self.lock = threading.Lock()
        self.server = _Server(("127.0.0.1", port), self._handler())
        self.port = self.server.server_port
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.server.context = context
        self.origin = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self.url = f"{self.origin}/hooks"

    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.received]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with receiver.lock:
                    receiver.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                assert len(headers) == len(self.headers)  # none is there twice
                with receiver.lock:
                    receiver.received.append((self.path, headers, body))
                    receiver.in_flight += 1
                    receiver.most = max(receiver.most, receiver.in_flight)
                try:
                    receiver.hold.wait(30)
                    status, given, text = receiver.answer(self.path, body)
                finally:
                    with receiver.lock:
                        receiver.in_flight -= 1
                if status == 0:  # no answer
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in given.items():
                    self.send_header(name, value)
                if status != 204 and "content-length" not in given:
                    self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_PUT = do_POST  # noqa: N815 - the name that http.server looks for

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100
    context: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is None:
            super().finish_request(request, client_address)
            return
        # In the connection's thread, which a client may hold up.
        with self.context.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, *args: Any) -> None:
        pass  # the client has gone, as it does in these tests


@contextmanager
def receiving(**options: Any) -> Iterator[Receiver]:
    """Run a receiver."""
    made = Receiver(**options)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        made.hold.set()
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def certificate(directory: Path, *, host: str, days: int = 1) -> tuple[Path, Path]:
    """Write a self-signed certificate for a host, valid for days; return its file and the key's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    try:
        of: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        of = x509.DNSName(host)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([of]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / f"{host}.pem", directory / f"{host}.key"
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[0].write_bytes(made.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return files
