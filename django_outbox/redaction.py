"""Hides the passwords, tokens and keys of a relay's settings in whatever is said about the relay.

Clients repeat parts of a URL in their errors: the password, what they took for the port, or the
host. So ``Redaction`` hides each secret whole, decoded, percent-encoded and in parts.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote, quote_plus, unquote

HIDDEN: Final = "***"
# Options whose values are secrets, and names that only seem so: of files, addresses and functions.
SECRET: Final = re.compile(
    r"pass(?:w|phrase|$)|secret|token|seed|credential|access_?key|private|authorization|headers"
    r"|jaas|oauthbearer\.config|\.pem$",
    re.IGNORECASE,
)
NOT_SECRET: Final = re.compile(r"(?:url|location|file|path|cb|provider)$", re.IGNORECASE)
PATH: Final = re.compile(r"[~.]?/\S+")
FIELD: Final = re.compile(r"\{[^{}]*\}")
PARAMETER: Final = re.compile(r"[?&]([^=&#]*)=([^&#]*)")
# The user and the password of a URL; one that is not quoted contains what ends them elsewhere. They
# end at the last @ if what looks like a port is not one.
IN_OPTION: Final = re.compile(r"^(?:[^:/?#@]*://)?(.*)@", re.DOTALL)
IN_URL: Final = re.compile(
    r"(?<=://)(?:[^/?#\s]*@|(?=[^/?#\s]*:(?!\d*(?:[/?#\s]|$)))(?![^/?#\s]*\]).*@)", re.DOTALL
)
QUERY: Final = re.compile(r"(?<=\?).*", re.DOTALL)
SEPARATOR: Final = re.compile(r"%[0-9A-Fa-f]{2}|[@:/#%?&=;,\[\]\s]")  # where a client splits a URL
WHOLE: Final = 4  # characters; a shorter secret is hidden as a word by itself only
PART: Final = 6  # characters of a secret that are hidden wherever they are

AnyError = TypeVar("AnyError", bound=BaseException)


def without_secrets(url: str) -> str:
    """Return a text without the user, the password and the query of the URL that it may be."""
    shown = IN_URL.sub(f"{HIDDEN}@", url)
    return QUERY.sub(HIDDEN, shown) if "://" in shown else shown


class Redaction:
    """The secrets of one relay: those of its options, and of the URL it sends to."""

    def __init__(self, options: Mapping[str, Any], to: str = "") -> None:
        found = {
            *_of_options(options),
            *(part for each in _of_url(to) for part in FIELD.split(each)),
        }
        spelled = {spelling for each in found for spelling in _spellings(each)}
        words = spelled | {part for each in spelled for part in SEPARATOR.split(each)}
        patterns = [_pattern(each) for each in sorted(words, key=len, reverse=True) if each]
        self._words = re.compile("|".join(patterns), re.IGNORECASE) if patterns else None
        self._parts = {
            each[at : at + PART]
            for each in map(str.lower, spelled)
            for at in range(len(each) - PART + 1)
        }

    def text(self, text: str) -> str:
        """Return a text with each secret, and each part of one, replaced by ``***``."""
        if self._words is None:
            return text
        hidden = bytearray(len(text))
        for match in self._words.finditer(text):
            hidden[match.start() : match.end()] = b"\1" * len(match[0])
        lower = text.lower()
        if len(lower) == len(text):
            for at in range(len(text) - PART + 1):
                if lower[at : at + PART] in self._parts:
                    hidden[at : at + PART] = b"\1" * PART
        shown = (
            char if not is_hidden else "\0" for char, is_hidden in zip(text, hidden, strict=True)
        )
        return re.sub("\0+", HIDDEN, "".join(shown)) if any(hidden) else text

    def error(self, error: AnyError) -> AnyError:
        """Return an error in which no secret can be read; the same one if there is none in it.

        Otherwise it is of the same class, as far as ``isinstance`` sees, without cause and notes.
        """
        shown = "".join(traceback.format_exception(type(error), error, None)) + repr(error)
        if self._words is None or all(self.text(each) == each for each in (shown, str(error))):
            return error
        cls, text = type(error), self.text(str(error))
        members: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__str__": lambda self: text,
            "__repr__": lambda self: f"{cls.__name__}({text!r})",
        }
        made: Any = type(cls.__name__, (cls,), members)
        copy: AnyError = made.__new__(made)  # its class may not be made of a text alone
        copy.__dict__.update(error.__dict__)
        copy.__dict__.pop("__notes__", None)
        return copy.with_traceback(error.__traceback__)


def _of_options(options: Mapping[str, Any], is_secret: bool = False) -> Iterator[str]:
    for name, value in options.items():
        hides = is_secret or bool(SECRET.search(str(name)) and not NOT_SECRET.search(str(name)))
        yield from _of_value(value, hides)


def _of_value(value: Any, is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _of_options(value, is_secret)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _of_value(each, is_secret)
    elif isinstance(value, bytes):
        yield from _of_value(value.decode("utf-8", "replace"), is_secret)
    elif isinstance(value, str):
        if is_secret and not PATH.fullmatch(value):
            yield value
        match = IN_OPTION.match(value)
        if match and ("://" in value or ":" in match[1]):
            yield _of_user(match[1])
        for name, given in PARAMETER.findall(value):
            if SECRET.search(name) and not NOT_SECRET.search(name):
                yield given


def _of_url(url: str) -> Iterator[str]:
    if "://" in url:
        if match := IN_URL.search(url):
            yield _of_user(match[0][:-1])
        for _, value in PARAMETER.findall(url):
            yield value


def _of_user(text: str) -> str:
    """Return the secret of a URL's user and password; a user without a password is a token."""
    user, colon, password = text.partition(":")
    return password if colon else user


def _spellings(secret: str) -> Iterable[str]:
    plain = unquote(secret)
    for each in {secret, plain}:
        yield from (each, quote(each, safe=""), quote(each), quote_plus(each), repr(each)[1:-1])


def _pattern(word: str) -> str:
    text = re.escape(word)
    if len(word) >= WHOLE:
        return text
    return rf"(?<!\w){text}(?!\w)" if len(word) > 1 else rf"(?<=['\"]){text}(?=['\"])"
