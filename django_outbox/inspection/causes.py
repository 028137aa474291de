"""Causes of dead events: the class and the message of their errors, without ids and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, Final

from django.db import connections
from django.db.models import Case, Count, F, Max, Min, Q, Value, When
from django.db.models.functions import Substr
from django.utils.crypto import salted_hmac

from ..listeners.history import error_class
from ..models import OutboxEvent, OutboxQuerySet
from ..models.fields import ExactTextField
from ..models.queryset import by_death
from ..sql import dialect_of
from .counts import AtLeast

MAX_GROUPS: Final = 10_000  # causes and event types that are read
NEWEST: Final = 5000  # dead deliveries, by whose texts a class of errors is judged
MAX_TEXTS: Final = 20  # of a class that stay apart even if nearly every delivery has its own
EXAMPLE_LENGTH: Final = 200  # characters
LATELY: Final = 3600.0  # seconds; the causes of the most deaths since then come first
DIGEST_LENGTH: Final = 16  # characters
SALT: Final = "django_outbox.cause"


@dataclass(slots=True, kw_only=True)
class Cause:
    """Why events are dead: the class of their error, and its message without ids and numbers.

    Where nearly every text differs among the newest, a class of errors of one listener is one
    cause.
    """

    error: str  # class
    message: str  # normalised; empty if texts differ
    key: tuple[str, ...]  # the text of the column; or class and listener
    digest: str  # names the cause; keyed, so that it does not betray the message
    texts: int = 1  # how many differ, of the newest
    without: Sequence[str] = ()  # listeners whose errors of this class are a cause of their own
    example: str = ""  # the error of the newest event, not redacted
    newest_id: str = ""  # of the newest delivery
    count: int = 0
    lately: int = 0  # of these, those that died in the last hour
    newest: datetime | None = None  # the latest death
    oldest: datetime | None = None
    types: Counter[str] = field(default_factory=Counter)  # deliveries by type
    listeners: Counter[str] = field(default_factory=Counter)  # deliveries by title

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
        return _of_class(*self.key)

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


def load_causes(
    alias: str, limit: int, *, rows: OutboxQuerySet | None = None, now: datetime | None = None
) -> Causes:
    """Return the causes of the dead events, at most ``limit``; of ``rows`` if they are given.

    ``now``: the database's, if it is known.
    """
    dead = by_death(OutboxEvent.objects.using(alias) if rows is None else rows).order_by()
    since = (now or dialect_of(connections[alias]).clock()) - timedelta(seconds=LATELY)
    wide = _wide(dead)
    groups = _groups(dead, wide, since)
    count = AtLeast if len(groups) >= MAX_GROUPS else int
    found = _grouped(groups, wide).values()
    causes = sorted(found, key=lambda each: (-each.lately, -each.count, each.title))
    return Causes(
        causes=causes[:limit],
        others=count(max(len(causes) - limit, 0)),
        total=count(sum(each.count for each in causes)),
        lately=count(sum(each.lately for each in causes)),
    )


def find_cause(alias: str, digest: str) -> Cause | None:
    """Return the cause with this digest, not counted; None if no dead event has it."""
    dead = by_death(OutboxEvent.objects.using(alias)).order_by()
    wide = _wide(dead)
    others = dead.exclude(_any_of(wide)) if wide else dead
    texts = others.values_list("cause", flat=True).distinct()[:MAX_GROUPS]
    keys = chain(wide, ((text or "",) for text in texts.iterator()))
    key = next((each for each in keys if _digest(each) == digest), None)
    return None if key is None else _of_key(key, wide)


def _digest(key: tuple[str, ...]) -> str:
    return salted_hmac(SALT, "\0".join(key), algorithm="sha256").hexdigest()[:DIGEST_LENGTH]


def _wide(dead: OutboxQuerySet) -> dict[tuple[str, ...], int]:
    """Return the classes of errors and listeners of which nearly every delivery has its own text.

    Each with the number of texts. To group by such texts takes several times as long.
    """
    newest = [*dead.order_by("-pk").values_list("cause", "listener")[:NEWEST]]
    count = AtLeast if len(newest) == NEWEST else int
    numbers = Counter((error_class(cause), listener or "") for cause, listener in newest)
    texts = Counter((error_class(cause), listener or "") for cause, listener in {*newest})
    return {
        key: count(number)
        for key, number in texts.items()
        if number > MAX_TEXTS and numbers[key] < 2 * number
    }


def _groups(
    dead: OutboxQuerySet, wide: Iterable[tuple[str, ...]], since: datetime
) -> list[dict[str, Any]]:
    """Count by event type, listener and text; of a wide class, by the class instead."""
    classes = [When(_of_class(*key), then=Value(key[0])) for key in wide]
    text = Case(*classes, default=F("cause"), output_field=ExactTextField())
    counted: Any = dead.values("event_type", "listener", text=text).annotate(
        deliveries=Count("pk"),
        newest_id=Max("pk"),
        oldest=Min("done_at"),
        newest=Max("done_at"),
        lately=Count("pk", filter=Q(done_at__gte=since)),
    )
    return [*counted.order_by("-lately", "-deliveries")[:MAX_GROUPS]]


def _any_of(wide: Iterable[tuple[str, ...]]) -> Q:
    return reduce(or_, (_of_class(*each) for each in wide))


def _of_class(error: str, listener: str) -> Q:
    of_class = Q(cause=error) | Q(cause__startswith=f"{error}:")
    return of_class & (Q(listener=listener) if listener else Q(listener=None))


def _of_key(key: tuple[str, ...], wide: Mapping[tuple[str, ...], int]) -> Cause:
    """Return the cause that is the text, or else the class and listener, of nothing yet."""
    text, error, is_text = key[0], error_class(key[0]), len(key) == 1
    return Cause(
        error=error,
        message=text.removeprefix(error).removeprefix(":").strip() if is_text else "",
        key=key,
        digest=_digest(key),
        texts=wide.get(key, 1),
        without=[title for name, title in wide if is_text and name == error],
    )


def _grouped(
    groups: Iterable[dict[str, Any]], wide: Mapping[tuple[str, ...], int]
) -> dict[tuple[str, ...], Cause]:
    """Return the causes by key."""
    found: dict[tuple[str, ...], Cause] = {}
    for each in groups:
        error, text = error_class(each["text"]), each["text"] or ""
        of_class = error, each["listener"] or ""
        key: tuple[str, ...] = of_class if of_class in wide else (text,)
        cause = found.get(key)
        if cause is None:
            cause = found[key] = _of_key(key, wide)
        cause.count += each["deliveries"]
        cause.lately += each["lately"]
        cause.types[each["event_type"]] += each["deliveries"]
        if each["listener"]:
            cause.listeners[each["listener"]] += each["deliveries"]
        cause.newest_id = max(cause.newest_id, each["newest_id"])
        cause.newest = max(filter(None, (cause.newest, each["newest"])), default=None)
        cause.oldest = min(filter(None, (cause.oldest, each["oldest"])), default=None)
    return found


def add_examples(alias: str, causes: Sequence[Cause]) -> None:
    """Add the error of each cause's newest delivery."""
    by_id = {each.newest_id: each for each in causes}
    rows = OutboxEvent.objects.using(alias).filter(pk__in=[*by_id])
    texts = rows.annotate(text=Substr("last_error", 1, EXAMPLE_LENGTH))
    for pk, text in texts.values_list("pk", "text"):
        by_id[pk].example = (text or "").partition("\n")[0]
