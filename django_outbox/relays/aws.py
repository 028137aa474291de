"""Amazon SQS and SNS: queues and topics of AWS, by calls of ten messages. Needs the extra ``aws``.

What an error means:

- The endpoint cannot be reached, does not answer in time, answers 5xx or not as AWS does (a proxy's
  page, an answer that is cut off), or refuses the credentials: ``BrokerUnavailable``.
- Throttling: the message is deferred for a second, and no attempt is spent.
- A message that AWS cannot take (contents, size, parameters): ``Unrecoverable``, for it alone.
- Anything else about a queue or topic (it does not exist, no permission, its KMS key is disabled):
  ``Refused``; it costs an attempt and the retry policy decides.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from time import monotonic
from typing import Any, ClassVar, Final, NamedTuple

import boto3
from botocore import exceptions
from botocore.config import Config

from ..exceptions import BrokerUnavailable, Unrecoverable
from ..listeners.outcomes import Defer
from .backend import NOT_SENT, Backend, Message, Outcome, Refused, Together

THREADS: Final = 8  # calls at a time
CONNECT_SHARE: Final = 1 / 4  # of the timeout, for a connection; half of it is for the answer

MAX_ENTRIES: Final = 10  # of a call
# Bytes, body and attributes. A call is filled up to 256 KiB, which every queue and topic takes. A
# larger message travels alone: SQS takes 1 MiB; SNS does if the topic's MaximumMessageSize says so.
MAX_CALL: Final = 262_144
MAX_MESSAGE: Final = 1_048_576
MAX_ATTRIBUTES: Final = 10  # of a message to SQS; SNS with raw delivery to SQS drops one with more
REST: Final = "headers"  # the attribute with the other headers, as a JSON object
# What a consumer needs most; with more than ten headers these are attributes of their own.
FIRST: Final = (
    "event-id event-type ce-id ce-type ce-source ce-specversion content-type event-key "
    "ce-partitionkey occurred-at ce-time aggregate-id ce-subject aggregate-type tenant-id "
    "ce-tenantid"
).split()
QUEUE: Final = re.compile(r"https?://\S+|[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
ARN: Final = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256}(\.fifo)?")
DESTINATIONS: Final = {
    "sqs": (QUEUE, "the URL or the name of an SQS queue"),
    "sns": (ARN, "the ARN of an SNS topic"),
}
# No dot at either end, nor two in a row; names that begin with AWS. or Amazon. are reserved.
ATTRIBUTE: Final = re.compile(
    r"(?!aws\.|amazon\.|\.)(?!.*\.\.)[a-z0-9_.-]{1,256}(?<!\.)", re.IGNORECASE
)
GROUP: Final = re.compile(r"[!-~]{1,128}")  # also of deduplication ids
# XML's characters; other text is refused.
UNSENDABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

THROTTLED: Final = Defer(1, "AWS asks to send more slowly")  # seconds
# Codes without "Exception" at their end, which some of them have; numbers are a proxy's status.
CONTENTS: Final = frozenset(
    "413 BatchRequestTooLong InvalidMessageContents InvalidParameter InvalidParameterValue "
    "MissingParameter ValidationError Validation".split()
)
THROTTLING: Final = frozenset(
    "429 KmsThrottled KMSThrottling OverLimit RequestThrottled Throttled Throttling "
    "TooManyRequests".split()
)
# The credentials are at fault, so AWS takes nothing at all until they are replaced.
CREDENTIALS: Final = frozenset(
    "AuthFailure ExpiredToken IncompleteSignature InvalidAccessKeyId InvalidClientTokenId "
    "InvalidSecurity MissingAuthenticationToken OptInRequired RequestExpired "
    "SignatureDoesNotMatch UnrecognizedClient RequestTimeTooSkewed InvalidSignature".split()
)


class _Client(Backend):
    """What SQS and SNS have in common: the client, the calls and their outcomes."""

    service: ClassVar[str]
    # AWS. and Amazon. set prices and senders of text messages and times to live; the other two make
    # clients for large payloads take the body for the address of one.
    commands: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:aws|amazon)\..*|ExtendedPayloadSize|SQSLargePayloadSize", re.IGNORECASE
    )

    def __init__(
        self,
        *,
        timeout: Any = 10.0,
        profile_name: str | None = None,
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        verify: bool | str | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        texts: dict[str, Any] = {
            "region_name": region_name,
            "endpoint_url": endpoint_url,
            "aws_access_key_id": aws_access_key_id,
            "aws_secret_access_key": aws_secret_access_key,
            "aws_session_token": aws_session_token,
        }
        for name, value in {**texts, "profile_name": profile_name}.items():
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(
                    f"{name} is of type {type(value).__name__}; expected a str that is not empty, "
                    "or None for what boto3 finds itself."
                )
        if bool(aws_access_key_id) != bool(aws_secret_access_key):
            raise ValueError("aws_access_key_id and aws_secret_access_key go together; give both.")
        self._profile, self._options = profile_name, {**texts, "verify": verify}
        self._resolved: dict[str, str] = {}  # URLs by name

    def open(self) -> None:
        """Make the client; the first call connects."""
        config = Config(
            connect_timeout=self.timeout * CONNECT_SHARE,
            read_timeout=self.timeout / 2,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=THREADS + 2,  # and two for checks
        )
        try:
            session = boto3.Session(profile_name=self._profile)
            self._client = session.client(self.service, config=config, **self._options)
        except (exceptions.BotoCoreError, ValueError) as error:
            raise BrokerUnavailable(f"The options of {self.service} do not fit: {error}") from None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"outbox-{self.service}")

    def close(self) -> None:
        """Give the connections and threads up; a call that waits for AWS ends with its timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def prepare(self, message: Message) -> Entry:
        """Return what is sent of a message; ``Unrecoverable`` if AWS cannot take it."""
        return entry_of(self.service, message)

    def publish(self, messages: Sequence[Entry], deadline: float) -> list[Outcome]:
        """Send messages by calls of up to ten, several at a time; return an outcome for each.

        A call begins in the first quarter of the time until ``deadline``, because it may take the
        rest. ``publish`` waits for calls that have begun, so that none sends anything later.
        """
        last_start = (3 * monotonic() + deadline) / 4
        for index, each in enumerate(messages):
            each.given["Id"] = str(index)
        calls = self._threads.map(self._call, grouped(messages), repeat(last_start))
        outcomes = {name: each for call in calls for name, each in call.items()}
        found = [outcomes[each.given["Id"]] for each in messages]
        # What was not sent because others waited for an answer in vain shares their outcome.
        away = next((each for each in found if isinstance(each, BrokerUnavailable)), NOT_SENT)
        return [away if each is NOT_SENT else each for each in found]

    def check(self) -> None:
        """Make the smallest call. That AWS denies it is an answer, too: it may be forbidden.

        If ``TO`` names one queue or topic, ask for that one, so that its absence shows.
        """
        try:
            self._ask("" if "{" in self.to else self.to)
        except Exception as error:  # noqa: BLE001 - the parser of answers raises several kinds
            found = _outcome(error)
            if found is not THROTTLED and not isinstance(found, Denied):
                raise found from None

    def _call(self, entries: list[Entry], last_start: float) -> dict[str, Outcome]:
        """Send one call's entries; return what became of each by its id."""
        ids = [each.given["Id"] for each in entries]
        if monotonic() > last_start:
            return dict.fromkeys(ids, NOT_SENT)
        try:
            answer = self._send(entries[0].to, [each.given for each in entries])
        except Exception as error:  # noqa: BLE001 - of this call alone
            alone = _outcome(error)
            return dict.fromkeys(
                ids, Together(alone) if isinstance(alone, Unrecoverable) else alone
            )
        found = {each["Id"]: None for each in answer.get("Successful", ())}
        for each in answer.get("Failed", ()):
            found[each["Id"]] = meaning(each, "AWS refused the message with")
        # botocore takes a body that is cut off for an answer that names no message.
        kind = Refused if found else BrokerUnavailable
        return {**dict.fromkeys(ids, kind("AWS answered without naming the message.")), **found}

    def _send(self, to: str, entries: list[Any]) -> Any:
        raise NotImplementedError

    def _ask(self, to: str) -> None:
        raise NotImplementedError


