"""The hosts that webhooks go to: their addresses have to be public; and which of them are away.

A URL of an event leads nowhere inside your network. A name is resolved once, its addresses are
checked, and the connection goes to the address that was checked. A name that answers differently
the next time (DNS rebinding) gains nothing by it.

A host and port is away after a connection error, a 503 or an answer that did not come. Nothing is
sent to it for a pause; then one message tries whether it is back.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from time import monotonic
from typing import Any, Final

import httpcore

from ..exceptions import Unrecoverable

MAX_ADDRESSES: Final = 3  # of a name that are tried, one after the other
# IANA's special-purpose registries, as of 2026. The standard library's `is_global` differs between
# the supported versions of Python.
SPECIAL: Final = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 "
            "192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 "
            "198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
            "168.63.129.16 "  # the metadata service inside Azure
            "2001::/23 2001:db8::/32 2002::/16 3fff::/20"
        ).split(),
    )
)
GLOBAL_UNICAST: Final = IPv6Network("2000::/3")  # all that is public is in it, but for NAT64
NAT64: Final = IPv6Network("64:ff9b::/96")  # an IPv4 address in the last 32 bits
MIN_PAUSE: Final = 3.0  # seconds
MAX_PAUSE: Final = 60.0  # seconds; a receiver's Retry-After counts up to this
# The pause is this share of the time that the host has been away. A short outage ends promptly; a
# host that has been away for hours is asked, and its events are put off, once a minute.
SHARE: Final = 1 / 20
MAX_HOSTS: Final = 1000  # remembered; URLs may come from customers


# --- addresses ------------------------------------------------------------------------------------


class AddressRefused(Unrecoverable):
    """A host has no public address."""


class UnknownHost(Exception):
    """A host's name does not exist."""


def is_public(address: str) -> bool:
    """Return whether an IP address is neither private, local, multicast nor otherwise reserved."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        if ip in NAT64:
            ip = IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip not in GLOBAL_UNICAST:
            return False
    return not any(ip in each for each in SPECIAL)


class CheckedNetwork:
    """A network backend of httpcore that connects to addresses which it has checked."""

    def __init__(self, *, allow_private: bool, threads: int) -> None:
        self._allow_private = allow_private
        self._network = httpcore.AnyIOBackend()
        # Its own threads: a name server that does not answer must not hold up other hosts.
        self._resolvers = ThreadPoolExecutor(threads, thread_name_prefix="outbox-resolve")

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, **options: Any
    ) -> Any:
        """Connect to the first address of a host that accepts, within ``timeout`` seconds."""
        addresses = await self._public_addresses(host, port, timeout)
        share = None if timeout is None else timeout / len(addresses)
        for address in addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._network.connect_tcp(address, port, share, **options)
        return await self._network.connect_tcp(addresses[-1], port, share, **options)

    def close(self) -> None:
        """Give the threads up; one that waits for a name server ends with its answer."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _public_addresses(self, host: str, port: int, timeout: float | None) -> list[str]:
        found = await self._resolve(host, port, timeout)
        if not self._allow_private:
            public = [each for each in found if is_public(each)]
            if not public:
                raise AddressRefused(
                    f"{host} has no public address. Webhooks go to public addresses only; to allow "
                    "others, set the option allow_private."
                )
            found = public
        return found[:MAX_ADDRESSES]

    async def _resolve(self, host: str, port: int, timeout: float | None) -> list[str]:
        lookup = asyncio.get_running_loop().run_in_executor(self._resolvers, _addresses, host, port)
        try:
            return await asyncio.wait_for(lookup, timeout)
        except asyncio.TimeoutError:
            raise httpcore.ConnectTimeout("the name server did not answer in time") from None
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
                raise UnknownHost(f"the name {host} does not exist") from None
            raise httpcore.ConnectError(f"the name was not resolved: {error.strerror}") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name was not resolved: {error}") from None


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(address[0]) for *_, address in found)]


# --- hosts that are away --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Absence:
    """Since when a host has been away, and when it may be tried again."""

    reason: str  # shown with the breaker and in logs
    since: float  # time.monotonic
    until: float  # time.monotonic
    is_unreachable: bool  # it does not accept connections, so one that it accepts ends this
    is_probed: bool = False  # a message is on its way to it

    @property
    def wait(self) -> float:
        """Return after how many seconds the next message may try it."""
        return MIN_PAUSE if self.is_probed else max(self.until - monotonic(), MIN_PAUSE)


class Hosts(dict[str, Absence]):
    """The hosts that are away. All threads of a process share one; each method is atomic enough.

    Two threads that write at once leave one of two right answers.
    """

    def absence(self, host: str) -> Absence | None:
        """Return why nothing must be sent to a host at present; None: send."""
        found = self.get(host)
        return found if found is not None and monotonic() < found.until else None

    def begin_probe(self, host: str, until: float) -> None:
        """Let nothing else be sent to a host that may be tried again, while one message tries."""
        if found := self.get(host):
            self[host] = replace(found, until=until, is_probed=True)

    def set_away(
        self, host: str, reason: str, *, is_unreachable: bool, retry_after: float = 0.0
    ) -> Absence:
        """Remember that a host is away; ``retry_after`` is what it has asked for, in seconds."""
        now, former = monotonic(), self.pop(host, None)
        since = former.since if former else now
        pause = min(max(retry_after, (now - since) * SHARE, MIN_PAUSE), MAX_PAUSE)
        if len(self) >= MAX_HOSTS:
            self.pop(next(iter(self)), None)
        self[host] = found = Absence(reason, since, now + pause, is_unreachable)
        return found

    def set_back(self, host: str) -> None:
        """Forget that a host was away: it has answered."""
        self.pop(host, None)


# Of the process: it outlives backends, which are made anew after each BrokerUnavailable.
hosts: Final = Hosts()
