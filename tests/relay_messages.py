"""Messages for the backends of relays, and a proxy that cuts their connection in mid-batch."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from time import monotonic
from types import SimpleNamespace
from typing import Any

from django.db import transaction

import django_outbox as outbox
from django_outbox.events import new_id
from django_outbox.models import OutboxEvent
from django_outbox.relays import Backend, Message, Outcome
from django_outbox.relays.session import Session

MOMENT = datetime(2026, 11, 24, 21, 51, 33, tzinfo=timezone.utc)


def message(to: str = "order.placed", **given: Any) -> Message:
    event_id = new_id()
    fields = {
        "to": to,
        "body": b'{"sku":"teapot"}',
        "content_type": "application/json",
        "headers": {"event-id": event_id, "event-type": "order.placed"},
        "event_id": event_id,
        "event_type": "order.placed",
        "key": None,
        "group": None,
        "event": SimpleNamespace(occurred_at=MOMENT),
        **given,
    }
    return Message(**fields)


def messages(count: int, to: str = "order.placed", **given: Any) -> list[Message]:
    return [message(to, **given) for _ in range(count)]


def numbered(number: int = 0, **given: Any) -> Message:
    """Return a message to ``orders`` that its body and its id number."""
    event_id = f"e{number}"
    own = {"event_id": event_id, "headers": {"event-id": event_id}, "body": b'{"n":%d}' % number}
    return message(**{"to": "orders", **own, **given})


def several(count: int, **given: Any) -> list[Message]:
    return [numbered(number, **given) for number in range(count)]


class Client:
    """A backend, opened as a relay does."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.session = backend, Session(backend)
        self.session.open()

    def publish(self, batch: Sequence[Message], within: float = 20.0) -> list[Outcome]:
        return publish(self.session, batch, within)

    def send(self, *batch: Message, within: float = 10.0) -> Any:
        return self.publish(batch, within)

    def check(self) -> None:
        self.session.run(self.backend.check, timeout=10)

    def close(self) -> None:
        self.session.retire()


@contextmanager
def opener(make: Callable[..., Backend]) -> Iterator[Callable[..., Client]]:
    """Yield a function that makes and opens a backend; close all of them at the end."""
    made: list[Client] = []

    def opened(*given: Any, **options: Any) -> Client:
        made.append(Client(make(*given, **options)))
        return made[-1]

    yield opened
    for each in made:
        each.close()


def use_relay(settings: Any, backend: str, to: str, options: Any, **own: Any) -> None:
    """Configure a relay of the events ``order.*``."""
    relay = {"BACKEND": f"django_outbox.relays.{backend}", "TO": to, "OPTIONS": options, **own}
    settings.OUTBOX = {
        "RELAYS": {"orders": {"EVENTS": ["order.*"], **relay}},
        "RETRY": {"policy": "fixed", "delay": 3600},
    }


def write(event_type: str = "order.placed", **fields: Any) -> OutboxEvent:
    given = {"headers": {"trace": "t1"}, "aggregate_id": "7", **fields}
    with transaction.atomic():
        event_id = outbox.write(event_type, {"sku": "teapot", "name": "Kännchen"}, **given)
    return OutboxEvent.objects.get(pk=event_id)


def drained(row: OutboxEvent) -> tuple[str, int]:
    """Deliver what is due; return what has become of an event, and its attempts."""
    outbox.drain()
    row.refresh_from_db()
    return OutboxEvent.Status(row.status).name, row.attempts


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
    """Forwards connections to a port; ends the answers of one after ``cut_at`` bytes of them."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = int(self._server.getsockname()[1]), port
        self._sockets: list[socket.socket] = []
        self.cut_at: int | None = None  # counts from when it is set
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for each in (self._server, *self._sockets):
            with suppress(OSError):  # the other end was faster
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in (self._server, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for work in (self._requests, self._answers):
                    self._threads.append(threading.Thread(target=work, args=(client, server)))
                    self._threads[-1].start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                with suppress(OSError):  # once it is cut, the rest is lost
                    server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(4096):
                if self.cut_at is not None:
                    data = data[: self.cut_at]
                    self.cut_at -= len(data)
                client.sendall(data)
                if self.cut_at == 0:
                    break
        with suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
