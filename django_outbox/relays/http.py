"""Webhooks: POST events to URLs, signed as Standard Webhooks say. Needs the extra ``webhooks``.

What an answer means:

- 2xx: confirmed. 410: the event is dead. 429 with Retry-After: an attempt, then again after it.
- Any other 3xx, 4xx or 5xx, and an answer that did not come in time: a failure of this message; it
  costs an attempt and the retry policy decides. Redirects are not followed.
- No connection, or 503: the host is away, and no attempt is spent. If all messages of a relay go to
  one host, which the beginning of ``TO`` tells, this is ``BrokerUnavailable``; if the host comes
  from the event, the message is deferred, so that events for other hosts flow on.
- A name that does not exist, and a certificate that is not valid: as no connection, if all messages
  go to one host; otherwise an attempt, because it may never work.
- A URL, a header or an address that cannot be used: ``Unrecoverable``, found before it is sent.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, ClassVar, Final
from urllib.parse import quote
from weakref import WeakValueDictionary

import httpcore
import httpx

from ..exceptions import BrokerUnavailable, Unrecoverable
from ..listeners.outcomes import Defer
from . import http_hosts, http_messages
from .backend import NOT_SENT, Backend, Message, Outcome, Refused, expect
from .http_hosts import Absence, AddressRefused, CheckedNetwork, UnknownHost, hosts
from .http_messages import Headers, Keys, Request, origin_of, url_of

KEEP_ALIVE: Final = 4.0  # seconds; many servers close an idle connection after 5
CONNECT_TIMEOUT: Final = 5.0  # seconds; less than the timeout of a relay, so that the two differ
ANSWER_TIMEOUT: Final = 2.0  # seconds for the body of an answer, which is read to be shown only
MAX_ANSWER: Final = 65_536  # bytes of it that are read; a longer one costs the connection
GRACE: Final = 0.25  # seconds after the deadline for requests to end by themselves
CUT: Final = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)


class Webhook(Backend):
    """Sends each message as a POST request. ``TO`` is the URL.

    Options: ``secret`` (str, list of str, or a dict of them by host), ``allow_http``,
    ``allow_private``, ``verify`` (True, or the path of a file with CA certificates),
    ``concurrency`` and ``concurrency_per_host`` (requests at a time), ``timeout``.
    """

    # They frame the request, choose where it goes and what it does, or belong to the writer of the
    # event and not to the receiver.
    commands: ClassVar[re.Pattern[str]] = re.compile(
        r"accept-encoding|authorization|connection|content-.*|cookie2?|expect|forwarded|host"
        r"|http2-settings|if-.*|keep-alive|max-forwards|proxy-.*|range|te|trailer|transfer-encoding"
        r"|upgrade|user-agent|via|webhook-.*|x-forwarded-.*|x-(?:http-)?method(?:-override)?",
        re.IGNORECASE,
    )

    def __init__(
        self,
        *,
        secret: Any = None,
        allow_http: bool = False,
        allow_private: bool = False,
        verify: Any = True,
        concurrency: int = 20,
        concurrency_per_host: int = 4,
        timeout: Any = 10.0,
    ) -> None:
        super().__init__(timeout=timeout)
        for name, value in (("allow_http", allow_http), ("allow_private", allow_private)):
            expect(name, value, isinstance(value, bool), "True or False")
        limits = {"concurrency": concurrency, "concurrency_per_host": concurrency_per_host}
        for name, count in limits.items():
            is_valid = type(count) is int and 1 <= count <= 1000
            expect(name, count, is_valid, "a whole number from 1 to 1000")
        is_valid = verify is True or isinstance(verify, str)
        expect("verify", verify, is_valid, "True or the path of a file with CA certificates")
        self._secrets = http_messages.secrets_of(secret)
        self._allow_http, self._allow_private, self._verify = allow_http, allow_private, verify
        self._concurrency, self._concurrency_per_host = concurrency, concurrency_per_host

    @staticmethod
    def quote(value: str) -> str:
        """Percent-encode a field for a URL, unless it is a whole URL by itself."""
        if value.startswith(("https://", "http://")):
            return value
        if value in (".", ".."):
            raise Unrecoverable(f"A field of TO is {value!r}, which would change the URL's path.")
        return quote(value, safe="")

    async def open(self) -> None:
        """Prepare connections; the first request connects."""
        self._only = self._only_url()
        self._network = CheckedNetwork(allow_private=self._allow_private, threads=self._concurrency)
        self._tls = _tls_context(self._verify)
        self._connections = httpcore.AsyncConnectionPool(
            ssl_context=self._tls,
            max_connections=None,  # the semaphores below limit them
            max_keepalive_connections=self._concurrency,
            keepalive_expiry=KEEP_ALIVE,
            network_backend=self._network,
        )
        self._answered: dict[str, float] = {}  # time.monotonic of a host's latest answer
        self._slots = asyncio.Semaphore(self._concurrency)
        # Of hosts that have requests at present; their tasks hold them.
        self._host_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def close(self) -> None:
        """Close all connections."""
        self._network.close()
        await self._connections.aclose()

    def prepare(self, message: Message) -> Request:
        """Return the request that is made for a message; ``Unrecoverable`` if there can be none."""
        url = url_of(message.to, allow_http=self._allow_http)
        return Request(url, message.body, http_messages.headers_of(message), self._keys(url))

    async def publish(self, messages: Sequence[Request], deadline: float) -> list[Outcome]:
        """Send messages, several at a time; return an outcome for each.

        A request begins in the first half of the time until ``deadline``, so that each receiver
        has at least the other half for its answer; what does not come to that is deferred.
        """
        last_start = (monotonic() + deadline) / 2
        timeout = deadline - monotonic() + GRACE
        calls = [asyncio.wait_for(self._send(m, last_start, deadline), timeout) for m in messages]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        late = Refused("The receiver did not answer before the deadline.")
        return [late if isinstance(each, asyncio.TimeoutError) else each for each in ended]

    async def check(self) -> None:
        """Connect to the host, if all messages go to one; otherwise no host speaks for the others.

        A host that answers 503, or does not answer at all, may be tried once its pause is over.
        """
        if (url := self._only) is None:
            return
        host, origin = url.raw_host.decode("ascii"), origin_of(url)
        absence = hosts.absence(origin)
        if absence and not absence.is_unreachable:
            raise BrokerUnavailable(absence.reason)
        try:
            port = int(origin.rpartition(":")[2])
            stream = await self._network.connect_tcp(host, port, CONNECT_TIMEOUT)
            if url.scheme == "https":
                stream = await stream.start_tls(self._tls, host, CONNECT_TIMEOUT)
            await stream.aclose()
        except (httpcore.NetworkError, httpcore.TimeoutException, UnknownHost) as error:
            raise BrokerUnavailable(_reason(origin, error)) from None
        if (latest := hosts.get(origin)) and latest.is_unreachable:
            hosts.set_back(origin)

    def _only_url(self) -> httpx.URL | None:
        """Return where all messages go; None if the host comes from the event."""
        begin = re.match(r"[^:/?#]*://[^/?#]*", self.to)
        if begin is None or "{" in begin[0]:
            return None
        try:
            return url_of(begin[0], allow_http=self._allow_http)
        except Unrecoverable as error:  # a mistake in the settings must not end events
            raise BrokerUnavailable(str(error)) from None

    # --- one message -----------------------------------------------------------------------------

    async def _send(self, request: Request, last_start: float, deadline: float) -> Outcome:
        origin = origin_of(request.url)
        slots = self._host_slots.get(origin) or asyncio.Semaphore(self._concurrency_per_host)
        self._host_slots[origin] = slots
        async with slots, self._slots:
            if absence := hosts.absence(origin):
                return self._away(absence)
            if monotonic() > last_start:
                return NOT_SENT
            hosts.begin_probe(origin, until=deadline)
            return await self._exchange(request, origin, deadline)

    def _keys(self, url: httpx.URL) -> Keys | None:
        if not isinstance(self._secrets, dict):
            return self._secrets
        found = self._secrets.get(url.host) or self._secrets.get(url.raw_host.decode())
        if found is None:
            raise Refused(
                f"The option secret has no entry for the host {url.host}. Add it, or give one "
                "secret for all hosts."
            )
        return found

    async def _exchange(self, request: Request, origin: str, deadline: float) -> Outcome:
        began, headers = monotonic(), request.signed()
        try:
            try:
                return await self._post(request, headers, deadline)
            except CUT:  # often a connection that was kept alive, and closed just then
                return await self._post(request, headers, deadline)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, UnknownHost) as error:
            return self._unreachable(origin, error)
        except AddressRefused as error:
            hosts.set_back(origin)
            return error if self._only is None else BrokerUnavailable(str(error))
        except httpcore.LocalProtocolError as error:
            hosts.set_back(origin)
            return Unrecoverable(f"The request cannot be sent: {error}.")
        except CUT:
            reason = f"{origin} closed the connection without an answer."
        except (asyncio.TimeoutError, httpcore.TimeoutException):
            reason = f"{origin} did not answer in time."
        if self._answered.get(origin, 0.0) < began:  # it answers no other message either
            hosts.set_away(origin, reason, is_unreachable=False)
        return Refused(reason)

    def _unreachable(self, origin: str, error: Exception) -> Outcome:
        reason = _reason(origin, error)
        if self._only is None and (isinstance(error, UnknownHost) or _is_of_tls(error)):
            hosts.set_back(origin)
            return Refused(reason)  # it may never work: the retry policy ends it
        return self._away(hosts.set_away(origin, reason, is_unreachable=True))

    async def _post(self, given: Request, headers: Headers, deadline: float) -> Outcome:
        remaining = deadline - monotonic()
        request = httpcore.Request(
            "POST",
            str(given.url),
            headers=headers,
            content=given.body,
            extensions={"timeout": {"connect": min(CONNECT_TIMEOUT, remaining / 2)}},
        )
        answer = self._connections.handle_async_request(request)
        response = await asyncio.wait_for(answer, remaining)
        try:
            text = await _beginning(response, min(ANSWER_TIMEOUT, deadline - monotonic()))
        finally:
            await response.aclose()
        return self._judged(response, text, origin_of(given.url))

    def _judged(self, response: Any, text: str, origin: str) -> Outcome:
        found = [value for name, value in response.headers if name.lower() == b"retry-after"]
        retry_after = http_messages.seconds_of(found[0]) if found else 0.0
        if response.status == 503:
            reason = f"{origin} answered 503{f': {text}' if text else '.'}"
            absence = hosts.set_away(origin, reason, is_unreachable=False, retry_after=retry_after)
            return self._away(absence)
        if len(self._answered) >= http_hosts.MAX_HOSTS:
            self._answered.clear()
        self._answered[origin] = monotonic()
        hosts.set_back(origin)
        return http_messages.outcome_of(response.status, retry_after, text, origin)

    def _away(self, absence: Absence) -> Outcome:
        """Return the outcome of a message whose host is away; it costs no attempt."""
        if self._only is not None:
            return BrokerUnavailable(absence.reason)
        return Defer(absence.wait, absence.reason)


def _reason(origin: str, error: Exception) -> str:
    if isinstance(error, httpcore.TimeoutException) and not str(error):
        return f"{origin} cannot be reached: it did not accept a connection in time."
    return f"{origin} cannot be reached: {error}."


def _is_of_tls(error: BaseException | None) -> bool:
    """Return whether a host answers without valid TLS: its certificate has expired, say."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tls_context(verify: Any) -> ssl.SSLContext:
    if verify is True:
        context: ssl.SSLContext = httpx.create_ssl_context()
        return context
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:
        raise BrokerUnavailable(f"The option verify = {verify!r} cannot be read: {error}") from None


async def _beginning(response: Any, timeout: float) -> str:
    """Read an answer's body, so that the connection can be used again; return its beginning."""
    body = bytearray()

    async def read() -> None:
        async for chunk in response.aiter_stream():
            body.extend(chunk)
            if len(body) > MAX_ANSWER:
                return

    with suppress(asyncio.TimeoutError, *CUT):  # the status has arrived, and that is the answer
        await asyncio.wait_for(read(), max(timeout, 0.01))
    return http_messages.shown(bytes(body))
