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

import aio_pika
from aiormq import exceptions, spec
from pamqp.exceptions import PAMQPException

from ..exceptions import BrokerUnavailable, Unrecoverable
from .backend import Backend, Message, Outcome, Unconfirmed
from .event_loop import late
from .rabbitmq_connection import Address, Connection

PERSISTENT: Final = 2  # the delivery mode
EXCHANGE: Final = re.compile(r"[A-Za-z0-9\-_.:@#,/><]{0,127}")  # what the client accepts
SHORT: Final = 255  # bytes, at most, of a routing key and a property
NAME: Final = 128  # bytes, at most, of a header's name
HEADER_ROOM: Final = 4096  # bytes of a header frame for all that is not the event's headers
OPEN_TIMEOUT: Final = 5.0  # seconds
PROBE_TIMEOUT: Final = 5.0  # seconds that the broker may take to answer a check
# What a connection that breaks, or is refused, raises.
BROKEN: Final = (exceptions.AMQPError, PAMQPException, OSError, RuntimeError)


class UnroutableMessage(Exception):
    """No queue takes a message: none is bound to the exchange for its routing key."""


class RefusedMessage(Exception):
    """The broker refused a message."""


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
        if not isinstance(declare, bool):
            raise ValueError(f"declare is {declare!r}; expected True or False.")
        if not isinstance(exchange, str) or not EXCHANGE.fullmatch(exchange):
            raise ValueError(
                f"exchange is {exchange!r}; expected up to 127 letters, digits and -_.:@#,/><"
            )
        self._exchange, self._declare = exchange, declare
        self._address = Address(url, client)
        # A batch has a connection for itself. The broker closes the channel for one message, and
        # even the connection, because the client goes on sending to the channel.
        self._free: list[Connection] = []
        self._frame_max = 0  # bytes; known once connected

    async def open(self) -> None:
        """Connect, and declare the exchange."""
        connection = Connection(self._address)
        try:
            await asyncio.wait_for(self._open(connection), OPEN_TIMEOUT)
        except (*BROKEN, asyncio.TimeoutError) as error:
            await connection.close()
            raise BrokerUnavailable(self._reason(error)) from error
        self._free.append(connection)

    async def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send messages and wait until each is confirmed, returned or rejected."""
        outcomes: list[Outcome] = [self._fault(each) for each in messages]
        sent = [index for index, fault in enumerate(outcomes) if fault is None]
        found = await self._send_apart([messages[index] for index in sent], deadline)
        for index, outcome in zip(sent, found, strict=True):
            outcomes[index] = outcome
        return outcomes

    async def check(self) -> None:
        """Ask whether the exchange is there and the broker takes messages.

        During an alarm RabbitMQ answers everything but a publish. So this publishes a message that
        no queue can take, which the broker returns.
        """
        connection = Connection(self._address)
        try:
            await asyncio.wait_for(self._probe(connection), PROBE_TIMEOUT)
        except asyncio.TimeoutError as error:
            await connection.abort()
            raise BrokerUnavailable(self._reason(error, connection)) from error
        except BROKEN as error:
            raise BrokerUnavailable(self._reason(error)) from error
        finally:
            await connection.close()

    async def close(self) -> None:
        """Close the connections; without the handshake, if the broker does not answer it."""
        await asyncio.gather(*(each.close() for each in self._free))

    # --- sending ---

    async def _send_apart(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send messages; in halves, once the broker has closed the channel for one of them.

        It does not say for which, and does not confirm those that it took before.
        """
        outcomes = await self._send(messages, deadline) if messages else []
        lost = [
            i for i, each in enumerate(outcomes) if isinstance(each, exceptions.AMQPChannelError)
        ]
        if len(lost) < 2:
            for index in lost:
                outcomes[index] = self._refusal(outcomes[index])
            return outcomes
        half = len(lost) // 2
        for part in (lost[:half], lost[half:]):
            found = await self._send_apart([messages[index] for index in part], deadline)
            for index, outcome in zip(part, found, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _send(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send messages on one channel, and wait for what becomes of them until the deadline."""
        try:
            connection = await asyncio.wait_for(self._connection(), deadline - monotonic())
        except (*BROKEN, asyncio.TimeoutError) as error:
            return [BrokerUnavailable(self._reason(error))] * len(messages)
        closed = asyncio.shield(connection.channel.closed())
        underlay = await connection.channel.get_underlay_channel()
        tasks = [asyncio.ensure_future(self._publish(underlay, each)) for each in messages]
        waiting = await late(tasks, closed, deadline - monotonic())
        is_lost = not connection.is_open
        if waiting and not is_lost:
            await connection.abort()
        for each in (*waiting, closed):
            each.cancel()
        await asyncio.wait((*waiting, closed))
        outcomes = self._outcomes(tasks, self._silence(connection, is_lost))
        if connection.is_open:
            self._free.append(connection)
        else:
            await connection.close()
        return outcomes

    async def _connection(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
            await connection.close()
        connection = Connection(self._address)
        try:
            await self._open(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _open(self, connection: Connection) -> None:
        await connection.open()
        self._frame_max = connection.frame_max
        if self._exchange:
            await connection.channel.declare_exchange(
                self._exchange, aio_pika.ExchangeType.TOPIC, durable=True, passive=not self._declare
            )

    async def _publish(self, underlay: Any, message: Message) -> None:
        await underlay.basic_publish(
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
        await self._open(connection)
        name = f"outbox-check-{uuid4()}"
        underlay = await (await connection.new_channel()).get_underlay_channel()
        with suppress(exceptions.PublishError, exceptions.ChannelAccessRefused):  # both are answers
            await underlay.basic_publish(b"", exchange="", routing_key=name, mandatory=True)
        if not self._exchange:
            return
        # The permission to write is needed for a binding, too; and one that is not there can be
        # removed. The broker looks at it first, and then at the other end, which is missing.
        underlay = await connection.channel.get_underlay_channel()
        try:
            await underlay.exchange_unbind(destination=self._exchange, source=name)
        except exceptions.AMQPChannelError as error:
            if name not in str(error):
                raise

    # --- what became of it ---

    def _fault(self, message: Message) -> Outcome:
        """Return why a message cannot be sent; None if it can."""
        texts = [(message.to, "routing key", SHORT), (message.event_type, "event type", SHORT)]
        texts += [(name, "header name", NAME) for name in message.headers]
        for text, what, most in texts:
            if len(text) * 4 > most and len(text.encode()) > most:
                return Unrecoverable(
                    f"The {what} that begins {text[:40]!r} has {len(text.encode())} bytes; "
                    f"RabbitMQ takes {most} at most."
                )
        size = sum(
            len(name.encode()) + len(text.encode()) + 6 for name, text in message.headers.items()
        )
        if 0 < self._frame_max < size + HEADER_ROOM:
            return Unrecoverable(
                f"The headers have {size} bytes; {self._frame_max - HEADER_ROOM} fit into a frame "
                f"of {self._address}."
            )
        return None

    def _outcomes(
        self, tasks: Sequence[asyncio.Future[Any]], cancelled: Exception
    ) -> list[Outcome]:
        errors = [cancelled if each.cancelled() else each.exception() for each in tasks]
        closing = next(
            (each for each in errors if isinstance(each, exceptions.AMQPChannelError)), None
        )
        return [each if each is None else self._outcome(each, closing) for each in errors]

    def _outcome(
        self, error: BaseException, closing: exceptions.AMQPChannelError | None
    ) -> Outcome:
        """Return the outcome of a message; ``closing`` is why its channel was closed."""
        if isinstance(error, exceptions.PublishError):
            frame = error.frame
            return UnroutableMessage(
                f"unroutable: no queue is bound to the exchange {frame.exchange!r} of "
                f"{self._address} for the key {frame.routing_key!r} ({frame.reply_text}); bind one."
            )
        if isinstance(error, exceptions.DeliveryError):
            return RefusedMessage(
                f"{self._address} rejected the message: a queue that takes it is full, or could "
                "not store it."
            )
        if isinstance(error, (ValueError, TypeError)):
            return Unrecoverable(f"The message cannot be encoded: {error}")
        if closing is not None:
            return BrokerUnavailable(self._reason(closing)) if _is_of_all(closing) else closing
        known = isinstance(error, (Unconfirmed, BrokerUnavailable))
        return error if known else BrokerUnavailable(self._reason(error))

    def _refusal(self, error: Any) -> Outcome:
        text = f"{self._address} refused the message: {error}"
        is_large = isinstance(
            error, exceptions.ChannelPreconditionFailed
        ) and "message size" in str(error)
        return Unrecoverable(text) if is_large else RefusedMessage(text)

    def _silence(self, connection: Connection, is_lost: bool) -> Exception:
        """Return the outcome of messages that got no answer."""
        if is_lost:
            return BrokerUnavailable(f"The connection to {self._address} broke")
        if connection.was_blocked:
            return BrokerUnavailable(self._blocked())
        return Unconfirmed(f"{self._address} did not confirm the message in time")

    def _blocked(self) -> str:
        return (
            f"{self._address} has blocked the connection, as it does during a memory or disk "
            "alarm; see 'rabbitmqctl list_alarms'"
        )

    def _reason(self, error: BaseException, connection: Connection | None = None) -> str:
        """Return in an operator's words why the broker takes no messages."""
        text, broker = str(error) or type(error).__name__, self._address
        user = broker.url.user
        if isinstance(error, asyncio.TimeoutError):
            is_blocked = connection is not None and connection.was_blocked
            return self._blocked() if is_blocked else f"{broker} did not answer in time"
        if isinstance(
            error, (exceptions.AuthenticationError, exceptions.ProbableAuthenticationError)
        ):
            return f"{broker} refused the login of {user!r}: {text}"
        if isinstance(error, exceptions.ChannelNotFoundEntity):
            return f"{broker} has no exchange {self._exchange!r}; declare it there: {text}"
        if isinstance(error, exceptions.ChannelAccessRefused):
            return f"{broker} refused {user!r} a permission: {text}"
        if isinstance(error, exceptions.ChannelPreconditionFailed):
            return (
                f"The exchange {self._exchange!r} of {broker} is not a durable topic exchange; set "
                f"declare=False to use it as it is: {text}"
            )
        return f"{broker} cannot be reached: {text}"


def _is_of_all(error: exceptions.AMQPChannelError) -> bool:
    """Return whether the broker would close the channel for any message to this exchange."""
    if isinstance(error, exceptions.ChannelAccessRefused):
        return "access to topic '" not in str(error)  # that is about one routing key
    return isinstance(error, exceptions.ChannelNotFoundEntity)
