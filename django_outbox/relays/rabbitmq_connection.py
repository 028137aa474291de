"""Connections to RabbitMQ that can be aborted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import aiormq
from aio_pika.connection import make_url
from aiormq.connection import TCPTransportFactory, TLSTransportFactory
from aiormq.exceptions import AMQPError
from pamqp.exceptions import PAMQPException

from .backend import expect_known
from .session import THREAD_NAME

DEFAULT_URL: Final = "amqp://guest:guest@localhost:5672/"
# Arguments of aio_pika.connect that say where to connect to, instead of a URL; and how.
PLACE: Final = ("host", "port", "login", "password", "virtualhost", "ssl", "ssl_options")
MANNER: Final = ("ssl_context", "client_properties")
CLOSE_TIMEOUT: Final = 1.0  # seconds for the closing handshake
CLIENTS: Final = ("aiormq.connection", "aiormq.channel")
FAILED_SEND: Final = "socket.send() raised exception."  # the client writes on for a moment
# What a connection that breaks, is refused, or is not there in time raises.
BROKEN: Final = (AMQPError, PAMQPException, OSError, RuntimeError, asyncio.TimeoutError)
BLOCKED_WITHIN: Final = 0.05  # seconds; a connection that is not ready by then is blocked


class Address:
    """Where the broker is, and how to connect to it."""

    def __init__(self, url: str | None, options: Mapping[str, Any]) -> None:
        """Take a URL, or arguments of ``aio_pika.connect``; ``TypeError`` for unknown ones."""
        expect_known(options, (*PLACE, *MANNER))
        place = {name: value for name, value in options.items() if name in PLACE}
        if url is not None and place:
            raise TypeError(f"url and {[*place]} both say where to connect to; give one of them.")
        self.url = make_url(**place) if place else make_url(url or DEFAULT_URL)
        if self.url.scheme not in ("amqp", "amqps") or not self.url.host:
            raise ValueError('url is not an AMQP URL; expected "amqp://user:password@host:5672/".')
        self.ssl_context = options.get("ssl_context")
        self.client_properties = options.get("client_properties") or {}

    def __str__(self) -> str:
        shown = self.url.with_user(None).with_query(None)
        return f"RabbitMQ at {shown}"


class _Client(aiormq.Connection):  # type: ignore[misc]
    """The client, which reads why the broker refuses: a virtual host is missing or at its limit."""

    @staticmethod
    async def _rpc(request: Any, *args: Any, **options: Any) -> Any:
        request.valid_responses = [*request.valid_responses, "Connection.Close"]
        return await aiormq.Connection._rpc(request, *args, **options)


class Connection(aiormq.TransportFactory):  # type: ignore[misc]
    """One connection of the client aiormq with a channel that confirms.

    It opens the client's transport, and keeps hold of it: the client closes it in order only.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client: Any = None
        self._writer: Any = None
        self._is_aborted = False
        self.channel: Any = None
        self.was_blocked = False  # when it was aborted

    @property
    def is_open(self) -> bool:
        return self.channel is not None and not self.channel.is_closed

    @property
    def frame_max(self) -> int:
        """Bytes; 0 means no limit."""
        return int(self._client.connection_tune.frame_max)

    async def open(self) -> None:
        for name in (*CLIENTS, "asyncio"):
            logging.getLogger(name).addFilter(_OF_OTHERS)  # once: a filter is not added twice
        self._client = _Client(
            self._address.url, context=self._address.ssl_context, transport_factory=self
        )
        await self._client.connect(self._address.client_properties)
        await self.new_channel()

    async def new_channel(self) -> None:
        """Open a channel, the only one: the broker may have closed the one before."""
        self.channel = await self._client.channel(publisher_confirms=True, on_return_raises=True)

    async def abort(self) -> None:
        """End the connection without its closing handshake."""
        if self.is_open:
            try:
                await asyncio.wait_for(self._client.ready(), BLOCKED_WITHIN)
            except asyncio.TimeoutError:
                self.was_blocked = True  # the broker has said that it takes no messages for now
        self._end()

    async def close(self) -> None:
        """Close the connection; abort it if the broker does not answer."""
        try:
            with suppress(*BROKEN):
                if self._client is not None and not self._is_aborted:
                    await asyncio.wait_for(self._client.close(), CLOSE_TIMEOUT)
        finally:
            self._end()

    async def create(self, url: Any, **kwargs: Any) -> Any:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self._writer = await factory.create(url, **kwargs)
        return reader, self._writer

    def _end(self) -> None:
        if self._writer is not None:
            self._is_aborted = True
            self._writer.transport.abort()


class _OfOthers(logging.Filter):
    """Lets through what others log, and what asyncio says of anything else: the relay reports."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_ours = record.threadName == THREAD_NAME
        return not is_ours or (record.name == "asyncio" and record.msg != FAILED_SEND)


_OF_OTHERS: Final = _OfOthers()
