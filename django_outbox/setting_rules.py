"""Rules for the values of settings: each returns what was expected, or None if the value fits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from string import Formatter
from typing import Any, Final

from .queue_settings import FIELDS, FORMATS, MAX_BATCH, NAME, RELAY_NAME, is_rate
from .redaction import without_secrets

CENTURY = 36_525 * 86400.0  # seconds; longer delays overflow some database's calendar
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")  # PostgreSQL's 63 less our longest name
# str.format takes a name of digits for an index.
HEADER: Final = re.compile(r"headers\[(?!\d+\])[^\[\]]+\]")
TYPE_LENGTH: Final = 128  # characters, as in the table

Rule = Callable[[Any], str | None]


def number(
    least: float,
    *,
    most: float = CENTURY,
    above: bool = False,
    optional: bool = False,
    kind: Any = (int, float),
) -> Rule:
    """Return a rule for a number (never a bool): at least ``least``, or more with ``above``."""
    limit = {CENTURY: ", at most a century of seconds", inf: ""}.get(most, f", at most {most:g}")
    expected = (
        f"a {'whole ' * (kind is int)}number {'above' if above else 'of at least'} {least:g}{limit}"
        f"{', or None' * optional}"
    )

    def rule(value: Any) -> str | None:
        if value is None and optional:
            return None
        good = isinstance(value, kind) and not isinstance(value, bool)
        good = good and least <= value <= most and not (above and value == least)
        return None if good else expected

    return rule


integer = partial(number, most=inf, kind=int)


def one_of(*choices: str) -> Rule:
    return lambda value: None if value in choices else f"one of {', '.join(choices)}"


def module(value: Any) -> str | None:
    good = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
    return None if good else "the name of a module"


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def identifier(value: Any) -> str | None:
    good = value in ("", None) or (isinstance(value, str) and IDENTIFIER.fullmatch(value))
    return None if good else "a plain identifier (letters, digits, underscores; 40 characters)"


def paths(value: Any) -> str | None:
    good = isinstance(value, (list, tuple)) and all(isinstance(path, str) for path in value)
    return None if good else "a list of dotted paths"


def weights(value: Any) -> str | None:
    good = isinstance(value, (list, tuple)) and len(value) == 2 and not any(map(integer(1), value))
    return None if good else "a pair of whole numbers (hot, cold), each at least 1"


def doorbell(value: Any) -> str | None:
    good = value is None or isinstance(value, str) or (isinstance(value, dict) and "kind" in value)
    return None if good else 'a str, a dict with "kind", or None'


def anything(value: Any) -> str | None:
    return None


def queues(value: Any) -> str | None:
    """Return what was expected of ``OUTBOX["QUEUES"]``."""
    return _of_each("queue", value, NAME, "1 to 64 letters, digits, '_', '.' or '-'", _QUEUE_RULES)


def relays(value: Any) -> str | None:
    """Return what was expected of ``OUTBOX["RELAYS"]``; it quotes nothing that may be secret."""
    if fault := _of_each(
        "relay", value, RELAY_NAME, "1 to 50 letters, digits, '_' or '-'", _RELAY_RULES
    ):
        return fault
    for name, own in (value or {}).items():
        for key in ("BACKEND", "EVENTS"):
            if key not in own:
                return f"{key} for the relay {name!r}"
    return None


def _of_each(
    what: str, value: Any, names: re.Pattern[str], characters: str, rules: Mapping[str, Rule]
) -> str | None:
    """Return what was expected of a dict with the settings of each queue, or relay, by its name."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return f"a dict with the settings of each {what} by its name, or None"
    for name, own in value.items():
        if not isinstance(name, str) or not names.fullmatch(name):
            return f"names of {characters}, but not {name!r}"
        if not isinstance(own, Mapping):
            return f"a dict of settings for the {what} {name!r}, but not {type(own).__name__}"
        if expected := _of_dict(own, rules):
            return f"for the {what} {name!r} {expected}"
    return None


def _of_dict(own: Mapping[Any, Any], rules: Mapping[str, Rule]) -> str | None:
    """Return what was expected; a rule that says "but" has quoted of the value what may be seen."""
    for key, value in own.items():
        if key not in rules:
            near = difflib.get_close_matches(str(key).upper(), rules, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            return f"only {', '.join(rules)}, but not {key!r}{hint}"
        if expected := rules[key](value):
            quoted = "" if ", but " in expected else f", but not {value!r}"
            return f"{key} as {expected}{quoted}"
    return None


def _rate(value: Any) -> str | None:
    good = value is None or is_rate(value)
    return None if good else 'a rate such as "50/s", "100/m" or "10/h", or None'


def _breaker(value: Any) -> str | None:
    if value is not None and not isinstance(value, Mapping):
        return 'a dict such as {"failures": 5, "within": 60, "pause": 30}, or None'
    expected = _of_dict(value or {}, _BREAKER_RULES)
    return expected and f"a dict with {expected}"


def _backend(value: Any) -> str | None:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return None
    shown = repr(without_secrets(value)) if isinstance(value, str) else type(value).__name__
    return f'the path of a class such as "django_outbox.relays.kafka.Kafka", but not {shown}'


def _events(value: Any) -> str | None:
    expected = 'a list of event types and patterns, such as ["order.*"]'
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return expected
    if not value:
        return f"{expected}, but it is empty"
    wrong = [each for each in value if not (isinstance(each, str) and 0 < len(each) <= TYPE_LENGTH)]
    return f"types of 1 to {TYPE_LENGTH} characters, but not {wrong[0]!r}" if wrong else None


def _template(value: Any) -> str | None:
    """Return why ``str.format`` over the fields of an event would fail; never the value itself.

    The value may be a URL with a password.
    """
    if not isinstance(value, str) or not value:
        found = "an empty text" if value == "" else type(value).__name__
        return f'a text such as "{{event_type}}", but not {found}'
    try:
        parts = [*Formatter().parse(value)]
    except ValueError as error:
        return f"a format string, but it is not one: {error}"
    for _, name, spec, conversion in parts:
        if name is None:  # only text
            continue
        if spec or conversion:
            return f"{{{name}}} without a conversion (!) or a format (:), but it has one"
        if name not in FIELDS and not HEADER.fullmatch(name):
            known = ", ".join(f"{{{each}}}" for each in FIELDS)
            return f"{known} or {{headers[name]}}, but not {{{name}}}"
    return None


def _options(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"a dict, but not {type(value).__name__}"
    wrong = [each for each in value if not isinstance(each, str)]
    return f"a dict whose keys are names, but not {wrong[0]!r}" if wrong else None


_BREAKER_RULES: Final = {
    "failures": integer(1),
    **dict.fromkeys(("within", "pause"), number(0, above=True)),
}
_QUEUE_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("WORKERS", "ASYNC_CONCURRENCY"), integer(1)),
    "ASYNC_CONNECTIONS": integer(1, optional=True),
    "RATE": _rate,
    "BREAKER": _breaker,
}
_RELAY_RULES: Final[Mapping[str, Rule]] = {
    "BACKEND": _backend,
    "EVENTS": _events,
    **dict.fromkeys(("TO", "SOURCE"), _template),
    "FORMAT": one_of(*FORMATS),
    "BATCH": integer(1, most=MAX_BATCH),
    "WITHIN": number(0, most=1),
    "RETRY": anything,
    "OPTIONS": _options,
}
