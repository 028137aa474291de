"""Values on a command line (durations, instants, counts), and options that commands share."""

from __future__ import annotations

import getpass
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.db import connections, router
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware

from ..events import spellings
from ..inspection.causes import DIGEST_LENGTH, find_cause
from ..models import OutboxEvent, OutboxQuerySet, missing_table, replay
from ..queue_settings import is_rate
from ..setting_rules import CENTURY

BATCH_SIZE: Final = replay.BATCH_SIZE  # events that a command changes in a transaction
UNFIT: Final = re.compile("[\x00\ud800-\udfff]")  # NUL, and bytes that are not UTF-8
UNITS: Final = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}  # seconds
NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
DURATION: Final = re.compile("".join(rf"(?:{NUMBER}{unit})?" for unit in UNITS))


def _expect(is_good: object, text: str, what: str) -> None:
    if not is_good:
        raise ArgumentTypeError(f"{text!r} is not {what}.")


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
        found = parse_datetime(text)
    except ValueError as error:  # well formed, but not in the calendar
        raise ArgumentTypeError(f"{text!r} is not an instant: {error}.") from error
    if found is not None:
        return make_aware(found) if is_naive(found) else found
    try:
        return timedelta(seconds=retention(text))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            f"{text!r} is not an instant; expected 2026-03-01, 2026-03-01T08:30 (with an offset if "
            "it is not in TIME_ZONE), or how long ago it was: 2h, 7d."
        ) from error


