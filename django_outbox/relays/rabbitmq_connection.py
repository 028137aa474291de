"""A connection to RabbitMQ that can be cut off, and that leaves the log to the relay."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import aio_pika
import aiormq
from aio_pika.connection import make_url
from aiormq.connection import TCPTransportFactory, TLSTransportFactory
from aiormq.exceptions import AMQPError

from .event_loop import THREAD_NAME

DEFAULT_URL: Final = "amqp://guest:guest@localhost:5672/"
# Arguments of aio_pika.connect that say where to connect to, instead of a URL; and how.
PLACE: Final = ("host", "port", "login", "password", "virtualhost", "ssl", "ssl_options")
MANNER: Final = ("ssl_context", "client_properties")
DISCARD_TIMEOUT: Final = 0.5  # seconds, which lie behind a deadline
CLOSE_TIMEOUT: Final = 1.0  # seconds for the closing handshake
BLOCKED_WITHIN: Final = 0.05  # seconds; a connection that is not ready by then is blocked
LOGGERS: Final = ("aiormq.connection", "aiormq.channel", "aio_pika.connection", "aio_pika.channel")


class Connection:
    """One connection of the client aio-pika, and the channels of it that are free."""

    def __init__(self, url: str | None, options: Mapping[str, Any]) -> None:
        """Take a URL, or arguments of ``aio_pika.connect``; ``TypeError`` for unknown ones."""
        for name in options:
            if name not in (*PLACE, *MANNER):
                raise TypeError(f"unknown option {name!r}; the client's are {PLACE + MANNER}.")
        place = {name: value for name, value in options.items() if name in PLACE}
        if url is not None and place:
            raise TypeError(f"url and {[*place]} both say where to connect to; give one of them.")
        self._url = make_url(**place) if place else make_url(url or DEFAULT_URL)
        if self._url.scheme not in ("amqp", "amqps") or not self._url.host:
            raise ValueError('url is not an AMQP URL; expected "amqp://user:password@host:5672/".')
        self._manner = {name: options[name] for name in MANNER if name in options}
        self._client: Any = None
        self._transports = _Transports()
        self._free: list[Any] = []  # channels
        self.was_blocked = False  # when it was cut off
        self.frame_max = 0  # bytes; 0: no limit, or not connected

    def __str__(self) -> str:
        shown = self._url.with_user(None).with_query(None)
        return f"RabbitMQ at {shown}"

    @property
    def user(self) -> str | None:
        return self._url.user  # type: ignore[no-any-return]

    async def open(self) -> None:
        _silence_client()
        self._client = aio_pika.Connection(self._url, **self._manner)
        self._client.kwargs["transport_factory"] = self._transports
        await self._client.connect()
        self.frame_max = self._client.transport.connection.connection_tune.frame_max

    async def channel(self) -> Any:
        """Return a channel for the caller alone, with confirms; to be given back to ``free``."""
        while self._free:
            channel = self._free.pop()
            if not channel.is_closed:
                return channel
        channel = self._client.channel(publisher_confirms=True, on_return_raises=True)
        await channel.initialize()
        return channel

    def free(self, channel: Any) -> None:
        """Lend a channel to the next caller, unless it is closed."""
        if not channel.is_closed:
            self._free.append(channel)

    async def discard(self, channel: Any) -> None:
        """Close a channel on which messages are not confirmed; after it none of them leaves.

        The broker answers once it has read all of them. If it does not, what is unsent is dropped
        with the connection.
        """
        try:
            await asyncio.wait_for(channel.close(), DISCARD_TIMEOUT)
        except (AMQPError, OSError, RuntimeError, asyncio.TimeoutError):
            await self.cut_off()

    async def is_blocked(self) -> bool:
        """Return whether the broker has said that it takes no messages for now."""
        if self._client.transport is None or self._transports.is_cut:
            return self.was_blocked
        try:
            await asyncio.wait_for(self._client.transport.ready(), BLOCKED_WITHIN)
        except asyncio.TimeoutError:
            return True
        return False

    async def cut_off(self) -> None:
        """End the connection at once; what it has not sent yet is dropped."""
        self.was_blocked = await self.is_blocked()
        self._transports.cut()

    async def close(self) -> None:
        """Close the connection; cut it off if the broker does not answer."""
        try:
            if self._client is not None and not self._transports.is_cut:
                await asyncio.wait_for(self._client.close(), CLOSE_TIMEOUT)
        except (AMQPError, OSError, RuntimeError, asyncio.TimeoutError):
            pass
        finally:
            self._transports.cut()


class _Transports(aiormq.TransportFactory):  # type: ignore[misc]
    """Opens the client's transport, and keeps hold of it: the client closes it in order only."""

    def __init__(self) -> None:
        self.is_cut = False
        self._transport: Any = None

    async def create(self, url: Any, **kwargs: Any) -> Any:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, writer = await factory.create(url, **kwargs)
        self._transport = writer.transport
        return reader, writer

    def cut(self) -> None:
        """Drop what the process and its kernel have not sent, and close the socket."""
        if self._transport is None or self.is_cut:
            return
        self.is_cut = True
        if not self._transport.is_closing():
            now = struct.pack("ii", 1, 0)  # linger for 0 seconds
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, now
            )
        self._transport.abort()


class _OfOthers(logging.Filter):
    """Lets through what other users of the client in this process log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != THREAD_NAME


_OF_OTHERS: Final = _OfOthers()


def _silence_client() -> None:
    """Keep the client from logging each lost connection with a traceback: the relay reports it."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_OF_OTHERS)  # once: a filter is not added twice
