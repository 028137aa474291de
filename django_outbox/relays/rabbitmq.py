"""Send a relay's events to RabbitMQ, with many publisher confirms in one round trip.

What fails, and whose failure it is:

- A message that the broker returns (no queue takes its routing key), rejects (a full queue with
  ``reject-publish``), or closes the channel for (permission for its routing key) fails alone, and
  is tried again as the retry policy says. One that cannot be sent, or is too large, is dead.
- An exchange that is missing, a login or a write permission that is refused, a connection that
  breaks, and a memory or disk alarm stop all messages: ``BrokerUnavailable``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, ClassVar, Final
from uuid import uuid4

from aiormq import exceptions, spec

from ..exceptions import BrokerUnavailable, Unrecoverable
from .backend import Backend, Message, Outcome, Refused, Together, Unconfirmed, expect
from .rabbitmq_connection import BROKEN, Address, Connection
from .session import late

PERSISTENT: Final = 2  # the delivery mode
EXCHANGE: Final = re.compile(r"[A-Za-z0-9\-_.:@#,/><]{0,127}")  # what the client accepts
SHORT: Final = 255  # bytes, at most, of a routing key and a property
NAME: Final = 128  # bytes, at most, of a header's name
HEADER_ROOM: Final = 4096  # bytes of a header frame for all that is not the event's headers
OPEN_TIMEOUT: Final = 5.0  # seconds that the broker may take to accept a connection, or to answer
BLOCKED: Final = (
    "{} has blocked the connection, as it does during a memory or disk alarm; see 'rabbitmqctl "
    "list_alarms'"
)
# Why the broker takes no messages, by what the client raises; in an operator's words.
REASONS: Final[dict[Any, str]] = {
    (exceptions.AuthenticationError, exceptions.ProbableAuthenticationError): "{broker} refused "
    "the login of {user!r}: {text}",
    exceptions.ConnectionClosed: "{broker} closed the connection: {text}",
    exceptions.ChannelNotFoundEntity: "{broker} has no exchange {exchange!r}; declare it: {text}",
    exceptions.ChannelAccessRefused: "{broker} refused {user!r} a permission: {text}",
    exceptions.ChannelPreconditionFailed: "The exchange {exchange!r} of {broker} is not a durable "
    "topic exchange; set declare=False to use it as it is: {text}",
}


class RabbitMQ(Backend):
    """Publishes persistent messages to one exchange; ``TO`` is the routing key."""

    attribute_prefix: ClassVar[str] = "cloudEvents:"
    # Copies to other queues, and what features and plugins of RabbitMQ read or write.
    commands: ClassVar[re.Pattern[str]] = re.compile(
        r"b?cc|x-(?:delay|death|match|(?:first|last)-death-.*|received-from|shovelled.*|stream-.*"
        r"|opt-.*|delivery-count|acquired-count|exception-.*|original-.*|deduplication-header"
        r"|cache-ttl|recent-history-no-store)",
        re.IGNORECASE,
    )

    def __init__(
        self,
        *,
        url: str | None = None,
        exchange: Any = "events",
        declare: Any = True,
        timeout: Any = 10.0,
        **client: Any,
    ) -> None:
        """Take the broker's URL, or the arguments of ``aio_pika.connect`` that replace it.

        ``exchange`` is declared as a durable topic exchange unless ``declare`` is false; ``""`` is
        the broker's default exchange, whose routing keys are names of queues.
        """
        super().__init__(timeout=timeout)
        is_valid = isinstance(exchange, str) and bool(EXCHANGE.fullmatch(exchange))
        expect("exchange", exchange, is_valid, "up to 127 letters, digits and -_.:@#,/><")
        expect("declare", declare, isinstance(declare, bool), "True or False")
        self._exchange, self._declare = exchange, declare
        self._address = Address(url, client)
        # A batch has a connection for itself. The broker closes the channel for one message, and
        # even the connection, because the client goes on sending to the channel.
        self._free: list[Connection] = []
        self._frame_max = 0  # bytes; known once connected

    async def open(self) -> None:
        """Connect, and declare the exchange."""
        self._free.append(await self._connection(OPEN_TIMEOUT))

    def prepare(self, message: Message) -> Message:
        """Return a message that the protocol can carry; ``Unrecoverable`` says why it cannot."""
        texts = [(message.to, "routing key", SHORT), (message.event_type, "event type", SHORT)]
        texts += [(name, "header name", NAME) for name in message.headers]
        for text, what, most in texts:
            if len(text.encode()) > most:
                raise Unrecoverable(
                    f"The {what} that begins {text[:40]!r} has {len(text.encode())} bytes; "
                    f"RabbitMQ takes {most} at most."
                )
        size = sum(len(f"{name}{text}".encode()) + 6 for name, text in message.headers.items())
        if 0 < self._frame_max < size + HEADER_ROOM:
            raise Unrecoverable(
                f"The headers have {size} bytes; {self._frame_max - HEADER_ROOM} fit into a frame "
                f"of {self._address}."
            )
        return message

    async def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send messages and wait until each is confirmed, returned or rejected."""
        connection = await self._connection(deadline - monotonic())
        closed = asyncio.shield(connection.channel.closing)
        tasks = [asyncio.ensure_future(self._publish(connection, each)) for each in messages]
        waiting = await late(tasks, closed, deadline - monotonic())
        is_lost = not connection.is_open
        if waiting and not is_lost:
            await connection.abort()
        for each in (*waiting, closed):
            each.cancel()
        await asyncio.gather(*waiting, closed, return_exceptions=True)
        outcomes = self._outcomes(tasks, self._silence(connection, is_lost))
        if connection.is_open:
            self._free.append(connection)
        else:
            await connection.close()
        return outcomes

    async def check(self) -> None:
        """Ask whether the exchange is there and the broker takes messages.

        During an alarm RabbitMQ answers everything but a publish. So this publishes a message that
        no queue can take, which the broker returns. It needs no more connections and channels than
        a batch, which may be as many as the user may have.
        """
        connection = await self._connection(OPEN_TIMEOUT)
        try:
            await asyncio.wait_for(self._probe(connection), OPEN_TIMEOUT)
        except BROKEN as error:
            if isinstance(error, asyncio.TimeoutError):
                await connection.abort()
            raise BrokerUnavailable(self._reason(error, connection)) from error
        finally:
            await connection.close()

    async def close(self) -> None:
        """Close the connections; without the handshake, if the broker does not answer it."""
        await asyncio.gather(*(each.close() for each in self._free))

    # --- sending ---

    async def _connection(self, timeout: float) -> Connection:
        """Return a connection that no batch uses, or open one."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
            await connection.close()
        connection = Connection(self._address)
        try:
            await asyncio.wait_for(self._open(connection), timeout)
        except BROKEN as error:
            await connection.close()
            raise BrokerUnavailable(self._reason(error)) from error
        return connection

    async def _open(self, connection: Connection) -> None:
        await connection.open()
        self._frame_max = connection.frame_max
        if self._exchange:
            await connection.channel.exchange_declare(
                self._exchange, exchange_type="topic", durable=True, passive=not self._declare
            )

    async def _publish(self, connection: Connection, message: Message) -> None:
        await connection.channel.basic_publish(
            message.body,
            exchange=self._exchange,
            routing_key=message.to,
            mandatory=True,  # without it the broker confirms what no queue takes
            wait=False,  # for the socket; the confirmation says more
            properties=spec.Basic.Properties(
                message_id=message.event_id,
                message_type=message.event_type,
                timestamp=message.event.occurred_at,
                content_type=message.content_type,
                headers={**message.headers},
                delivery_mode=PERSISTENT,
            ),
        )

    async def _probe(self, connection: Connection) -> None:
        name = f"outbox-check-{uuid4()}"
        with suppress(exceptions.PublishError, exceptions.ChannelAccessRefused):  # both are answers
            await connection.channel.basic_publish(
                b"", exchange="", routing_key=name, mandatory=True
            )
        if not self._exchange:
            return
        if not connection.is_open:
            await connection.new_channel()
        # The permission to write is needed for a binding, too; and one that is not there can be
        # removed. The broker looks at it first, and then at the other end, which is missing.
        try:
            await connection.channel.exchange_unbind(destination=self._exchange, source=name)
        except exceptions.AMQPChannelError as error:
            if name not in str(error):
                raise

    # --- what became of it ---

    def _outcomes(
        self, tasks: Sequence[asyncio.Future[Any]], cancelled: Exception
    ) -> list[Outcome]:
        errors = [cancelled if each.cancelled() else each.exception() for each in tasks]
        closing = (each for each in errors if isinstance(each, exceptions.AMQPChannelError))
        closed = self._closed(next(closing, None))
        return [each if each is None else self._outcome(each, closed) for each in errors]

    def _closed(self, error: exceptions.AMQPChannelError | None) -> Outcome:
        """Return the outcome of messages that had no answer when the broker closed the channel."""
        text = f"{self._address} refused the message: {error}"
        if isinstance(error, exceptions.ChannelNotFoundEntity) or (
            # Otherwise that is about one routing key.
            isinstance(error, exceptions.ChannelAccessRefused) and "access to topic '" not in text
        ):
            return BrokerUnavailable(self._reason(error))
        is_large = (
            isinstance(error, exceptions.ChannelPreconditionFailed) and "message size" in text
        )
        return error and Together(Unrecoverable(text) if is_large else Refused(text))

    def _outcome(self, error: BaseException, closed: Outcome) -> Outcome:
        """Return the outcome of a message; ``closed`` is it, if its channel was closed."""
        if isinstance(error, exceptions.PublishError):
            frame = error.frame
            return Refused(
                f"unroutable: no queue is bound to the exchange {frame.exchange!r} of "
                f"{self._address} for the key {frame.routing_key!r} ({frame.reply_text}); bind one."
            )
        if isinstance(error, exceptions.DeliveryError):
            return Refused(
                f"{self._address} rejected the message: a queue that takes it is full, or could "
                "not store it."
            )
        if isinstance(error, (ValueError, TypeError)):
            return Unrecoverable(f"The message cannot be encoded: {error}")
        known = isinstance(error, (Unconfirmed, BrokerUnavailable))
        return closed or (error if known else BrokerUnavailable(self._reason(error)))

    def _silence(self, connection: Connection, is_lost: bool) -> Exception:
        """Return the outcome of messages that got no answer."""
        if is_lost:
            return BrokerUnavailable(f"The connection to {self._address} broke")
        if connection.was_blocked:
            return BrokerUnavailable(BLOCKED.format(self._address))
        return Unconfirmed(f"{self._address} did not confirm the message in time")

    def _reason(self, error: BaseException, connection: Connection | None = None) -> str:
        """Return in an operator's words why the broker takes no messages."""
        if isinstance(error, asyncio.TimeoutError):
            is_blocked = connection is not None and connection.was_blocked
            return (BLOCKED if is_blocked else "{} did not answer in time").format(self._address)
        kinds = (text for kind, text in REASONS.items() if isinstance(error, kind))
        return next(kinds, "{broker} cannot be reached: {text}").format(
            broker=self._address,
            user=self._address.url.user,
            exchange=self._exchange,
            text=str(error) or type(error).__name__,
        )
