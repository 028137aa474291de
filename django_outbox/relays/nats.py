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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Final
from urllib.parse import quote

import nats.errors

from ..exceptions import BrokerUnavailable, Unrecoverable
from .backend import Backend, Message, Outcome, Unconfirmed
from .event_loop import late
from .nats_connection import DEFAULT_SERVER, FAULTS, Connection

OPEN_TIMEOUT: Final = 8.0  # seconds for all servers
SETTLE: Final = 0.5  # seconds for a cancelled task to end
ASK_TIMEOUT: Final = 3.0  # seconds for JetStream to answer a question
MAX_SUBJECT: Final = 2048  # bytes; a server closes the connection for a line of more than 4096
DOMAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
SUBJECT: Final = re.compile(r"[^\s.*>\x00-\x20\x7f]+(?:\.[^\s.*>\x00-\x20\x7f]+)*")
RESERVED: Final = ("$JS.", "$SYS.", "_INBOX.")  # a message there is a command, or an answer
HEADER: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
VISIBLE: Final = "".join(chr(each) for each in range(0x21, 0x7F) if chr(each) not in '"%')
DENIED: Final = re.compile(r'permissions violation for publish to "(.*?)"', re.IGNORECASE)
# Error codes of JetStream that concern its account, server or cluster, whatever the message.
FULL: Final = (10002, 10023, 10028, 10047)  # the account, resources, memory, storage
LEADERLESS: Final = (10007, 10008, 10009, 10035, 10039, 10041, 10076)  # or it is not enabled
UNAVAILABLE: Final = frozenset((*FULL, *LEADERLESS))
TOO_LARGE: Final = 10054  # for the stream's max_msg_size


class NoStream(Exception):
    """No stream takes messages of a subject."""


