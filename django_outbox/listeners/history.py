"""What a row keeps of its errors: the cause, and its newest failed calls and lost workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

LENGTH: Final = 10  # entries that are kept, the newest
ERROR_LENGTH: Final = 300  # characters of the first line of an error that an entry keeps
READ_LENGTH: Final = 500  # characters of an error that are read
CAUSE_LENGTH: Final = 200  # characters of a normalised error, at most; of the column ``cause``

# Numbers and ids, with the letters that may belong to a hexadecimal id.
IDS: Final = re.compile("[0-9a-f]*[0-9][0-9a-fA-Zx]*", re.ASCII)
# A quoted text; an apostrophe inside a word does not end it, the end of the text does.
QUOTED: Final = re.compile(
    r"""(?<!\w)[bBrRuU]?(?:'([^']*(?:'(?=\w)[^']*)*)(?:'|\Z)|"([^"]*(?:"(?=\w)[^"]*)*)(?:"|\Z))"""
)
# Names in code, host names and URLs stay in their quotes, because they tell causes apart.
NAME: Final = re.compile(
    r"[A-Za-z_][A-Za-z_.-]*|[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}(?::0+)?|https?://\S*"
)
# Also a status, such as '503 Service Unavailable'.
SENTENCE: Final = re.compile(r"(?:\S+ +){3,}\S+ *|0(?: [A-Z][A-Za-z]*)+")
QUERY: Final = re.compile(r"""\?[\w.%~-]+=[^\s'"<>)]*""")  # of a URL
UUID: Final = re.compile(r"(?:0|[a-f]{8})(?:-(?:0|[a-f]{4})){3}-(?:0|[a-f]{12})")
NUMBER: Final = re.compile(r"0+(?:[.,-]0+)*")
LIST: Final = re.compile(r"#(?:[,;] ?#)+")

Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A failed call, a lost worker or a replay."""

    at: Instant  # by the database's clock
    kind: Literal["failed", "dead", "lost", "replayed"]
    number: int = 0  # of the call, or of the lost worker
    by: str = ""  # the worker, or who replayed
    listener: str = ""  # its title; "" if none was called
    milliseconds: int | None = None  # in the listener
    error: str = ""  # class and first line, as ``last_error`` begins


_decoder = msgspec.json.Decoder(list[Entry])


def entries(text: str | None) -> list[Entry]:
    """Return the entries of the column, oldest first; none if it is damaged."""
    try:
        return _decoder.decode(text or "[]")[-LENGTH:]
    except (msgspec.MsgspecError, UnicodeError):
        return []


def with_entries(text: str | None, new: Iterable[Entry]) -> str:
    """Return the column's text with further entries; the oldest are dropped."""
    return _encode([*entries(text), *new][-LENGTH:])


def addition(entry: Entry) -> tuple[str, str]:
    """Return the column's text with this entry alone, and what a statement adds to other texts.

    The latter replaces the bracket at the text's end, so that nothing needs to be read.
    """
    text = _encode([entry])
    return text, f",{text[1:]}"


def first_line(error: str | None) -> str:
    """Return as much of an error as an entry keeps."""
    return (error or "").partition("\n")[0][:ERROR_LENGTH]


def _encode(found: list[Entry]) -> str:
    """Return JSON in ASCII, which every database can store."""
    return json.dumps(msgspec.to_builtins(found))


def normalised(text: str | None) -> str:
    """Return the first line of an error with ``#`` in place of numbers, ids and quoted values.

    Equal results mean the same cause. Quoted names, such as of an attribute or a host, stay, and
    so do quoted sentences.

    Example::

        assert normalised("ValueError: order 17 of 'Ann Lee'") == "ValueError: order # of #"
    """
    line = IDS.sub("0", (text or "")[:READ_LENGTH].partition("\n")[0])
    line = UUID.sub("#", QUERY.sub("?#", _without_values(line)))
    return LIST.sub("#", NUMBER.sub("#", line))[:CAUSE_LENGTH].strip()


def error_class(text: str | None) -> str:
    """Return the part before the message: ``ValueError`` for ``ValueError: no``."""
    return (text or "").partition("\n")[0].partition(":")[0].strip()


def _without_values(line: str) -> str:
    return QUOTED.sub(_quoted, line)


def _quoted(found: re.Match[str]) -> str:
    inner = found[1] if found[1] is not None else found[2]
    if NAME.fullmatch(inner):
        return found[0]
    return f'"{_without_values(inner)}"' if SENTENCE.fullmatch(inner) else "#"