class SQS(_Client):
    """Sends to Amazon SQS. ``TO`` is the URL of a queue, or its name in the account's region."""

    service: ClassVar[str] = "sqs"

    def _url(self, to: str) -> str:
        if "://" not in to and to not in self._resolved:
            self._resolved[to] = self._client.get_queue_url(QueueName=to)["QueueUrl"]
        return self._resolved.get(to, to)

    def _send(self, to: str, entries: list[Any]) -> Any:
        return self._client.send_message_batch(QueueUrl=self._url(to), Entries=entries)

    def _ask(self, to: str) -> None:
        if to:
            asked = {"QueueUrl": self._url(to), "AttributeNames": ["QueueArn"]}
            _ = self._client.get_queue_attributes(**asked)["Attributes"]  # none: not AWS's answer
        else:
            self._client.list_queues(MaxResults=1)


class SNS(_Client):
    """Publishes to Amazon SNS. ``TO`` is the ARN of a topic."""

    service: ClassVar[str] = "sns"

    def _send(self, to: str, entries: list[Any]) -> Any:
        return self._client.publish_batch(TopicArn=to, PublishBatchRequestEntries=entries)

    def _ask(self, to: str) -> None:
        if to:
            self._client.get_topic_attributes(TopicArn=to)
        else:
            self._client.list_topics()


