"""What is sent to a webhook, and what its answer means: address, headers, signature, status."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from ..exceptions import RetryAfter, Unrecoverable
from ..listeners.outcomes import Dead
from .backend import Message, Outcome, Refused
from .envelope import encoded, expect_header

A_DAY: Final = 86_400.0  # seconds; a receiver cannot put an event off for longer
ANSWER_SHOWN: Final = 200  # characters of an answer in an error
# A name in IDNA, whose labels have 1 to 63 characters, or an address.
HOST: Final = re.compile(
    rb"(?=.{1,254}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+"
)
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # what no header's value may contain


def url_of(to: str, *, allow_http: bool) -> httpx.URL:
    """Return where a URL leads; ``Unrecoverable`` if it is not one that webhooks may have."""
    try:
        url = httpx.URL(to)
    except (httpx.InvalidURL, ValueError) as error:
        raise Unrecoverable(f"TO is not a valid URL: {error}.") from None
    if url.scheme != "https" and not (allow_http and url.scheme == "http"):
        raise Unrecoverable(
            f"TO is a URL with {url.scheme or 'no scheme'}; expected https. To allow http, set the "
            "option allow_http."
        )
    if url.userinfo:
        raise Unrecoverable("TO is a URL with a user name or password; expected one without.")
    if not url.host:
        raise Unrecoverable("TO is a URL without a host; expected https://host/path.")
    if not HOST.fullmatch(url.raw_host) or not 0 < (url.port or 1) < 65_536:
        raise Unrecoverable(
            f"TO is not a valid URL: its host and port are {url.netloc.decode()[-80:]!r}."
        )
    if to.count("://") > 1:
        # `quote` lets a field that is a whole URL pass; it must not become a part of another.
        raise Unrecoverable("TO has a URL inside a URL; expected '://' only once.")
    return url


def origin_of(url: httpx.URL) -> str:
    """Return host and port, the host in lower case."""
    return f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}"


def headers_of(message: Message) -> dict[str, bytes]:
    """Return the headers of a message as they are sent; ``Unrecoverable`` if one cannot be.

    Later headers win over earlier ones whose name differs in case only: a relay's own come last.
    """
    found = {"content-type": message.content_type.encode("ascii"), "webhook-id": _id_of(message)}
    for given, value in message.headers.items():
        name = given.lower()
        text = encoded(value) if name.startswith("ce-") else value.strip(" \t")
        expect_header(given, text, CONTROL)
        found[name] = text.encode()
    return found


def _id_of(message: Message) -> bytes:
    if not message.event_id.isascii() or CONTROL.search(message.event_id):
        raise Unrecoverable(
            f"The event id {message.event_id!r} is not ASCII; the header webhook-id has to be."
        )
    return message.event_id.encode("ascii")


# --- signatures ----------------------------------------------------------------------------------

Keys = tuple[bytes, ...]
Headers = list[tuple[bytes, bytes]]


def keys_of(secret: Any) -> Keys:
    """Return the keys of one secret or several; ``ValueError`` never shows them."""
    several = [secret] if isinstance(secret, str) else secret
    if not isinstance(several, Sequence) or not several:
        raise ValueError(
            f"secret is of type {type(secret).__name__}; expected a str such as 'whsec_…', a list "
            "of them, or a dict of them by host."
        )
    return tuple(map(_key_of, several))


def _key_of(secret: Any) -> bytes:
    if isinstance(secret, str):
        encoded = secret.removeprefix("whsec_")
        try:
            key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if 24 <= len(key) <= 64:
            return key
    raise ValueError("secret is not valid; expected 'whsec_' and 24 to 64 bytes in base64.")


def secrets_of(secret: Any) -> Keys | dict[str, Keys] | None:
    """Return the keys that the option ``secret`` names: for all hosts, or by host."""
    if secret is None:
        return None
    if isinstance(secret, Mapping):
        return {str(host).lower(): keys_of(each) for host, each in secret.items()}
    return keys_of(secret)


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent for one message."""

    url: httpx.URL
    body: bytes
    headers: Mapping[str, bytes]
    keys: Keys | None

    def signed(self) -> Headers:
        """Return all headers; as Standard Webhooks say, with a signature for each key."""
        moment = str(int(time.time())).encode()
        found = {
            **self.headers,
            "host": self.url.netloc,
            "user-agent": b"django-outbox",
            "accept-encoding": b"identity",
            "content-length": str(len(self.body)).encode(),
            "webhook-timestamp": moment,
        }
        if self.keys:
            text = b"%b.%b.%b" % (self.headers["webhook-id"], moment, self.body)
            each = (base64.b64encode(hmac.digest(key, text, hashlib.sha256)) for key in self.keys)
            found["webhook-signature"] = b" ".join(b"v1," + signature for signature in each)
        return [(name.encode(), value) for name, value in found.items()]


# --- answers -------------------------------------------------------------------------------------


def outcome_of(status: int, retry_after: float, text: str, origin: str) -> Outcome:
    """Return what an answer means for its message. 503 is not asked: it is about the host."""
    if 200 <= status < 300:
        return None
    said = f"{origin} answered {status}{f': {text}' if text else '.'}"
    if status == 410:
        return Dead(f"{said} (the receiver is gone for good)")
    if status == 429 and retry_after:
        return RetryAfter(retry_after, said)
    if 300 <= status < 400:
        return Refused(f"{origin} answered {status}, a redirect, which is not followed.")
    return Refused(said)


def seconds_of(retry_after: bytes) -> float:
    """Read the header Retry-After, which is a number of seconds or a date; 0: it says nothing."""
    text = retry_after.decode("latin-1").strip()
    try:
        if text.isascii() and text.isdecimal():
            wait = float(text)
        else:
            wait = parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(wait, 0.0), A_DAY)


def shown(body: bytes) -> str:
    """Return the beginning of an answer as one line of text."""
    text = body[: 4 * ANSWER_SHOWN].decode("utf-8", "replace")
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[
        :ANSWER_SHOWN
    ]
