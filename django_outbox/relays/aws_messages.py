"""What is sent to SQS and SNS: an entry of a call for each message; and what their errors mean."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..exceptions import BrokerUnavailable, Unrecoverable
from ..listeners.outcomes import Defer
from .backend import Message, Refused

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
DENIED: Final = frozenset(("AccessDenied", "AuthorizationError"))
# The credentials are at fault, so AWS takes nothing at all until they are replaced.
CREDENTIALS: Final = frozenset(
    "AuthFailure ExpiredToken IncompleteSignature InvalidAccessKeyId InvalidClientTokenId "
    "InvalidSecurity MissingAuthenticationToken OptInRequired RequestExpired "
    "SignatureDoesNotMatch UnrecognizedClient RequestTimeTooSkewed InvalidSignature".split()
)


class Denied(Refused):
    """The credentials are valid, but do not allow the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
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
        len(name.encode()) + len(value.encode()) + len("String")
        for name, value in attributes.items()
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
    order = [name for name in FIRST if name in headers]
    order += [name for name in headers if name not in FIRST]
    fit = [
        name
        for name in order
        if name != REST
        and ATTRIBUTE.fullmatch(name)
        and headers[name]
        and not UNSENDABLE.search(headers[name])
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
    return Denied(text) if short in DENIED else Refused(text)


def shown(text: str) -> str:
    """Return a text of AWS on one line."""
    return " ".join(text.split())[:300]
