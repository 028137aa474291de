"""What a person types after an option: durations, instants, counts; and what the commands share."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from django.db import connections
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.timezone import is_naive, make_aware

from ..conf import CENTURY

INTERRUPTED: Final = 130  # exit code, as a shell says of Ctrl-C
LOOPBACK: Final = "127.0.0.1"
UNITS: Final = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
DURATION: Final = re.compile("".join(rf"(?:{NUMBER}{unit})?" for unit in UNITS))


def duration(text: str) -> float:
    """Return the seconds of ``7d``, ``90m``, ``1h30m``, ``45s`` or a plain number of seconds.

    Raises ``ArgumentTypeError`` for anything else, and beyond a century, where databases end.
    """
    given = text.strip().lower()
    if re.fullmatch(NUMBER, given):
        seconds = float(given)
    elif given and (found := DURATION.fullmatch(given)):
        parts = zip(found.groups(), UNITS.values(), strict=True)
        seconds = sum(float(count) * unit for count, unit in parts if count)
    else:
        raise ArgumentTypeError(
            f"{text!r} is no duration; expected something like 7d, 90m, 1h30m, 45s, or plain "
            "seconds (units w, d, h, m, s; the larger first)."
        )
    if seconds > CENTURY:
        raise ArgumentTypeError(f"{text!r} is more than a century; expected less.")
    return seconds


def pause(text: str) -> float:
    """A duration above zero."""
    if not (seconds := duration(text)):
        raise ArgumentTypeError(f"{text!r} is nothing; expected a duration above zero.")
    return seconds


def instant(text: str) -> datetime | timedelta:
    """Return an aware instant, or how long ago it was: ``2026-03-01T08:30``, ``2h``.

    One without an offset is in ``TIME_ZONE``. How long ago is by the database's clock, so whoever
    has one makes an instant of it.
    """
    try:
        day, found = parse_date(text), parse_datetime(text)
    except ValueError as error:  # the form is right, the day is not in the calendar
        raise ArgumentTypeError(f"{text!r} is no instant: {error}.") from error
    if found is None and day is not None:
        found = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - made aware below
    if found is not None:
        return make_aware(found) if is_naive(found) else found
    try:
        return timedelta(seconds=duration(text))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            f"{text!r} is no instant; expected 2026-03-01, 2026-03-01T08:30 (with an offset if it "
            "is not in TIME_ZONE), or how long ago it was: 2h, 7d."
        ) from error


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is no count; expected a whole number of at least 1.")
    return int(text)


def limit(text: str) -> int:
    """A whole number of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"{text!r} is no limit; expected a whole number of at least 0.")
    return int(text)


def address(text: str) -> tuple[str, int]:
    """Return host and port of ``8001``, ``0.0.0.0:8001`` or ``[::]:8001``; loopback by default.

    As with ``runserver`` a port alone is not reached from other hosts.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535 and not text.startswith(":")):
        raise ArgumentTypeError(
            f"{text!r} is no address; expected a port, as in 8001, or an address of this host and "
            "a port, as in 0.0.0.0:8001 (every interface) or [::1]:8001."
        )
    return host.strip("[]") or LOOPBACK, int(port)


def add_databases(parser: ArgumentParser, verb: str) -> None:
    """Give a command ``--database``, which may be repeated."""
    parser.add_argument(
        "--database", action="append", dest="databases", metavar="ALIAS",
        choices=tuple(connections), help=f"alias to {verb}; may be repeated; default: the router's",
    )  # fmt: skip


def add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=("table", "json"), default="table",
        help="for people or for programs (default: table)",
    )  # fmt: skip


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Set rows of text in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
