"""Parse command-line values (durations, instants, counts), and add options that commands share."""

from __future__ import annotations

import getpass
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.timezone import is_naive, make_aware

from ..conf import CENTURY
from ..queue_settings import is_rate

INTERRUPTED: Final = 130  # exit code, as shells report Ctrl-C
LOOPBACK: Final = "127.0.0.1"
UNITS: Final = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
DURATION: Final = re.compile("".join(rf"(?:{NUMBER}{unit})?" for unit in UNITS))


def duration(text: str) -> float:
    """Return the seconds of ``7d``, ``90m``, ``1h30m``, ``45s`` or a plain number of seconds.

    Raises ``ArgumentTypeError`` for anything else, and beyond a century, the databases' limit.
    """
    given = text.strip().lower()
    if re.fullmatch(NUMBER, given):
        seconds = float(given)
    elif given and (found := DURATION.fullmatch(given)):
        parts = zip(found.groups(), UNITS.values(), strict=True)
        seconds = sum(float(count) * unit for count, unit in parts if count)
    else:
        raise ArgumentTypeError(
            f"{text!r} is not a duration; expected something like 7d, 90m, 1h30m, 45s, or plain "
            "seconds (units w, d, h, m, s; the larger first)."
        )
    if seconds > CENTURY:
        raise ArgumentTypeError(f"{text!r} is more than a century; expected less.")
    return seconds


def retention(text: str) -> float:
    """Return the seconds of a duration that has a unit, or of ``0``.

    Raises ``ArgumentTypeError`` for a plain number, which may have been meant as days.
    """
    seconds, given = duration(text), text.strip()
    if seconds and re.fullmatch(NUMBER, given):
        raise ArgumentTypeError(
            f"{text!r} has no unit; expected, for example, {given}d or {given}s."
        )
    return seconds


def positive_duration(text: str) -> float:
    """Return the seconds of a duration above zero."""
    if not (seconds := duration(text)):
        raise ArgumentTypeError(f"{text!r} is nothing; expected a duration above zero.")
    return seconds


def instant(text: str) -> datetime | timedelta:
    """Return an aware instant, or how long ago it was: ``2026-03-01T08:30``, ``2h``.

    An instant without an offset is in ``TIME_ZONE``. "How long ago" is relative to the database's
    clock, so the caller converts it to an instant.
    """
    try:
        day, found = parse_date(text), parse_datetime(text)
    except ValueError as error:  # well formed, but not in the calendar
        raise ArgumentTypeError(f"{text!r} is not an instant: {error}.") from error
    if found is None and day is not None:
        found = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - made aware below
    if found is not None:
        return make_aware(found) if is_naive(found) else found
    try:
        return timedelta(seconds=retention(text))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            f"{text!r} is not an instant; expected 2026-03-01, 2026-03-01T08:30 (with an offset if "
            "it is not in TIME_ZONE), or how long ago it was: 2h, 7d."
        ) from error


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is not a count; expected a whole number of at least 1.")
    return int(text)


def non_negative_int(text: str) -> int:
    """Return a whole number of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"{text!r} is not a limit; expected a whole number of at least 0.")
    return int(text)


def share(text: str) -> float:
    """Return a share from 0 to 1, given in percent: ``10``, ``0.5`` or ``10%``."""
    given = text.strip().removesuffix("%").strip()
    if not re.fullmatch(NUMBER, given) or float(given) > 100:
        raise ArgumentTypeError(f"{text!r} is not a percentage; expected a number from 0 to 100.")
    return float(given) / 100


def rate(text: str) -> str:
    """Return a rate such as ``50/s``, ``100/m`` or ``10/h``."""
    if not is_rate(text):
        raise ArgumentTypeError(
            f"{text!r} is not a rate; expected, for example, 50/s, 100/m, 10/h."
        )
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of ``8001``, ``0.0.0.0:8001`` or ``[::]:8001``; loopback by default.

    As with ``runserver``, other hosts cannot reach a port given without a host.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535 and not text.startswith(":")):
        raise ArgumentTypeError(
            f"{text!r} is not an address; expected a port, as in 8001, or an address of this host "
            "and a port, as in 0.0.0.0:8001 (every interface) or [::1]:8001."
        )
    return host.strip("[]") or LOOPBACK, int(port)


def add_databases(parser: ArgumentParser, verb: str) -> None:
    """Add ``--database`` to a command; the option may be repeated."""
    parser.add_argument(
        "--database",
        action="append",
        dest="databases",
        metavar="ALIAS",
        choices=tuple(connections),
        help=f"alias to {verb}; may be repeated; default: the router's",
    )


def add_by(parser: ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "--by", metavar="NAME", help=f"name of the person who {verb} (default: the system user)"
    )


def person(options: dict[str, Any]) -> str:
    """Return the name that was given with ``--by``, or the system user's; "" if it has none."""
    if (name := options["by"]) is not None:
        return str(name)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="for people or for programs (default: table)",
    )


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of text as lines, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
