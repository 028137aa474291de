"""The history of an event: its newest failed calls, lost workers and replays, kept in its row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

LENGTH: Final = 10  # entries that are kept, the newest
ERROR_LENGTH: Final = 300  # characters of the first line of an error that an entry keeps

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
