"""``Stream``: the backend of relays that appends events to Redis streams, with redis-py.

Which errors mean the server, and which a message:

- The server (``BrokerUnavailable``): it cannot be reached, the login fails, the connection breaks,
  or it answers LOADING, OOM, READONLY, MASTERDOWN, CLUSTERDOWN, NOREPLICAS, MISCONF or BUSY:
  it takes no writes from anybody.
- A message, for good (``Unrecoverable``): one of its headers is not text.
- A message, by the retry policy (``Refused``): WRONGTYPE, since the key is not a stream; NOPERM;
  whatever else the server answers to this command.
- Not known (``Unconfirmed``): no reply arrived before the deadline.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from ..exceptions import BrokerUnavailable, Unrecoverable
from .backend import Backend, Message, Outcome, Unconfirmed

ANSWER: Final = 5.0  # seconds for a connection's handshake, and for a check
STRUCTURED: Final = "application/cloudevents+"
OURS: Final = ("retry", "retry_on_error", "retry_on_timeout")
OF_SERVER: Final = (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
)
# Codes for which redis-py has no class.
CODES_OF_SERVER: Final = ("NOREPLICAS", "MISCONF", "BUSY")
# SO_LINGER: a close drops what the kernel still has, so that no message is stored after a deadline.
RESET: Final = struct.pack("ii", 1, 0)


class Refused(Exception):
    """The server refused a message; another attempt may succeed."""


class Stream(Backend):
    """Appends each batch by pipelined XADDs, without MULTI, and reads all replies.

    ``OPTIONS``: ``url`` (redis, rediss or unix), ``maxlen`` (entries, approximately, to which each
    stream is trimmed; None: never), ``timeout``, and other options of ``Redis.from_url``.

    It uses redis-py's connections rather than its pipelines: when a connection breaks, a pipeline
    drops the replies that it has read, and those messages are stored.
    """

    def __init__(
        self, *, url: str, maxlen: int | None = None, timeout: Any = 10.0, **options: Any
    ) -> None:
        super().__init__(timeout=timeout)
        if maxlen is not None and (type(maxlen) is not int or maxlen < 1):
            raise ValueError(f"maxlen is {maxlen!r}; expected a number of entries, or None.")
        for name in OURS:
            if name in options:
                raise ValueError(f"{name} cannot be set: the relay retries by itself.")
        self._trim = ("MAXLEN", "~", maxlen) if maxlen else ()
        self._pool = _pool(url, options)
        self._idle: deque[Any] = deque()  # open connections: at most one for each thread
        try:
            self._new_connection(self.timeout)  # TypeError for options that it does not have
        except RedisError as error:
            raise ValueError(str(error)) from None

    def open(self) -> None:
        """Connect and log in."""
        self._idle.append(self._connect(monotonic() + self.timeout))

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send an XADD for each message at once, and read the replies until the deadline."""
        connection = self._take(deadline)
        outcomes: list[Outcome] = []
        sent: list[bytes] = []
        for message in messages:
            try:
                sent.append(self._packed(connection, message))
                outcomes.append(None)
            except UnicodeError as error:
                outcomes.append(Unrecoverable(f"A header of the message is not text: {error}"))
        replies = iter(self._exchange(connection, sent, deadline))
        outcomes = [
            self._outcome(message, next(replies)) if outcome is None else outcome
            for message, outcome in zip(messages, outcomes, strict=True)
        ]
        if outcomes and all(isinstance(each, BrokerUnavailable) for each in outcomes):
            raise BrokerUnavailable(str(outcomes[0]))
        return outcomes

    def check(self) -> None:
        """Ask whether the server takes writes: its role, and an XADD that adds nothing."""
        deadline = monotonic() + min(self.timeout, ANSWER)
        connection = self._take(deadline)
        # A stream that does not exist, which NOMKSTREAM does not create. The server still refuses
        # the command if it is full, loading or a replica.
        probe = ("XADD", f"django-outbox-check-{uuid4()}", "NOMKSTREAM", "*", "check", "1")
        asked = (("ROLE",), probe, ("CLUSTER", "MYID"))
        commands = [b"".join(connection.pack_command(*each)) for each in asked]
        role, added, node = self._exchange(connection, commands, deadline)
        for reply in (role, added):
            if isinstance(reply, (BrokerUnavailable, Unconfirmed)) or _is_of_server(reply):
                raise BrokerUnavailable(f"{self._name} takes no writes: {reply}")
        if isinstance(role, list) and role[0] in (b"slave", "slave"):
            raise BrokerUnavailable(f"{self._name} is a replica; give the address of its master.")
        if isinstance(node, (bytes, str)):
            raise Refused(f"{self._name} is a Redis Cluster, which is not supported.")
        # Permissions for single keys are not known here.
        if isinstance(added, NoPermissionError) and "command" in str(added):
            raise Refused(f"{self._name}: {added}; grant the permission +xadd.")

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().disconnect()

    # --- connections ---

    @property
    def _name(self) -> str:
        """The server's address, without the user and the password."""
        known = self._pool.connection_kwargs
        address = known.get("path") or f"{known.get('host')}:{known.get('port', 6379)}"
        return f"Redis at {address}"

    def _new_connection(self, limit: float) -> Any:
        limits = {"socket_timeout": limit, "socket_connect_timeout": limit}
        given = {**self._pool.connection_kwargs, **limits, "retry": Retry(NoBackoff(), 0)}
        return self._pool.connection_class(**given)

    def _connect(self, deadline: float) -> Any:
        connection = self._new_connection(min(max(deadline - monotonic(), 0.01), ANSWER))
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise BrokerUnavailable(f"{self._name} is not available: {error}") from None
        if (sock := getattr(connection, "_sock", None)) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return connection

    def _take(self, deadline: float) -> Any:
        """Return an open connection of which no other thread knows."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # the other thread has it
                break
            try:
                if not connection.can_read(timeout=0):
                    return connection
            except (RedisError, OSError):
                pass
            connection.disconnect()  # the server has closed it
        return self._connect(deadline)

    def _exchange(self, connection: Any, commands: Sequence[bytes], deadline: float) -> list[Any]:
        """Return the reply to each command, or the error that stands for it."""
        replies: list[Any] = []
        try:
            _limit(connection, deadline)
            connection.send_packed_command([b"".join(commands)], check_health=False)
            while len(replies) < len(commands):
                _limit(connection, deadline)
                replies.append(_reply(connection))
        except RedisTimeout:
            lost: Exception = Unconfirmed(f"{self._name} did not answer before the deadline.")
        except (RedisError, OSError) as error:
            lost = BrokerUnavailable(f"{self._name} is not available: {error}")
        except BaseException:
            connection.disconnect()
            raise
        else:
            self._idle.append(connection)
            return replies
        connection.disconnect()
        return [*replies, *[lost] * (len(commands) - len(replies))]

    # --- messages ---

    def _packed(self, connection: Any, message: Message) -> bytes:
        fields: list[str | bytes] = []
        for pair in _headers(message).items():
            fields += pair
        fields += ["payload", message.body]
        return b"".join(connection.pack_command("XADD", message.to, *self._trim, "*", *fields))

    def _outcome(self, message: Message, reply: Any) -> Outcome:
        if not isinstance(reply, BaseException):
            return None
        if isinstance(reply, (BrokerUnavailable, Unconfirmed)):
            return reply
        if _is_of_server(reply):
            return BrokerUnavailable(f"{self._name} takes no writes: {reply}")
        if isinstance(reply, MovedError):
            return Refused(f"{self._name} is a Redis Cluster, which is not supported.")
        return Refused(f"{self._name} refused the message for the stream {message.to!r}: {reply}")


def _pool(url: str, options: Mapping[str, Any]) -> ConnectionPool:
    try:
        return ConnectionPool.from_url(url, **options)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"url cannot be read: {error}; expected redis://user:password@host:port/database with "
            "a percent-encoded password, or one that begins with rediss:// or unix://."
        ) from None


def _headers(message: Message) -> dict[str, str]:
    headers = {name: value for name, value in message.headers.items() if name != "payload"}
    if "ce-specversion" in headers or message.content_type.startswith(STRUCTURED):
        headers["content-type"] = message.content_type
    return headers


def _limit(connection: Any, deadline: float) -> None:
    """Have the connection's next call end at the deadline."""
    left = deadline - monotonic()
    if left <= 0:
        raise RedisTimeout
    # redis-py has no public way to change the timeout of an open connection.
    if (sock := getattr(connection, "_sock", None)) is not None:
        sock.settimeout(left)


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _is_of_server(reply: Any) -> bool:
    if isinstance(reply, OF_SERVER):
        return True
    return isinstance(reply, ResponseError) and str(reply).startswith(CODES_OF_SERVER)
