"""``Stream``: the backend of relays that appends events to Redis streams, with redis-py.

Which errors mean the server, and which a message:

- The server (``BrokerUnavailable``): it cannot be reached, the login fails, the connection breaks,
  a reply did not come in time, or it answers LOADING, OOM, READONLY, MASTERDOWN, CLUSTERDOWN,
  NOREPLICAS, MISCONF, BUSY or that it does not know XADD: it takes no writes from anybody.
- A message, for good (``Unrecoverable``): one of its headers is not text.
- A message, by the retry policy (``Refused``): WRONGTYPE, since the key is not a stream; NOPERM;
  whatever else the server answers to this command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..exceptions import BrokerUnavailable
from .backend import Backend, Message, Outcome, Refused, expect
from .envelope import headers_of

CONNECT: Final = 5.0  # seconds for a connection's handshake
OURS: Final = {"retry", "retry_on_error", "retry_on_timeout"}
OF_SERVER: Final = (
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
)
# For these redis-py has no class. A Sentinel does not know the command, nor does Redis before 5.0.
TEXTS_OF_SERVER: Final = ("NOREPLICAS", "MISCONF", "BUSY", "unknown command")
CLUSTER: Final = "{} is a Redis Cluster, which is not supported."


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
        for name in OURS & options.keys():
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
        self._replies(self._client.pipeline(transaction=False).ping())

    def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send an XADD for each message at once, and read the replies."""
        pipeline = self._client.pipeline(transaction=False)
        for each in messages:
            # Whatever the headers have of the name "payload".
            fields: Any = {**headers_of(each, "ce-specversion"), "payload": each.body}
            pipeline.xadd(each.to, fields, maxlen=self._maxlen)
        replies = self._replies(pipeline)
        return [self._outcome(*each) for each in zip(messages, replies, strict=True)]

    def check(self) -> None:
        """Ask whether the server takes writes: its role, and an XADD that adds nothing."""
        pipeline: Any = self._client.pipeline(transaction=False)
        pipeline.role()
        # A stream that does not exist, which NOMKSTREAM does not create. The server still refuses
        # the command if it is full, loading or a replica.
        pipeline.xadd(f"django-outbox-check-{uuid4()}", {"check": "1"}, nomkstream=True)
        pipeline.execute_command("CLUSTER MYID")
        role, added, node = self._replies(pipeline)
        if away := self._away(role) or self._away(added):
            raise away
        if isinstance(role, list) and role[0] in (b"slave", "slave"):
            raise BrokerUnavailable(f"{self._name} is a replica; give the address of its master.")
        if isinstance(node, (bytes, str)):
            raise Refused(CLUSTER.format(self._name))
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

    def _replies(self, commands: Any) -> list[Any]:
        """Return the reply to each command, or the error that stands for it."""
        try:
            return [*commands.execute(raise_on_error=False)]
        except (exceptions.RedisError, OSError) as error:
            raise BrokerUnavailable(f"{self._name} is not available: {error}") from None

    def _outcome(self, message: Message, reply: Any) -> Outcome:
        if not isinstance(reply, BaseException):
            return None
        if isinstance(reply, exceptions.AskError):  # or moved
            return Refused(CLUSTER.format(self._name))
        text = f"{self._name} refused the message for the stream {message.to!r}: {reply}"
        return self._away(reply) or Refused(text)

    def _away(self, reply: Any) -> BrokerUnavailable | None:
        """Return what a reply means if it is about the server, whatever the message."""
        text = str(reply).partition(", with args")[0]  # of the message
        is_text = isinstance(reply, exceptions.ResponseError) and text.startswith(TEXTS_OF_SERVER)
        if is_text or isinstance(reply, OF_SERVER):
            return BrokerUnavailable(f"{self._name} takes no writes: {text}")
        return None
