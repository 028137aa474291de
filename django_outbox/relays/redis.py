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

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..exceptions import BrokerUnavailable
from .backend import Backend, Message, Outcome, Refused, Unconfirmed, expect

CONNECT: Final = 5.0  # seconds for a connection's handshake
STRUCTURED: Final = "application/cloudevents+"
OURS: Final = ("retry", "retry_on_error", "retry_on_timeout")
OF_SERVER: Final = (
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
)
# Codes for which redis-py has no class.
CODES_OF_SERVER: Final = ("NOREPLICAS", "MISCONF", "BUSY")


class Stream(Backend):
    """Appends each batch by pipelined XADDs, without MULTI, and reads all replies.

    ``OPTIONS``: ``url`` (redis, rediss or unix), ``maxlen`` (entries, approximately, to which each
    stream is trimmed; None: never), ``timeout``, and other options of ``Redis.from_url``.
    """

    def __init__(
        self, *, url: str, maxlen: int | None = None, timeout: Any = 10.0, **options: Any
    ) -> None:
        super().__init__(timeout=timeout)
        is_valid = maxlen is None or (type(maxlen) is int and maxlen > 0)
        expect("maxlen", maxlen, is_valid, "a number of entries, or None")
        for name in OURS:
            if name in options:
                raise ValueError(f"{name} cannot be set: the relay retries by itself.")
        self._maxlen, self._url, self._options = maxlen, url, options
        self._client = self._made()

    def _made(self) -> Redis:
        limits = {
            "socket_timeout": self.timeout,
            "socket_connect_timeout": min(self.timeout, CONNECT),
            "retry": Retry(NoBackoff(), 0),
        }
        try:
            client = Redis.from_url(self._url, **{**limits, **self._options})
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # TypeError for unknown options
        except exceptions.RedisError as error:
            raise ValueError(str(error)) from None
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"url cannot be read: {error}; expected redis://user:password@host:port/database "
                "with a percent-encoded password, or one that begins with rediss:// or unix://."
            ) from None
        return client

    def open(self) -> None:
        """Connect and log in."""
        self._client = self._made()  # with the timeout that the relay has set
        try:
            with suppress(exceptions.ResponseError):  # this user may not use PING, say
                self._client.ping()
        except (exceptions.RedisError, OSError) as error:
            raise BrokerUnavailable(f"{self._name} is not available: {error}") from None

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send an XADD for each message at once, and read the replies."""
        pipeline = self._client.pipeline(transaction=False)
        for each in messages:
            pipeline.xadd(each.to, _fields(each), maxlen=self._maxlen)
        replies = self._replies(pipeline, len(messages))
        return [self._outcome(*each) for each in zip(messages, replies, strict=True)]

    def check(self) -> None:
        """Ask whether the server takes writes: its role, and an XADD that adds nothing."""
        pipeline: Any = self._client.pipeline(transaction=False)
        pipeline.role()
        # A stream that does not exist, which NOMKSTREAM does not create. The server still refuses
        # the command if it is full, loading or a replica.
        pipeline.xadd(f"django-outbox-check-{uuid4()}", {"check": "1"}, nomkstream=True)
        pipeline.execute_command("CLUSTER MYID")
        role, added, node = self._replies(pipeline, 3)
        for reply in (role, added):
            if isinstance(reply, (BrokerUnavailable, Unconfirmed)) or _is_of_server(reply):
                raise BrokerUnavailable(f"{self._name} takes no writes: {reply}")
        if isinstance(role, list) and role[0] in (b"slave", "slave"):
            raise BrokerUnavailable(f"{self._name} is a replica; give the address of its master.")
        if isinstance(node, (bytes, str)):
            raise Refused(f"{self._name} is a Redis Cluster, which is not supported.")
        # Permissions for single keys are not known here.
        if isinstance(added, exceptions.NoPermissionError) and "command" in str(added):
            raise Refused(f"{self._name}: {added}; grant the permission +xadd.")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @property
    def _name(self) -> str:
        """The server's address, without the user and the password."""
        known = self._client.connection_pool.connection_kwargs
        address = known.get("path") or f"{known.get('host')}:{known.get('port', 6379)}"
        return f"Redis at {address}"

    def _replies(self, commands: Any, count: int) -> list[Any]:
        """Return the reply to each command, or the error that stands for it."""
        try:
            return [*commands.execute(raise_on_error=False)]
        except exceptions.TimeoutError:
            lost: Exception = Unconfirmed(f"{self._name} did not answer before the deadline.")
        except (exceptions.RedisError, OSError) as error:
            lost = BrokerUnavailable(f"{self._name} is not available: {error}")
        return [lost] * count

    def _outcome(self, message: Message, reply: Any) -> Outcome:
        if not isinstance(reply, BaseException):
            return None
        if isinstance(reply, (BrokerUnavailable, Unconfirmed)):
            return reply
        if _is_of_server(reply):
            return BrokerUnavailable(f"{self._name} takes no writes: {reply}")
        if isinstance(reply, exceptions.MovedError):
            return Refused(f"{self._name} is a Redis Cluster, which is not supported.")
        return Refused(f"{self._name} refused the message for the stream {message.to!r}: {reply}")


def _fields(message: Message) -> dict[Any, Any]:
    fields: dict[Any, Any] = {**message.headers}
    if "ce-specversion" in fields or message.content_type.startswith(STRUCTURED):
        fields["content-type"] = message.content_type
    fields.pop("payload", None)  # a header of that name does not hide the payload
    fields["payload"] = message.body
    return fields


def _is_of_server(reply: Any) -> bool:
    if isinstance(reply, OF_SERVER):
        return True
    return isinstance(reply, exceptions.ResponseError) and str(reply).startswith(CODES_OF_SERVER)
