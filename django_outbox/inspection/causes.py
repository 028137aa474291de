"""Causes of dead events: the class and the message of their errors, without ids and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models import Count, Max, Min, Q, Value
from django.db.models.functions import Substr
from django.utils.crypto import salted_hmac

from ..events import stored_instant
from ..listeners.error_texts import error_class
from ..models import OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from .counts import AtLeast

MAX_GROUPS: Final = 10_000  # causes and event types that are read
EXAMPLE_LENGTH: Final = 200  # characters
LATELY: Final = 3600.0  # seconds; the causes of the most deaths since then come first
DIGEST_LENGTH: Final = 16  # characters
SALT: Final = "django_outbox.cause"


@dataclass(slots=True, kw_only=True)
class Cause:
    """Why events are dead: the class of their error, and its message without ids and numbers.

    Where nearly every text differs, a class of errors of one listener is one cause.
    """

    error: str  # class
    message: str  # normalised; empty if texts differ
    key: tuple[str, ...]  # the text of the column; or class and listener
    digest: str  # names the cause; keyed, so that it does not betray the message
    texts: int = 1  # how many differ
    without: Sequence[str] = ()  # listeners whose errors of this class are a cause of their own
    example: str = ""  # the error of the newest event, not redacted
    newest_id: str = ""  # of the newest delivery
    count: int = 0
    lately: int = 0  # of these, those that died in the last hour
    newest: datetime | None = None  # the latest death
    oldest: datetime | None = None
    types: Counter[str] = field(default_factory=Counter)  # deliveries by type
    listeners: Counter[str] = field(default_factory=Counter)  # deliveries by title
    tenants: Counter[str] = field(default_factory=Counter)  # of the newest; see ``add_tenants``

    @property
    def title(self) -> str:
        """Return the normalised error, such as ``ValueError: order # is unknown``."""
        return ": ".join(filter(None, (self.error, self.message)))

    @property
    def condition(self) -> Q:
        """Return the condition of its deliveries, among dead ones."""
        if len(self.key) == 1:
            same = Q(cause=self.key[0]) if self.key[0] else Q(cause=None) | Q(cause="")
            return same & ~Q(listener__in=self.without) if self.without else same
        error, listener = self.key
        of_class = Q(cause=error) | Q(cause__startswith=f"{error}:")
        return of_class & (Q(listener=listener) if listener else Q(listener=None))

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        return {
            "count": self.count,
            "title": self.title,
            "event_types": dict(self.types.most_common()),
            "listeners": sorted(self.listeners),
            "first": self.oldest,
            "last": self.newest,
            "id": self.newest_id,
            "cause": self.digest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The causes with the most deaths lately, then those with the most deliveries."""

    causes: list[Cause]
    others: int  # further causes; of many, those of MAX_GROUPS
    total: int  # dead deliveries, of all these causes
    lately: int  # of these, those that died in the last hour


class _Group(NamedTuple):
    """Dead deliveries of one event type, listener and cause, or class of errors."""

    event_type: str
    listener: str | None
    cause: str | None
    texts: int
    deliveries: int
    newest_id: str
    oldest: datetime | None
    newest: datetime | None
    lately: int

    @property
    def key(self) -> tuple[str, ...]:
        if self.texts == 1:
            return (self.cause or "",)
        return error_class(self.cause), self.listener or ""


def load_causes(
    alias: str, limit: int, *, rows: OutboxQuerySet | None = None, now: datetime | None = None
) -> Causes:
    """Return the causes of the dead events, at most ``limit``; of ``rows`` if they are given.

    ``now``: the database's, if it is known.
    """
    groups = _groups(alias, rows, now)
    count = AtLeast if len(groups) >= MAX_GROUPS else int
    found = _grouped(groups).values()
    causes = sorted(found, key=lambda each: (-each.lately, -each.count, each.title))
    return Causes(
        causes=causes[:limit],
        others=count(max(len(causes) - limit, 0)),
        total=count(sum(each.count for each in causes)),
        lately=count(sum(each.lately for each in causes)),
    )


def find_cause(alias: str, digest: str) -> Cause | None:
    """Return the cause with this digest; None if no dead event has it."""
    return _grouped(_groups(alias)).get(digest)


def add_tenants(alias: str, causes: Sequence[Cause]) -> None:
    """Add how many of the newest ``MAX_GROUPS`` dead deliveries each tenant has of each cause."""
    by_key = {each.key: each for each in causes}
    for text, title, tenant, count in dialect_of(connections[alias]).dead_tenants(most=MAX_GROUPS):
        if cause := next(filter(None, map(by_key.get, _keys(text, title))), None):
            cause.tenants[tenant] += count


def only_of_cause(alias: str, digest: str, ids: Sequence[str]) -> list[str]:
    """Return those of these ids whose events are dead of this cause, in ascending order."""
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids).dead().order_by("pk")
    found = rows.values_list("pk", "cause", "listener")
    keys = {of: digest in map(_digest, _keys(*of)) for of in {(of[1], of[2]) for of in found}}
    return [pk for pk, cause, listener in found if keys[cause, listener]]


def _keys(cause: str | None, listener: str | None) -> list[tuple[str, ...]]:
    """Return the keys of the causes that a delivery can belong to: its class, if that is one."""
    return [(error_class(cause), listener or ""), (cause or "",)]


def _digest(key: tuple[str, ...]) -> str:
    return salted_hmac(SALT, "\0".join(key), algorithm="sha256").hexdigest()[:DIGEST_LENGTH]


def _grouped(groups: Iterable[_Group]) -> dict[str, Cause]:
    """Return the causes by digest."""
    found: dict[tuple[str, ...], Cause] = {}
    for each in groups:
        cause = found.get(each.key)
        if cause is None:
            error = error_class(each.cause)
            message = (each.cause or "").removeprefix(error).removeprefix(":").strip()
            cause = found[each.key] = Cause(
                error=error,
                message=message if each.texts == 1 else "",
                key=each.key,
                digest=_digest(each.key),
                texts=0,
            )
        cause.texts += each.texts
        cause.count += each.deliveries
        cause.lately += each.lately
        cause.types[each.event_type] += each.deliveries
        if each.listener:
            cause.listeners[each.listener] += each.deliveries
        cause.newest_id = max(cause.newest_id, each.newest_id)
        cause.newest = max(filter(None, (cause.newest, each.newest)), default=None)
        cause.oldest = min(filter(None, (cause.oldest, each.oldest)), default=None)
    classes = [key for key in found if len(key) > 1]
    for cause in found.values():
        if len(cause.key) == 1:
            cause.without = [listener for error, listener in classes if error == cause.error]
    return {each.digest: each for each in found.values()}


def _groups(
    alias: str, rows: OutboxQuerySet | None = None, now: datetime | None = None
) -> list[_Group]:
    dialect = dialect_of(connections[alias])
    since = (now or dialect.clock()) - timedelta(seconds=LATELY)
    if rows is None:
        found = dialect.dead_causes(since=since, most=MAX_GROUPS)
        return [
            _Group._make(
                [*row[:3], *map(int, row[3:5]), row[5], *map(stored_instant, row[6:8]), int(row[8])]
            )
            for row in found
        ]
    counted: Any = (
        rows.dead()
        .order_by()
        .values_list("event_type", "listener", "cause", Value(1))
        .annotate(
            deliveries=Count("pk"),
            newest_id=Max("pk"),
            oldest=Min("done_at"),
            newest=Max("done_at"),
            lately=Count("pk", filter=Q(done_at__gte=since)),
        )
    )
    return [_Group(*row) for row in counted.order_by("-lately", "-deliveries")[:MAX_GROUPS]]


def add_examples(alias: str, causes: Sequence[Cause]) -> None:
    """Add the error of each cause's newest delivery."""
    by_id = {each.newest_id: each for each in causes}
    rows = OutboxEvent.objects.using(alias).filter(pk__in=[*by_id])
    texts = rows.annotate(text=Substr("last_error", 1, EXAMPLE_LENGTH))
    for pk, text in texts.values_list("pk", "text"):
        by_id[pk].example = (text or "").partition("\n")[0]
