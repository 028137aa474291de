"""Causes of dead events: the class and the message of their errors, without ids and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models import Count, Max, Min, Q
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
    """Why events are dead: the class of their error, and its message without ids and numbers."""

    error: str  # class
    message: str  # normalised
    text: str  # both, as the column has them
    digest: str  # names the cause; keyed, so that it does not betray the message
    example: str = ""  # the error of the newest event, not redacted
    newest_id: str = ""  # of the newest delivery
    count: int = 0
    lately: int = 0  # of these, those that died in the last hour
    newest: datetime | None = None  # the latest death
    oldest: datetime | None = None
    types: dict[str, int] = field(default_factory=dict)  # deliveries by type, the most first
    listeners: set[str] = field(default_factory=set)  # their titles

    @property
    def title(self) -> str:
        """Return the normalised error, such as ``ValueError: order # is unknown``."""
        return ": ".join(filter(None, (self.error, self.message)))

    def as_row(self) -> dict[str, Any]:
        """Return plain values, as reports show them."""
        return {
            "count": self.count,
            "title": self.title,
            "event_types": self.types,
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


class _Group(NamedTuple):
    """Dead deliveries of one event type, cause and listener."""

    event_type: str
    cause: str | None
    listener: str | None
    deliveries: int
    newest_id: str
    oldest: datetime | None
    newest: datetime | None
    lately: int


def load_causes(alias: str, limit: int, *, rows: OutboxQuerySet | None = None) -> Causes:
    """Return the causes of the dead events, at most ``limit``; of ``rows`` if they are given."""
    groups = _groups(alias, rows)
    count = AtLeast if len(groups) >= MAX_GROUPS else int
    found = _grouped(groups).values()
    causes = sorted(found, key=lambda each: (-each.lately, -each.count, each.title))
    _add_examples(alias, causes[:limit])
    return Causes(
        causes=causes[:limit],
        others=count(max(len(causes) - limit, 0)),
        total=count(sum(each.count for each in causes)),
    )


def find_cause(alias: str, digest: str) -> Cause | None:
    """Return the cause with this digest; None if no dead event has it."""
    found = _grouped(_groups(alias, None)).get(digest)
    if found is not None:
        _add_examples(alias, [found])
    return found


def only_of_cause(alias: str, digest: str, ids: Sequence[str]) -> list[str]:
    """Return those of these ids whose events are dead of this cause, in ascending order."""
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids).dead().order_by("pk")
    found = rows.values_list("pk", "cause")
    causes = {cause for _, cause in found if _digest(cause) == digest}
    return [pk for pk, cause in found if cause in causes]


def _digest(cause: str | None) -> str:
    return salted_hmac(SALT, cause or "", algorithm="sha256").hexdigest()[:DIGEST_LENGTH]


def _grouped(groups: Iterable[_Group]) -> dict[str, Cause]:
    """Return the causes by digest."""
    found: dict[str, Cause] = {}
    types: dict[str, Counter[str]] = {}
    for each in groups:
        title = each.cause or ""
        cause = found.get(title)
        if cause is None:
            error = error_class(title)
            message = title.removeprefix(error).removeprefix(":").strip()
            cause = found[title] = Cause(
                error=error, message=message, text=title, digest=_digest(title)
            )
            types[title] = Counter()
        cause.count += each.deliveries
        cause.listeners |= {each.listener} if each.listener else set()
        cause.lately += each.lately
        types[title][each.event_type] += each.deliveries
        cause.newest_id = max(cause.newest_id, each.newest_id)
        cause.newest = max(filter(None, (cause.newest, each.newest)), default=None)
        cause.oldest = min(filter(None, (cause.oldest, each.oldest)), default=None)
    for title, cause in found.items():
        cause.types = dict(sorted(types[title].items(), key=lambda each: (-each[1], each[0])))
    return {each.digest: each for each in found.values()}


def _groups(alias: str, rows: OutboxQuerySet | None) -> list[_Group]:
    connection = connections[alias]
    since = dialect_of(connection).clock() - timedelta(seconds=LATELY)
    if rows is None:
        found = dialect_of(connection).dead_causes(since=since, most=MAX_GROUPS)
        return [
            _Group._make([*row[:5], *map(stored_instant, row[5:7]), int(row[7])]) for row in found
        ]
    counted: Any = (
        rows.dead()
        .order_by()
        .values_list("event_type", "cause", "listener")
        .annotate(
            deliveries=Count("pk"),
            newest_id=Max("pk"),
            oldest=Min("done_at"),
            newest=Max("done_at"),
            lately=Count("pk", filter=Q(done_at__gte=since)),
        )
    )
    return [_Group(*row) for row in counted.order_by("-lately", "-deliveries")[:MAX_GROUPS]]


def _add_examples(alias: str, causes: Sequence[Cause]) -> None:
    """Add the error of each cause's newest delivery."""
    by_id = {each.newest_id: each for each in causes}
    rows = OutboxEvent.objects.using(alias).filter(pk__in=[*by_id])
    texts = rows.annotate(text=Substr("last_error", 1, EXAMPLE_LENGTH))
    for pk, text in texts.values_list("pk", "text"):
        by_id[pk].example = (text or "").partition("\n")[0]
