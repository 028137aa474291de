"""Messages for the backends of relays, and a proxy that cuts their connection in mid-batch."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from django_outbox.clocks import monotonic
from django_outbox.events import new_event_id
from django_outbox.relays import Backend, Message, Outcome
from django_outbox.relays.relay import Session

MOMENT = datetime(2026, 11, 24, 21, 51, 33, tzinfo=timezone.utc)


def message(to: str = "order.placed", **given: Any) -> Message:
    event_id = new_event_id()
    fields = {
        "to": to, "body": b'{"sku":"teapot"}', "content_type": "application/json",
        "headers": {"event-id": event_id, "event-type": "order.placed"}, "event_id": event_id,
        "event_type": "order.placed", "key": None, "group": None,
        "event": SimpleNamespace(occurred_at=MOMENT), **given,
    }  # fmt: skip
    return Message(**fields)


def messages(count: int, to: str = "order.placed", **given: Any) -> list[Message]:
    return [message(to, **given) for _ in range(count)]


@contextmanager
def opened(backend: Backend) -> Iterator[Session]:
    """Open a backend as a relay does, and close it."""
    session = Session(backend)
    session.open()
    try:
        yield session
    finally:
        session.retire()


def publish(session: Session, batch: Sequence[Message], within: float = 20.0) -> list[Outcome]:
    return session.publish(batch, monotonic() + within)


def kinds(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count outcomes by the name of their class; "" is a confirmation."""
    found: dict[str, int] = {}
    for each in outcomes:
        name = "" if each is None else type(each).__name__
        found[name] = found.get(name, 0) + 1
    return found


class Proxy:
    """Forwards one connection to a port; cuts it once ``until`` says so of what came back."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = int(self._server.getsockname()[1]), port
        self._pair: list[socket.socket] = []
        self.cut_at: int | None = None  # bytes from the server, from when it is set
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for each in self._threads:
            each.join(10)

    def cut(self) -> None:
        for each in self._pair:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                pass
            each.close()

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:  # closed before a client came
            return
        server = socket.create_connection(("127.0.0.1", self._target))
        self._pair = [client, server]
        for source, target in ((client, server), (server, client)):
            thread = threading.Thread(
                target=self._forward, args=(source, target, source is server), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(4096):
                if is_answer and self.cut_at is not None:
                    data = data[: self.cut_at]
                    self.cut_at -= len(data)
                target.sendall(data)
                if is_answer and self.cut_at == 0:
                    break
        except OSError:
            pass
        self.cut()
