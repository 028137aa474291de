"""A connection to NATS that does not reconnect by itself.

A NATS server says first whether it has TLS. If it has none, the client goes on without, even to a
``tls://`` URL, and sends the password. This connection does not.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

DEFAULT_SERVER: Final = "nats://localhost:4222"
# What the relay decides: it opens a new connection itself, and reports errors.
DECIDED: Final = frozenset(
    "self servers error_cb disconnected_cb closed_cb discovered_server_cb reconnected_cb "
    "reconnect_to_server_handler lame_duck_mode_cb allow_reconnect max_reconnect_attempts "
    "reconnect_time_wait".split()
)
TLS_OPTIONS: Final = ("tls", "tls_hostname", "tls_handshake_first")  # each asks for TLS
# What the client sends first, the credentials included; not public, so a version without it is
# refused here, at the import.
CONNECT: Final = Client._connect_command
KNOWN: Final = frozenset(inspect.signature(Client.connect).parameters) - DECIDED
CLOSE_TIMEOUT: Final = 1.0  # seconds
# What connect and publish raise while a server is away, or does not want this client.
FAULTS: Final = (nats.errors.Error, OSError, ValueError, asyncio.TimeoutError)


class NoTLS(nats.errors.Error):  # type: ignore[misc]
    """A server offers no TLS, and the settings ask for it."""


class _Client(Client):  # type: ignore[misc]
    """The client, which sends nothing to a server without TLS if ``needs_tls``."""

    needs_tls = False

    @property
    def writer(self) -> Any:
        return getattr(self._transport, "_io_writer", None)

    def _connect_command(self) -> bytes:
        if self.needs_tls and (
            self.writer is None or self.writer.get_extra_info("ssl_object") is None
        ):
            raise NoTLS("the server offers no TLS, so nothing was sent to it")
        return bytes(CONNECT(self))


class Connection:
    """One connection of the client nats-py."""

    def __init__(self, servers: Any, options: Mapping[str, Any]) -> None:
        """Take URLs and arguments of ``nats.connect``; ``TypeError`` for unknown ones."""
        for name in options:
            if name not in KNOWN:
                raise TypeError(f"unknown option {name!r}; the client's are {sorted(KNOWN)}.")
        given = [servers] if isinstance(servers, str) else servers
        if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
            raise TypeError('servers is not a URL such as "nats://host:4222", or a list of them.')
        self._servers, self._options = [*given] or [DEFAULT_SERVER], options
        for each in self._servers:
            if not _shown(each):
                raise ValueError('servers has an invalid URL; expected "nats://host:4222".')
        self.client: Any = None
        self.denied: Callable[[str], None] = lambda text: None  # told of a permission's violation
        self.last_error = ""
        self.deaf = ""  # what the server said if this user may not receive answers

    def __str__(self) -> str:
        return f"NATS at {', '.join(map(_shown, self._servers))}"

    @property
    def is_lost(self) -> bool:
        return self.client is None or self.client.is_closed

    async def open(self) -> None:
        """Connect to one of the servers; raise what the last of them said if none is there."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for index, server in enumerate(random.sample(self._servers, len(self._servers)), start=1):
            self.client = _Client()
            self.client.needs_tls = self._needs_tls(server)
            try:
                await self.client.connect(
                    server,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    error_cb=self._note,
                    closed_cb=self._closed,
                    **self._options,
                )
            except FAULTS:
                await self.close()
                if index == len(self._servers):
                    raise
            else:
                return

    def _needs_tls(self, server: str) -> bool:
        if server.startswith("wss://"):  # TLS comes before anything else there
            return False
        return server.startswith("tls://") or any(map(self._options.get, TLS_OPTIONS))

    async def close(self) -> None:
        """Close the connection; abort it if the server does not take what is unsent."""
        if self.client is None:
            return
        # Not wait_for: the client swallows a cancellation while it flushes.
        closing = asyncio.ensure_future(self.client.close())
        await asyncio.wait((closing,), timeout=CLOSE_TIMEOUT)
        if not closing.done() and (writer := self.client.writer) is not None:
            writer.transport.abort()
            await asyncio.wait((closing,), timeout=CLOSE_TIMEOUT)
        if closing.done():
            with suppress(Exception):  # it is of no use any more
                closing.result()

    async def _note(self, error: Exception) -> None:
        self.last_error = str(error)
        if "permissions violation" in self.last_error.lower():
            self.denied(self.last_error)
            if "subscription" in self.last_error.lower():
                self.deaf = self.last_error

    async def _closed(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


def _shown(server: str) -> str:
    """Return a server's URL without credentials; "" if it is invalid."""
    try:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return ""
    if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
        return ""
    return f"{parts.scheme}://{parts.hostname}{port}"
