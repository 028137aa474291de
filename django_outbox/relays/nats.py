"""Send a relay's events to NATS JetStream, with many acknowledgements in one round trip.

What fails, and whose failure it is:

- A message that no stream takes, that its stream refuses (it is full and has ``discard: new``, or
  is not the expected one), or whose subject the user may not publish to fails alone, and is tried
  again as the retry policy says. One with an invalid subject or header, or larger than the server
  or its stream takes, is dead.
- A server that is away or has no JetStream, a cluster without a leader, a server or account whose
  storage is full, and a login that is refused stop all messages: ``BrokerUnavailable``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any, ClassVar, Final

from nats.js import errors

from ..exceptions import BrokerUnavailable, Unrecoverable
from .backend import Backend, Message, Outcome, Refused, Unconfirmed, expect
from .envelope import encoded, expect_header
from .nats_connection import DEFAULT_SERVER, FAULTS, Connection
from .session import late

OPEN_TIMEOUT: Final = 8.0  # seconds for all servers
SETTLE: Final = 0.5  # seconds for a cancelled task to end
ASK_TIMEOUT: Final = 3.0  # seconds for JetStream to answer a question
MAX_SUBJECT: Final = 2048  # bytes; a server closes the connection for a line of more than 4096
DOMAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
SUBJECT: Final = re.compile(r"[^\s.*>\x00-\x20\x7f]+(?:\.[^\s.*>\x00-\x20\x7f]+)*")
LINE_BREAK: Final = re.compile(r"[\r\n]")
RESERVED: Final = ("$JS.", "$SYS.", "_INBOX.")  # a message there is a command, or an answer
DENIED: Final = re.compile(r'permissions violation for publish to "(.*?)"', re.IGNORECASE)
SAID: Final = re.compile(r"nats: '(.*)'")  # by the server
# Error codes of JetStream that concern its account, server or cluster, whatever the message.
FULL: Final = (10002, 10023, 10028, 10047)  # the account, resources, memory, storage
LEADERLESS: Final = (10007, 10008, 10009, 10035, 10039, 10041, 10076)  # or it is not enabled
UNAVAILABLE: Final = frozenset((*FULL, *LEADERLESS))
TOO_LARGE: Final = 10054  # for the stream's max_msg_size


class NoStream(Refused):
    """No stream takes messages of a subject."""


class JetStream(Backend):
    """Publishes to the streams of a NATS server or cluster; ``TO`` is the subject."""

    # The server obeys Nats-Rollup, Nats-TTL, Nats-Expected-Stream and the like, and clients obey
    # Status, with which a server answers, and KV-Operation, which deletes a key of a bucket.
    commands: ClassVar[re.Pattern[str]] = re.compile(r"(?i:nats-.*|kv-operation)|Status")

    def __init__(
        self,
        *,
        servers: Any = DEFAULT_SERVER,
        stream: Any = None,
        domain: Any = None,
        timeout: Any = 10.0,
        **client: Any,
    ) -> None:
        """Take URLs, arguments of ``nats.connect``, and the stream that has to take each message.

        Without ``stream`` it may be any whose subjects match. ``domain`` is that of JetStream, if
        the servers are leaf nodes of it.
        """
        super().__init__(timeout=timeout)
        for name, value, pattern in (("stream", stream, SUBJECT), ("domain", domain, DOMAIN)):
            is_valid = value is None or (isinstance(value, str) and bool(pattern.fullmatch(value)))
            expect(name, value, is_valid, f"the name of a JetStream {name}")
        self._stream, self._domain = stream, domain
        self._connection = Connection(servers, client)
        self._connection.denied = self._denied
        self._tokens = map(str, count())  # the last parts of the subjects that answers come to
        self._waiting: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}  # subjects, by token

    async def open(self) -> None:
        """Connect, and listen for acknowledgements."""
        try:
            await asyncio.wait_for(self._connection.open(), OPEN_TIMEOUT)
            client = self._connection.client
            self._inbox = client.new_inbox()
            # The client's own publish_async never tells that a stream has refused a message.
            await client.subscribe(f"{self._inbox}.*", cb=self._acknowledged)
        except FAULTS as error:
            raise BrokerUnavailable(self._reason(error)) from error
        self._context = client.jetstream(domain=self._domain, timeout=ASK_TIMEOUT)

    def prepare(self, message: Message) -> tuple[Message, dict[str, str]]:
        """Return a message and its headers; ``Unrecoverable`` says why it cannot be sent."""
        if not SUBJECT.fullmatch(message.to) or message.to.startswith(RESERVED):
            raise Unrecoverable(
                f"{message.to!r} is not a subject to publish to; expected names joined by dots, "
                "without blanks, '*' and '>', outside of $JS, $SYS and _INBOX."
            )
        if len(message.to.encode()) > MAX_SUBJECT:
            raise Unrecoverable(f"The subject has more than {MAX_SUBJECT} bytes: {message.to!r}")
        headers = self._headers(message)
        size = len(message.body) + 12  # and the first and last line of the headers
        for name, value in headers.items():
            expect_header(name, value, LINE_BREAK)
            size += len(name) + len(value.encode()) + 4
        if size > (most := self._connection.client.max_payload):
            raise Unrecoverable(
                f"The message has {size} bytes; {self._connection} takes {most} at most "
                "(max_payload)."
            )
        return message, headers

    async def publish(
        self, messages: Sequence[tuple[Message, dict[str, str]]], deadline: float
    ) -> list[Outcome]:
        """Send messages and wait until the streams have stored or refused each."""
        if self._connection.is_lost:
            raise BrokerUnavailable(self._lost())
        loop = asyncio.get_running_loop()
        mine = {next(self._tokens): (each.to, loop.create_future()) for each, _ in messages}
        self._waiting.update(mine)
        answers = [answer for _, answer in mine.values()]
        sending = asyncio.ensure_future(self._send(messages, mine))
        try:
            await late([sending, *answers], self._connection.lost, deadline - monotonic())
            sending.cancel()
            await asyncio.wait((sending,), timeout=SETTLE)
            silence = self._silence()
            outcomes = [each.result() if each.done() else silence for each in answers]
        finally:
            for token in mine:
                del self._waiting[token]
            for each in answers:
                each.cancel()
        await self._tell_apart(outcomes, deadline)
        return outcomes

    async def check(self) -> None:
        """Ask JetStream whether it is there, and for the stream if the settings name one."""
        if self._stream is not None:
            await self._ask(self._context.stream_info(self._stream))
            return
        await self._ask(self._context.account_info())
        if self.to and "{" not in self.to:
            await self._ask(self._context.find_stream_name_by_subject(self.to))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    # --- sending ---

    async def _send(
        self, messages: Sequence[tuple[Message, dict[str, str]]], tokens: Iterable[str]
    ) -> None:
        for token, (message, headers) in zip(tokens, messages, strict=True):
            await self._connection.client.publish(
                message.to, message.body, reply=f"{self._inbox}.{token}", headers=headers
            )

    async def _acknowledged(self, answer: Any) -> None:
        """Settle the message that a stream, or the server for want of one, has answered."""
        subject, waiting = self._waiting.get(answer.subject.rpartition(".")[2], ("", None))
        if waiting is None or waiting.done():
            return
        if not answer.data and (answer.headers or {}).get("Status") == "503":
            waiting.set_result(NoStream(self._no_stream(subject)))
            return
        try:
            error = json.loads(answer.data).get("error")
        except (ValueError, AttributeError):
            error = {"description": f"an answer that is not JetStream's: {answer.data[:80]!r}"}
        waiting.set_result(None if error is None else self._refusal(error))

    def _denied(self, text: str) -> None:
        """Settle the messages whose subject the user may not publish to: they get no answer."""
        if found := DENIED.search(text):
            for subject, waiting in self._waiting.values():
                if subject.lower() == found[1].lower() and not waiting.done():
                    waiting.set_result(Refused(f"{self._connection} refused the message: {text}"))

    def _headers(self, message: Message) -> dict[str, str]:
        headers = {**message.headers, "content-type": message.content_type}
        if "ce-specversion" in headers:
            own = [name for name in headers if name.startswith(self.attribute_prefix)]
            headers |= {name: encoded(headers[name]) for name in own}
            headers["ce-datacontenttype"] = message.content_type
        headers["Nats-Msg-Id"] = message.event_id
        if self._stream is not None:
            headers["Nats-Expected-Stream"] = self._stream
        return headers

    # --- what became of it ---

    def _refusal(self, error: Mapping[str, Any]) -> Exception:
        text = f"{self._connection} refused the message: {error.get('description')}"
        if error.get("err_code") in UNAVAILABLE:
            return BrokerUnavailable(text)
        return Unrecoverable(text) if error.get("err_code") == TOO_LARGE else Refused(text)

    def _silence(self) -> Exception:
        """Return the outcome of messages that got no answer."""
        if self._connection.is_lost:
            return BrokerUnavailable(self._lost())
        return Unconfirmed(f"{self._connection} did not acknowledge the message in time")

    async def _tell_apart(self, outcomes: list[Outcome], deadline: float) -> None:
        """Find out whether a stream is missing or JetStream is: a message's answer is the same."""
        homeless = [i for i, each in enumerate(outcomes) if isinstance(each, NoStream)]
        if not homeless or None in outcomes:
            return
        try:
            await self._ask(self._context.account_info(), max(deadline - monotonic(), SETTLE))
        except BrokerUnavailable as error:
            for index in homeless:
                outcomes[index] = error

    async def _ask(self, question: Awaitable[Any], timeout: float = ASK_TIMEOUT) -> None:
        """Ask JetStream; that this user may not ask is an answer, too."""
        self._connection.last_error = ""
        try:
            await asyncio.wait_for(question, timeout)
        except errors.NotFoundError as error:
            raise NoStream(self._no_stream(self.to)) from error
        except errors.ServiceUnavailableError as error:
            raise BrokerUnavailable(
                f"{self._connection} has no JetStream; enable it, or set the option domain if "
                "another server has it"
            ) from error
        except FAULTS as error:
            if not DENIED.search(self._connection.last_error):
                raise BrokerUnavailable(self._reason(error)) from error

    def _no_stream(self, subject: str) -> str:
        if self._stream is not None:
            return f"{self._connection} has no stream {self._stream!r}, or does not show it."
        return (
            f"No stream of {self._connection} takes the subject {subject!r}; add it to a stream's "
            "subjects."
        )

    def _lost(self) -> str:
        return f"The connection to {self._connection} broke {self._connection.last_error}".rstrip()

    def _reason(self, error: BaseException) -> str:
        """Return in an operator's words why the server takes no messages."""
        text = str(error)
        if "authorization" in text.lower() or "authentication" in text.lower():
            return f"{self._connection} refused the login: {text}"
        if isinstance(error, asyncio.TimeoutError):
            deaf = self._connection.deaf
            return f"{self._connection} did not answer in time{deaf and f': {deaf}'}"
        if said := SAID.fullmatch(text):
            return f"{self._connection} refused the connection: {said[1]}"
        text = self._connection.last_error or text or type(error).__name__
        return f"{self._connection} cannot be reached: {text}"