class Denied(Refused):
    """The credentials are valid, but do not allow the call."""


class Entry(NamedTuple):
    """One message of a call."""

    to: str
    size: int  # bytes as AWS counts them
    given: dict[str, Any]  # as boto3 takes it


def entry_of(service: str, message: Message) -> Entry:
    """Return what is sent of a message; ``Unrecoverable`` if AWS cannot take it."""
    pattern, expected = DESTINATIONS[service]
    if not pattern.fullmatch(message.to):
        raise Unrecoverable(f"TO is {message.to[:100]!r}; expected {expected}.")
    text = message.body.decode()
    if found := UNSENDABLE.search(text):
        raise Unrecoverable(
            f"The message contains the character U+{ord(found[0]):04X}, which {service.upper()} "
            "does not take."
        )
    attributes = _attributes({**message.headers, "content-type": message.content_type})
    size = len(message.body) + sum(
        len(f"{name}{value}String".encode()) for name, value in attributes.items()
    )
    if size > MAX_MESSAGE:
        raise Unrecoverable(
            f"The message has {size} bytes with its attributes; {service.upper()} takes "
            f"{MAX_MESSAGE}. Store what is large elsewhere and send where it is."
        )
    given: dict[str, Any] = {
        "MessageBody" if service == "sqs" else "Message": text,
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
        },
    }
    if message.to.endswith(".fifo"):
        given["MessageGroupId"] = _token(message.group or message.event_id)
        given["MessageDeduplicationId"] = _token(message.event_id)
    return Entry(to=message.to, size=size, given=given)


def _attributes(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as attributes: ten at most; what does not fit goes into one of them as JSON.

    Neither fit a name that AWS does not allow, nor a value that is empty or not XML.
    """
    fit = [
        name
        for name in dict.fromkeys((*FIRST, *headers))
        if name != REST
        and ATTRIBUTE.fullmatch(name)
        and (value := headers.get(name))
        and not UNSENDABLE.search(value)
    ]
    if len(fit) < len(headers) or len(fit) > MAX_ATTRIBUTES:
        fit = fit[: MAX_ATTRIBUTES - 1]
    found = {name: headers[name] for name in fit}
    if rest := {name: value for name, value in headers.items() if name not in found}:
        found[REST] = json.dumps(rest)
    return found


def _token(value: str) -> str:
    """Return a group or deduplication id: the text itself, or its hash if AWS does not allow it."""
    return value if GROUP.fullmatch(value) else hashlib.sha256(value.encode()).hexdigest()


def grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries of each call: of one destination, ten at most, and 256 KiB."""
    open_calls: dict[str, list[Entry]] = {}
    for entry in entries:
        call = open_calls.setdefault(entry.to, [])
        full = len(call) == MAX_ENTRIES or sum(each.size for each in call) + entry.size > MAX_CALL
        if call and full:
            yield call
            call = open_calls[entry.to] = []
        call.append(entry)
    yield from open_calls.values()


def _outcome(error: Exception) -> Any:
    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return meaning(error.response.get("Error", {}), "AWS answered", status=int(status))
    said = shown(str(error))
    if isinstance(error, exceptions.ParamValidationError):
        return Unrecoverable(said)
    if not isinstance(error, exceptions.BotoCoreError):  # of the parser of answers
        said = f"The endpoint did not answer as AWS does: {type(error).__name__}: {said}"
    # A call that AWS does not answer is not the fault of its messages, though a later one may be
    # answered: the endpoint has come back by then.
    return BrokerUnavailable(said)


def meaning(error: Mapping[str, Any], said: str, *, status: int = 0) -> Any:
    """Return the outcome that an error of AWS, with its code and message, stands for."""
    code = str(error.get("Code", ""))
    text = f"{said} {code}: {shown(error.get('Message') or '')}"
    short = code.rpartition(".")[2].removesuffix("Exception")
    if short in THROTTLING:
        return THROTTLED
    if short in CONTENTS:  # it can never be sent
        return Unrecoverable(text)
    # Without a code, or with the status for one, it is not AWS that answers, or not to the end.
    if status >= 500 or short in CREDENTIALS or not short.strip("0123456789"):
        return BrokerUnavailable(text)
    return Denied(text) if short in ("AccessDenied", "AuthorizationError") else Refused(text)


def shown(text: str) -> str:
    """Return a text of AWS on one line."""
    return " ".join(text.split())[:300]