class RefusedMessage(Exception):
    """A stream refused a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message that waits for its acknowledgement."""

    message: Message
    headers: Mapping[str, str]
    token: str  # the last part of the subject that its answer comes to
    answer: asyncio.Future[Outcome]


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
        if stream is not None and (not isinstance(stream, str) or not SUBJECT.fullmatch(stream)):
            raise ValueError(f"stream is {stream!r}; expected the name of a stream.")
        if domain is not None and (not isinstance(domain, str) or not DOMAIN.fullmatch(domain)):
            raise ValueError(f"domain is {domain!r}; expected the name of a JetStream domain.")
        self._stream = stream
        self._api = f"$JS.{domain}.API" if domain else "$JS.API"
        self._connection = Connection(servers, client)
        self._connection.denied = self._denied
        self._waiting: dict[str, Pending] = {}  # by token
        self._sent = 0  # messages; the last token

    async def open(self) -> None:
        """Connect, and listen for acknowledgements."""
        try:
            await asyncio.wait_for(self._connection.open(), OPEN_TIMEOUT)
            self._inbox = self._connection.client.new_inbox()
            await self._connection.client.subscribe(f"{self._inbox}.*", cb=self._acknowledged)
        except FAULTS as error:
            raise BrokerUnavailable(self._reason(error)) from error

    async def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
        """Send messages and wait until the streams have stored or refused each."""
        if self._connection.is_lost:
            raise BrokerUnavailable(self._lost())
        outcomes: list[Outcome] = []
        pending: dict[int, Pending] = {}  # by index of the message
        for index, message in enumerate(messages):
            headers = self._headers(message)
            outcomes.append(self._fault(message, headers))
            if outcomes[-1] is None:
                pending[index] = self._expect(message, headers)
        try:
            await self._send_all([*pending.values()], deadline)
            silence = self._silence()
            for index, each in pending.items():
                outcomes[index] = each.answer.result() if each.answer.done() else silence
        finally:
            for each in pending.values():
                del self._waiting[each.token]
                each.answer.cancel()
        await self._tell_apart(outcomes, deadline)
        return outcomes

    async def check(self) -> None:
        """Ask JetStream whether it is there, and for the stream if the settings name one."""
        if self._stream is not None:
            answer = await self._ask(f"STREAM.INFO.{self._stream}")
            if "error" in answer:
                raise NoStream(
                    f"{self._connection} has no stream {self._stream!r}, or does not show it: "
                    f"{answer['error'].get('description')}"
                )
            return
        await self._ask("INFO")
        if self.to and "{" not in self.to:
            answer = await self._ask("STREAM.NAMES", {"subject": self.to})
            if answer and not answer.get("streams"):
                raise NoStream(self._no_stream(self.to))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    # --- sending ---

    def _expect(self, message: Message, headers: Mapping[str, str]) -> Pending:
        self._sent += 1
        pending = Pending(
            message=message,
            headers=headers,
            token=str(self._sent),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting[pending.token] = pending
        return pending

    async def _send_all(self, pending: Sequence[Pending], deadline: float) -> None:
        """Send messages and wait for the answers; no longer than the connection lives."""
        sending = asyncio.ensure_future(self._send(pending))
        answers = [each.answer for each in pending]
        await late([sending, *answers], self._connection.lost, deadline - monotonic())
        sending.cancel()
        await asyncio.wait((sending,), timeout=SETTLE)

    async def _send(self, pending: Sequence[Pending]) -> None:
        client = self._connection.client
        for each in pending:
            await client.publish(
                each.message.to,
                each.message.body,
                reply=f"{self._inbox}.{each.token}",
                headers=each.headers,
            )

    async def _acknowledged(self, answer: Any) -> None:
        """Settle the message that a stream, or the server for want of one, has answered."""
        pending = self._waiting.get(answer.subject.rpartition(".")[2])
        if pending is None or pending.answer.done():
            return
        if not answer.data and (answer.headers or {}).get("Status") == "503":
            pending.answer.set_result(NoStream(self._no_stream(pending.message.to)))
            return
        try:
            error = json.loads(answer.data).get("error")
        except (ValueError, AttributeError):
            error = {"description": f"an answer that is not JetStream's: {answer.data[:80]!r}"}
        pending.answer.set_result(None if error is None else self._refusal(error))

    def _denied(self, text: str) -> None:
        """Settle the messages whose subject the user may not publish to: they get no answer."""
        if found := DENIED.search(text):
            refused = RefusedMessage(f"{self._connection} refused the message: {text}")
            for each in self._waiting.values():
                if each.message.to.lower() == found[1].lower() and not each.answer.done():
                    each.answer.set_result(refused)

    def _headers(self, message: Message) -> dict[str, str]:
        headers = dict(message.headers)
        if "ce-specversion" in headers:  # attributes are percent-encoded as in HTTP
            for name, value in message.headers.items():
                if name.startswith(self.attribute_prefix):
                    headers[name] = quote(value, safe=VISIBLE)
            headers["ce-datacontenttype"] = message.content_type
        headers["content-type"] = message.content_type
        headers["Nats-Msg-Id"] = message.event_id
        if self._stream is not None:
            headers["Nats-Expected-Stream"] = self._stream
        return headers

    # --- what became of it ---

    def _fault(self, message: Message, headers: Mapping[str, str]) -> Outcome:
        """Return why a message cannot be sent; None if it can."""
        if not SUBJECT.fullmatch(message.to) or message.to.startswith(RESERVED):
            return Unrecoverable(
                f"{message.to!r} is not a subject to publish to; expected names joined by dots, "
                "without blanks, '*' and '>', outside of $JS, $SYS and _INBOX."
            )
        if len(message.to.encode()) > MAX_SUBJECT:
            return Unrecoverable(f"The subject has more than {MAX_SUBJECT} bytes: {message.to!r}")
        size = len(message.body) + 12  # and the first and last line of the headers
        for name, value in headers.items():
            if not HEADER.fullmatch(name) or "\r" in value or "\n" in value:
                return Unrecoverable(
                    f"The header {name!r} cannot be sent: a name has ASCII letters, digits and "
                    "hyphens, a value no line breaks."
                )
            size += len(name) + len(value.encode()) + 4
        if size > self._connection.client.max_payload:
            return Unrecoverable(
                f"The message has {size} bytes; {self._connection} takes "
                f"{self._connection.client.max_payload} at most (max_payload)."
            )
        return None

    def _silence(self) -> Exception:
        """Return the outcome of messages that got no answer."""
        if self._connection.is_lost:
            return BrokerUnavailable(self._lost())
        return Unconfirmed(f"{self._connection} did not acknowledge the message in time")

    def _refusal(self, error: dict[str, Any]) -> Exception:
        text = f"{self._connection} refused the message: {error.get('description')}"
        if error.get("err_code") in UNAVAILABLE:
            return BrokerUnavailable(text)
        return Unrecoverable(text) if error.get("err_code") == TOO_LARGE else RefusedMessage(text)

    async def _tell_apart(self, outcomes: list[Outcome], deadline: float) -> None:
        """Find out whether a stream is missing or JetStream is: a message's answer is the same."""
        homeless = [i for i, each in enumerate(outcomes) if isinstance(each, NoStream)]
        if not homeless or None in outcomes:
            return
        try:
            await self._ask("INFO", timeout=max(deadline - monotonic(), 0.5))
        except BrokerUnavailable as error:
            for index in homeless:
                outcomes[index] = error

    async def _ask(self, what: str, question: Any = None, timeout: float = ASK_TIMEOUT) -> Any:
        """Return JetStream's answer; {} if this user may not ask. Raises ``BrokerUnavailable``."""
        self._connection.last_error = ""
        data = b"" if question is None else json.dumps(question).encode()
        asked = self._connection.client.request(
            f"{self._api}.{what}", data, timeout=min(timeout, ASK_TIMEOUT)
        )
        try:
            return json.loads((await asked).data)
        except nats.errors.NoRespondersError:
            raise BrokerUnavailable(
                f"{self._connection} has no JetStream; enable it, or set the option domain if "
                "another server has it"
            ) from None
        except FAULTS as error:
            if DENIED.search(self._connection.last_error):
                return {}
            raise BrokerUnavailable(self._reason(error)) from error

    def _no_stream(self, subject: str) -> str:
        return (
            f"No stream of {self._connection} takes the subject {subject!r}; add it to a stream's "
            "subjects."
        )

    def _lost(self) -> str:
        said = self._connection.last_error
        return f"The connection to {self._connection} broke{said and f': {said}'}"

    def _reason(self, error: BaseException) -> str:
        """Return in an operator's words why the server takes no messages."""
        text = str(error)
        if "authorization" in text.lower() or "authentication" in text.lower():
            return f"{self._connection} refused the login: {text}"
        if isinstance(error, asyncio.TimeoutError):
            deaf = self._connection.deaf
            return f"{self._connection} did not answer in time{deaf and f': {deaf}'}"
        said = self._connection.last_error or text or type(error).__name__
        return f"{self._connection} cannot be reached: {said}"
