"""The settings of relays: reads and checks ``OUTBOX["RELAYS"]``, one dict for each relay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Final

from .redaction import without_secrets

PREFIX: Final = "relay."  # of the titles and queues of relays
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,49}")
# str.format takes a name of digits for an index.
HEADER: Final = re.compile(r"headers\[(?!\d+\])[^\[\]]+\]")
FORMATS: Final = ("plain", "cloudevents", "cloudevents-structured")
# What TO and SOURCE may name; headers by {headers[name]}.
FIELDS: Final = "event_type aggregate_type aggregate_id tenant_id key event_id".split()
MAX_EVENT_TYPE: Final = 128  # characters, as in the table
MAX_BATCH: Final = 500  # messages; as many as the events in a call of a batch listener
DEFAULT_WORKERS: Final = 2  # threads of a relay's queue: one prepares while the other waits


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The settings of one relay."""

    name: str
    BACKEND: str  # dotted path of a class
    EVENTS: tuple[str, ...]  # event types and patterns
    TO: str = field(default="{event_type}", repr=False)  # str.format over the event's fields
    FORMAT: str = "plain"
    SOURCE: str = "/django-outbox"  # CloudEvents' source, str.format over the event's fields
    BATCH: int = MAX_BATCH  # messages in a call, at most
    WITHIN: float = 0.0  # seconds that the first event may wait for more
    RETRY: Any = None  # as OUTBOX["RETRY"]; None: that one
    OPTIONS: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the backend

    @property
    def title(self) -> str:
        """The listener's title, and the name of its queue."""
        return f"{PREFIX}{self.name}"

    @property
    def backend_name(self) -> str:
        """The name of the backend's class, such as ``Kafka``."""
        return self.BACKEND.rpartition(".")[2]

    def where(self, key: str) -> str:
        """Return how an error names one of these settings."""
        return f'OUTBOX["RELAYS"][{self.name!r}]["{key}"]'

    @property
    def shown_to(self) -> str:
        """TO without the credentials and the query of a URL, for people."""
        return without_secrets(self.TO)


KNOWN: Final = tuple(each for each in RelaySettings.__dataclass_fields__ if each.isupper())


def relays_from(given: Mapping[str, Any] | None) -> dict[str, RelaySettings]:
    """Return the settings of all relays by name, from a valid setting."""
    return {
        name: RelaySettings(name=name, **{**own, "EVENTS": tuple(own["EVENTS"])})
        for name, own in (given or {}).items()
    }


def relay_queues(given: Mapping[str, Any] | None) -> set[str]:
    """Return the names of the queues that relays have."""
    return {f"{PREFIX}{name}" for name in given or {}}


def relays_fault(value: Any) -> str | None:
    """Return what was expected of ``OUTBOX["RELAYS"]``; None if the value is valid."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "a dict with the settings of each relay by its name, or None"
    for name, own in value.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"names of 1 to 50 letters, digits, '_' or '-', but not {name!r}"
        if not isinstance(own, Mapping):
            return f"a dict of settings for the relay {name!r}, but not {type(own).__name__}"
        for key in ("BACKEND", "EVENTS"):
            if key not in own:
                return f"{key} for the relay {name!r}"
        for key, setting in own.items():
            if expected := _setting_fault(key, setting):
                return f"for the relay {name!r} {expected}"
    return None


def _setting_fault(key: Any, value: Any) -> str | None:
    if key not in KNOWN:
        near = difflib.get_close_matches(str(key).upper(), KNOWN, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"only {', '.join(KNOWN)}, but not {key!r}{hint}"
    rule = _RULES.get(key)
    return rule(value) if rule else None


def _backend_fault(value: Any) -> str | None:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return None
    shown = repr(without_secrets(value)) if isinstance(value, str) else type(value).__name__
    return (
        'the dotted path of a class as BACKEND, such as "django_outbox.relays.kafka.Kafka", but '
        f"not {shown}"
    )


def _events_fault(value: Any) -> str | None:
    expected = 'a list of event types and patterns, such as ["order.*"], as EVENTS'
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return f"{expected}, but not {value!r}"
    if not value:
        return f"{expected}, but it is empty"
    for each in value:
        if not isinstance(each, str) or not 1 <= len(each) <= MAX_EVENT_TYPE:
            return f"types of 1 to {MAX_EVENT_TYPE} characters in EVENTS, but not {each!r}"
    return None


def _template_fault(key: str, value: Any) -> str | None:
    """Return why ``str.format`` over the fields of an event would fail; never the value itself.

    The value may be a URL with a password.
    """
    if not isinstance(value, str) or not value:
        found = "an empty text" if value == "" else type(value).__name__
        return f'a text such as "{{event_type}}" as {key}, but not {found}'
    try:
        parts = [*Formatter().parse(value)]
    except ValueError as error:
        return f"a format string as {key}, but it is not one: {error}"
    for _, name, spec, conversion in parts:
        if name is None:  # only text
            continue
        if spec or conversion:
            return f"{key} with {{{name}}} as it is, without a conversion (!) or a format (:)"
        if name not in FIELDS and not HEADER.fullmatch(name):
            known = ", ".join(f"{{{each}}}" for each in FIELDS)
            return f"{known} or {{headers[name]}} in {key}, but not {{{name}}}"
    return None


def _format_fault(value: Any) -> str | None:
    return None if value in FORMATS else f"one of {', '.join(FORMATS)} as FORMAT, not {value!r}"


def _batch_fault(value: Any) -> str | None:
    good = type(value) is int and 1 <= value <= MAX_BATCH
    return None if good else f"a whole number from 1 to {MAX_BATCH} as BATCH, but not {value!r}"


def _within_fault(value: Any) -> str | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    return None if good else f"0 to 1 seconds as WITHIN, but not {value!r}"


def _options_fault(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"a dict as OPTIONS, but not {type(value).__name__}"
    wrong = [each for each in value if not isinstance(each, str)]
    return f"names as keys of OPTIONS, but not {wrong[0]!r}" if wrong else None


_RULES: Final = {
    "BACKEND": _backend_fault,
    "EVENTS": _events_fault,
    "TO": lambda value: _template_fault("TO", value),
    "SOURCE": lambda value: _template_fault("SOURCE", value),
    "FORMAT": _format_fault,
    "BATCH": _batch_fault,
    "WITHIN": _within_fault,
    "OPTIONS": _options_fault,
}
