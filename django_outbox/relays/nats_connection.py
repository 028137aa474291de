"""A connection to NATS that does not reconnect by itself.

A NATS server says first whether it has TLS. If it has none, the client goes on without, even to a
``tls://`` URL, and sends the password. This connection does not: it gives its credentials to the
client as functions, which the client calls as it is about to send them.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import nats.errors
from nats.aio.client import Client

from .backend import expect_known

DEFAULT_SERVER: Final = "nats://localhost:4222"
# What the relay decides: it opens a new connection itself, and reports errors.
DECIDED: Final = frozenset(
    "self servers error_cb disconnected_cb closed_cb discovered_server_cb reconnected_cb "
    "reconnect_to_server_handler lame_duck_mode_cb allow_reconnect max_reconnect_attempts "
    "reconnect_time_wait".split()
)
TLS_OPTIONS: Final = ("tls", "tls_hostname", "tls_handshake_first")  # each asks for TLS
CREDENTIALS: Final = ("user", "password", "token")
KNOWN: Final = frozenset(inspect.signature(Client.connect).parameters) - DECIDED
CLOSE_TIMEOUT: Final = 1.0  # seconds
# What connect and publish raise while a server is away, or does not want this client.
FAULTS: Final = (nats.errors.Error, OSError, ValueError, asyncio.TimeoutError)


class NoTLS(nats.errors.Error):  # type: ignore[misc]
    """A server offers no TLS, and the settings ask for it."""


class _Client(Client):  # type: ignore[misc]
    """The client, which notes that it begins TLS."""

    has_begun_tls = False

    @property
    def ssl_context(self) -> Any:
        """The context, for which the client asks to begin TLS with."""
        self.has_begun_tls = True
        return super().ssl_context

    def withheld(self, secret: Any) -> Callable[[], str]:
        """Return a function that returns a secret once TLS has begun; ``NoTLS`` before."""

        def given() -> str:
            if not self.has_begun_tls:
                raise NoTLS("the server offers no TLS, so nothing was sent to it")
            return str(secret() if callable(secret) else secret)

        return given


class Connection:
    """One connection of the client nats-py."""

    def __init__(self, servers: Any, options: Mapping[str, Any]) -> None:
        """Take URLs and arguments of ``nats.connect``; ``TypeError`` for unknown ones."""
        expect_known(options, KNOWN)
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
        *others, last = random.sample(self._servers, len(self._servers))
        for server in others:
            with suppress(*FAULTS):
                return await self._connect(server)
        try:
            await self._connect(last)
        except ConnectionError:
            # A server that has max_connections says so and closes the connection. The client reads
            # that only if it waits for an answer to its login.
            await self._connect(last, verbose=True)
            await self.close()
            raise

    async def _connect(self, server: str, **more: Any) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.client = _Client()
        url, options = self._way(server)
        try:
            await self.client.connect(
                url,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                error_cb=self._note,
                closed_cb=self._closed,
                **{**options, **more},
            )
        except FAULTS:
            await self.close()
            raise

    def _needs_tls(self, server: str) -> bool:
        if server.startswith("wss://"):  # TLS comes before anything else there
            return False
        return server.startswith("tls://") or any(map(self._options.get, TLS_OPTIONS))

    def _way(self, server: str) -> tuple[str, dict[str, Any]]:
        """Return the URL and the options to connect with; credentials are withheld until TLS."""
        options = dict(self._options)
        if not self._needs_tls(server):
            return server, options
        url = _parts(server)
        # The client asks for the token even if there is none, or another kind of credentials.
        withheld: dict[str, Any] = {"token": (url.password is None and url.username) or ""}
        if url.password is not None:
            withheld |= {"user": url.username, "password": url.password}
        withheld |= {name: options[name] for name in CREDENTIALS if options.get(name)}
        options |= {name: self.client.withheld(each) for name, each in withheld.items()}
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl(), options

    async def close(self) -> None:
        """Close the connection; if the server does not take what is unsent, the loop's end does."""
        if self.client is None:
            return
        # Not wait_for: the client swallows a cancellation while it flushes.
        closing = asyncio.ensure_future(self.client.close())
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


def _parts(server: str) -> SplitResult:
    return urlsplit(server if "://" in server else f"nats://{server}")


def _shown(server: str) -> str:
    """Return a server's URL without credentials; "" if it is invalid."""
    try:
        parts = _parts(server)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return ""
    if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
        return ""
    return f"{parts.scheme}://{parts.hostname}{port}"
