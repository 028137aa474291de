"""Create the doorbell that ``DOORBELL`` names, or report what is wrong and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..conf import current, imported
from ..exceptions import did_you_mean
from ..sql import can_notify
from .base import Doorbell
from .local import Local
from .postgres import Postgres
from .redis import Redis

KINDS: dict[str, Callable[..., Any]] = {"postgres": Postgres, "local": Local, "redis": Redis}
METHODS = ("ring", "ear")


class UnusableDoorbell(ImproperlyConfigured):
    """``DOORBELL`` does not name a usable doorbell."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message} {hint}")
        self.message, self.hint = message, hint


def create_doorbell(alias: str) -> Doorbell | None:
    """Create the doorbell of a database alias; return None if ``DOORBELL`` is None.

    Raises ``UnusableDoorbell``. Opens nothing, so that system checks may call it too.
    """
    value = current().DOORBELL
    options: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = options.pop("kind")
    if kind is None:
        return None
    if kind == "auto":
        kind = "postgres" if can_notify(connections[alias]) else "local"
    make = KINDS.get(kind) or _by_path(kind)
    _check_options(kind, make, options)
    if kind == "postgres":
        _require_postgres(alias, options.get("database") or alias)
    try:
        doorbell = make(alias, **options)
    except ImproperlyConfigured as error:
        raise UnusableDoorbell(str(error), "Or choose another doorbell.") from error
    except Exception as error:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] {kind!r} could not be made: {error!r}.', "Correct its options."
        ) from error
    lacking = [name for name in METHODS if not callable(getattr(doorbell, name, None))]
    if lacking:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] names {kind!r}, which has no method {" and no ".join(lacking)}.',
            "Expected a class with ring(connection) and ear().",
        )
    return doorbell  # type: ignore[no-any-return]


def _by_path(kind: Any) -> Callable[..., Any]:
    known = ["auto", *KINDS]
    if not isinstance(kind, str) or "." not in kind:
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] is {kind!r}; expected one of {", ".join(known)}, a dotted path '
            "or None.",
            did_you_mean(str(kind), known, "See the settings reference."),
        )
    try:
        make = imported('OUTBOX["DOORBELL"]', kind)
    except ImproperlyConfigured as error:
        raise UnusableDoorbell(f"{error}.", "Correct the dotted path.") from error
    if not callable(make):
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] names {kind!r}, which is {make!r}.', "Expected a class."
        )
    return make  # type: ignore[no-any-return]


def _check_options(kind: str, make: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:
        return  # a callable in C: it rejects unknown options itself
    try:
        signature.bind("alias", **options)
    except TypeError as error:
        known = [*signature.parameters][1:]
        wrong = next((name for name in options if name not in known), "")
        raise UnusableDoorbell(
            f'OUTBOX["DOORBELL"] {kind!r} does not fit: {error}. Its options are: '
            f"{', '.join(known) or 'none'}.",
            did_you_mean(wrong, known, "Correct the options, or leave them out."),
        ) from error


def _require_postgres(*aliases: str) -> None:
    for alias in aliases:
        if alias not in connections:
            raise UnusableDoorbell(
                f'OUTBOX["DOORBELL"] names the database {alias!r}, which DATABASES has not.',
                did_you_mean(alias, connections, "Name an alias of DATABASES."),
            )
        if not can_notify(connections[alias]):
            raise UnusableDoorbell(
                f'OUTBOX["DOORBELL"] is "postgres", but {alias!r} is not a PostgreSQL database.',
                'Set "auto", which is "local" there, or "redis" across hosts.',
            )