def whole(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least ``least``."""

    def parse(text: str) -> int:
        is_good = text.isascii() and text.isdigit() and int(text) >= least
        _expect(is_good, text, f"a count; expected a whole number of at least {least}")
        return int(text)

    return parse


positive_int, non_negative_int = whole(1), whole(0)


def share(text: str) -> float:
    """Return a share from 0 to 1, given in percent: ``10``, ``0.5`` or ``10%``."""
    given = text.strip().removesuffix("%").strip()
    is_good = re.fullmatch(NUMBER, given) and float(given) <= 100
    _expect(is_good, text, "a percentage; expected a number from 0 to 100")
    return float(given) / 100


def rate(text: str) -> str:
    """Return a rate such as ``50/s``, ``100/m`` or ``10/h``."""
    _expect(is_rate(text), text, "a rate; expected, for example, 50/s, 100/m, 10/h")
    return text


# -- options that commands share -------------------------------------------------------------------

# By option: its help text if it has no value; else type, metavar and help text.
Options = Mapping[str, str | tuple[Any, str, str]]


def add_options(parser: Any, options: Options) -> None:
    for option, given in options.items():
        if isinstance(given, str):
            parser.add_argument(option, action="store_true", help=given)
        else:
            kind, metavar, text = given
            parser.add_argument(option, type=kind, metavar=metavar, help=text)


def add_many(parser: ArgumentParser, option: str, dest: str, metavar: str, text: str) -> None:
    """Add an option that may be repeated; without it the value is ``[]``."""
    add, text = parser.add_argument, f"{text}; may be repeated"
    add(option, action="append", dest=dest, metavar=metavar, default=[], help=text)


def add_databases(parser: ArgumentParser, verb: str) -> None:
    """Add ``--database`` to a command; the option may be repeated."""
    text, known = f"alias to {verb}; default: the router's", tuple(connections)
    add = parser.add_argument
    add("--database", action="append", dest="databases", metavar="ALIAS", choices=known, help=text)


def chosen_aliases(options: dict[str, Any]) -> list[str]:
    """Return each alias that was given once, or the router's."""
    return [*dict.fromkeys(options["databases"] or [router.db_for_write(OutboxEvent)])]


def add_database(parser: ArgumentParser) -> None:
    text, known = "alias; default: the router's", tuple(connections)
    parser.add_argument("--database", metavar="ALIAS", choices=known, help=text)


def chosen_alias(options: dict[str, Any]) -> str:
    """Return the alias that was given, or the router's.

    Raises ``CommandError`` if it has no tables, or if no database takes the text of an option.
    """
    for value in options.values():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and UNFIT.search(text):
                raise CommandError(f"{text!r} is not text in UTF-8 without NUL.")
    alias = options["database"] or router.db_for_write(OutboxEvent)
    if missing := missing_table(alias):
        raise CommandError(missing)
    return str(alias)


def add_by(parser: ArgumentParser, verb: str) -> None:
    text = f"name of the person who {verb} (default: the system user)"
    add_options(parser, {"--by": (str, "NAME", text)})


def person(options: dict[str, Any]) -> str:
    """Return the name that was given with ``--by``, or the system user's; "" if it has none."""
    if (name := options["by"]) is not None:
        return str(name)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def add_format(parser: ArgumentParser) -> None:
    text = "for people or for programs (default: table)"
    parser.add_argument("--format", choices=("table", "json"), default="table", help=text)


# -- options that choose dead events ---------------------------------------------------------------


def cause(text: str) -> str:
    """Return the name of a cause; ``ArgumentTypeError`` if it cannot be one."""
    expected = f"a cause; expected {DIGEST_LENGTH} characters from the last column of outbox_dead"
    _expect(re.fullmatch(f"[0-9a-f]{{{DIGEST_LENGTH}}}", text), text, f"{expected} list")
    return text


# By lookup, which is the name of the option's value: option, metavar and help text.
LOOKUPS: Final = {
    "listener": ("--listener", "TITLE", "for the listener with this title"),
    "aggregate_type": ("--aggregate-type", "TYPE", "of objects of this type, such as shop.order"),
    "aggregate_id": ("--aggregate-id", "ID", "of the object with this id"),
    "tenant_id": ("--tenant", "ID", "of this tenant"),
    "stream__of_key": ("--key", "KEY", "of the stream with this key"),
    "last_error__begins_with": (
        "--error",
        "TEXT",
        "whose last error begins with this, as its class does",
    ),
}
FILTERS: Final[Options] = {
    "--cause": (cause, "CAUSE", "of this cause, as outbox_dead list names it"),
    "--since": (instant, "TIME", "that died since then: 2026-03-01T08:30, 2h"),
    "--until": (instant, "TIME", "that died before then"),
}
IDS: Final = "ids of events, which mean all their deliveries, or of single deliveries"
TIMES: Final = {"since": "gte", "until": "lt"}  # by name of the option's value


def add_filters(parser: ArgumentParser) -> None:
    """Add the filters, all of which an event must match."""
    add_many(parser, "--event-type", "event_type__in", "TYPE", "of this type")
    for name, (option, metavar, text) in LOOKUPS.items():
        parser.add_argument(option, dest=name, metavar=metavar, help=text)
    add_options(parser, FILTERS)


def add_choice(parser: ArgumentParser, verb: str) -> None:
    """Add ids, ``--all`` and the filters, of which ``check_choice`` requires one."""
    add_ids(parser, verb, nargs="*")
    add_options(parser, {"--all": "every dead event"})
    add_filters(parser)


def add_ids(parser: Any, verb: str, *, nargs: str = "+") -> None:
    parser.add_argument("ids", nargs=nargs, metavar="EVENT_ID", help=f"what to {verb}: {IDS}")


def is_filtered(options: dict[str, Any]) -> bool:
    """Return whether the options choose events by more than their cause."""
    names = ("ids", "event_type__in", *LOOKUPS, *TIMES)
    return any(options.get(name) not in (None, []) for name in names)


def check_choice(options: dict[str, Any]) -> None:
    """Raise ``CommandError`` unless events are chosen: a forgotten filter must not mean all."""
    is_chosen = is_filtered(options) or options["cause"] is not None
    if not is_chosen and not options["all"]:
        raise CommandError("Expected ids, a filter, or --all for every dead event.")
    if is_chosen and options["all"]:
        raise CommandError("--all cannot be combined with ids or filters.")


def filtered(
    rows: OutboxQuerySet, options: dict[str, Any], now: datetime, *, at: str = "done_at"
) -> OutboxQuerySet:
    """Return the events that match ids and filters but ``--cause``; ``now``: the database's.

    ``at`` is the column that is compared with ``--since`` and ``--until``. Raises ``CommandError``
    if no time is between them.
    """
    if ids := options.get("ids"):
        rows = rows.with_ids(ids)
    for name in ("event_type__in", *LOOKUPS):
        if (value := options[name]) not in (None, []):
            rows = rows.filter(**{name: value})
    times = {
        name: now - value if isinstance(value, timedelta) else value
        for name in TIMES
        if (value := options[name]) is not None
    }
    if len(times) > 1 and times["since"] >= times["until"]:
        raise CommandError(
            f"--since is {times['since']}; expected a time before --until, {times['until']}."
        )
    return rows.filter(**{f"{at}__{TIMES[name]}": time for name, time in times.items()})


def dead(rows: OutboxQuerySet, options: dict[str, Any], now: datetime) -> OutboxQuerySet:
    """Return the dead events that match ids, filters and ``--cause``."""
    chosen = filtered(rows, options, now).dead()
    if options["cause"] is None:
        return chosen
    found = find_cause(rows.db, options["cause"])
    return chosen.none() if found is None else chosen.filter(found.condition)


def naming_none(ids: Iterable[str], rows: OutboxQuerySet) -> list[str]:
    """Return those of the ids that name none of these rows."""
    named = {each for pair in rows.values_list("pk", "event_id") for each in pair} if ids else set()
    return [each for each in dict.fromkeys(ids) if named.isdisjoint(spellings(each))]


def unknown_ids(ids: Iterable[str]) -> str:
    return f"Unknown: {', '.join(ids)}. Expected ids of stored events."


def summary(verb: str, count: int, left: Sequence[str], more: str = "") -> str:
    """Return how many deliveries were changed; ``left``: ids that name none of them.

    Raises ``CommandError`` if ids were given and none was changed.
    """
    others = f"; {len(left)} of the given ids are unknown or not dead" if left else ""
    if others and not count:
        raise CommandError(f"{verb} 0{others}")
    return f"{verb} {count}{more}{others}"
