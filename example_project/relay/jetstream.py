"""Relay to NATS JetStream: an event is delivered once the stream has acknowledged it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Lock, Thread
from typing import Any, TypeVar

import nats
from nats.js import JetStreamContext

import django_outbox as outbox
from example_project.relay import envelope

T = TypeVar("T")
SUBJECT = "events"  # a stream has to take in events.>
TIMEOUT = 10  # seconds for the stream to acknowledge


class JetStream:
    """One connection for all threads: the client is async, and lives on a loop of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opening = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stream: JetStreamContext | None = None

    def __call__(self, event: outbox.Event) -> None:
        with self._opening:
            stream = self._stream = self._stream or self._connect()
        # JetStream itself drops a second message with the same id, for two minutes by default.
        headers = {**envelope.headers(event), "Nats-Msg-Id": event.event_id}
        subject = f"{SUBJECT}.{event.event_type}"
        self._run(stream.publish(subject, envelope.body(event), TIMEOUT, headers=headers))

    def _connect(self) -> JetStreamContext:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._loop.run_forever, name="nats", daemon=True)
            self._thread.start()
        connecting = nats.connect(self.url, connect_timeout=5, max_reconnect_attempts=-1)
        self._client = self._run(connecting)
        return self._client.jetstream()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT + 1)

    def close(self) -> None:
        """Close the connection and its loop; a worker may leave that to the end of the process."""
        if self._stream is not None:
            self._run(self._client.close())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
