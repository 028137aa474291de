"""Causes of dead events: the class and the normalised message of their errors, with exact counts.

An event that several listeners share has the cause of its row's last error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models import Count, Max, Min
from django.db.models.functions import Substr
from django.utils.crypto import salted_hmac

from ..events import stored_instant
from ..listeners.progress import entries
from ..models import OutboxAcknowledgement, OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from .error_texts import READ_LENGTH, error_class, normalised

MAX_TEXTS: Final = 10_000  # different texts of errors that are read, the most frequent first
MAX_LISTED: Final = 1000  # events of one cause that are listed
MAX_SEARCHED: Final = 10_000  # newest dead events that are searched for them
MAX_EXAMPLES: Final = 200  # events whose listeners are read
DIGEST_LENGTH: Final = 16  # characters
SALT: Final = "django_outbox.cause"


@dataclass(slots=True, kw_only=True)
class Cause:
    """Why events are dead: the class of their error, and its message without ids and numbers."""

    error: str  # class
    message: str  # normalised
    digest: str  # names the cause; keyed, so that it does not betray the message
    example: str = ""  # the error of the newest event, not redacted
    newest_ids: dict[str, str] = field(default_factory=dict)  # event ids by event type
    count: int = 0
    is_bounded: bool = False  # True: there may be more
    newest: datetime | None = None  # the latest death
    oldest: datetime | None = None
    types: dict[str, int] = field(default_factory=dict)  # events by event type, the most first
    listeners: set[str] = field(default_factory=set)  # that gave up on a newest, shared event
    acknowledged: OutboxAcknowledgement | None = None

    @property
    def newest_id(self) -> str:
        """Return the id of the newest event."""
        return max(self.newest_ids.values())

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
            "event_id": self.newest_id,
            "cause": self.digest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The causes with the most events, acknowledged ones last."""

    causes: list[Cause]
    others: int  # further causes
    total: int  # dead events, of all causes
    counted: int  # dead events whose cause was read
    is_exact: bool  # False: only the MAX_TEXTS most frequent texts were read

    @property
    def unread(self) -> int:
        """Return the number of dead events whose cause was not read."""
        return 0 if self.is_exact else self.total - self.counted


class _Text(NamedTuple):
    """Dead events of one type with the same text of an error."""

    event_type: str
    text: str | None
    events: int
    newest_id: str
    oldest: datetime | None
    newest: datetime | None


def load_causes(alias: str, limit: int, *, rows: OutboxQuerySet | None = None) -> Causes:
    """Return the causes of the dead events, at most ``limit``; of ``rows`` if they are given.

    The cost is bounded: only the ``MAX_TEXTS`` most frequent texts of errors are read.
    """
    texts = _texts(alias) if rows is None else _texts_of(rows)
    is_exact, texts = len(texts) <= MAX_TEXTS, texts[:MAX_TEXTS]
    found = _grouped(texts)
    counted = sum(each.count for each in found.values())
    known = {each.pk: each for each in OutboxAcknowledgement.objects.using(alias).active()}
    for cause in found.values():
        cause.acknowledged, cause.is_bounded = known.get(cause.digest), not is_exact
    causes = sorted(found.values(), key=_by_importance)
    _add_examples(alias, causes[:limit])
    return Causes(
        causes=causes[:limit],
        others=max(len(causes) - limit, 0),
        total=counted if is_exact else _count(alias, rows),
        is_exact=is_exact,
        counted=counted,
    )


def find_cause(alias: str, digest: str) -> Cause | None:
    """Return the cause with this digest; None if no dead event has it."""
    texts = _texts(alias)
    found = _grouped(texts[:MAX_TEXTS]).get(digest)
    if found is not None:
        found.is_bounded = len(texts) > MAX_TEXTS
        active = OutboxAcknowledgement.objects.using(alias).active()
        found.acknowledged = active.filter(pk=digest).first()
        _add_examples(alias, [found])
    return found


def only_of_cause(alias: str, digest: str, ids: Sequence[str]) -> list[str]:
    """Return those of these ids whose events are dead of this cause, in ascending order."""
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids).dead().order_by("pk")
    texts = rows.annotate(text=Substr("last_error", 1, READ_LENGTH))
    return _of_cause(digest, texts.values_list("pk", "text"))


def newest_of_cause(alias: str, digest: str, *, span: tuple[str | None, str | None]) -> list[str]:
    """Return the ids of the newest events of a cause within a span of ids, newest first.

    Only the ``MAX_SEARCHED`` newest dead events are searched, and ``MAX_LISTED`` ids returned.
    """
    connection = connections[alias]
    lines = dialect_of(connection).dead_lines(
        connection, span=span, length=READ_LENGTH, most=MAX_SEARCHED
    )
    return _of_cause(digest, lines)[:MAX_LISTED]


def _of_cause(digest: str, lines: Iterable[tuple[str, str | None]]) -> list[str]:
    belongs: dict[str | None, bool] = {}  # by text, and by normalised text
    found = []
    for pk, text in lines:
        if text not in belongs:
            title = normalised(text)
            if title not in belongs:
                belongs[title] = _digest(title) == digest
            belongs[text] = belongs[title]
        if belongs[text]:
            found.append(pk)
    return found


def _digest(title: str) -> str:
    return salted_hmac(SALT, title, algorithm="sha256").hexdigest()[:DIGEST_LENGTH]


def _grouped(texts: Iterable[_Text]) -> dict[str, Cause]:
    """Return the causes by digest."""
    by_title: dict[str, Cause] = {}
    types: dict[str, Counter[str]] = {}
    for each in texts:
        title = normalised(each.text)
        cause = by_title.get(title)
        if cause is None:
            error = error_class(title)
            message = title.removeprefix(error).removeprefix(":").strip()
            cause = Cause(error=error, message=message, digest=_digest(title))
            by_title[title], types[title] = cause, Counter()
        cause.count += each.events
        types[title][each.event_type] += each.events
        newest_id = cause.newest_ids.get(each.event_type, "")
        cause.newest_ids[each.event_type] = max(newest_id, each.newest_id)
        cause.newest = max(filter(None, (cause.newest, each.newest)), default=None)
        cause.oldest = min(filter(None, (cause.oldest, each.oldest)), default=None)
    for title, cause in by_title.items():
        cause.types = dict(sorted(types[title].items(), key=lambda each: (-each[1], each[0])))
    return {each.digest: each for each in by_title.values()}


def _by_importance(cause: Cause) -> tuple[bool, int, str]:
    return cause.acknowledged is not None, -cause.count, cause.title


def _texts(alias: str) -> list[_Text]:
    connection = connections[alias]
    rows = dialect_of(connection).dead_texts(connection, length=READ_LENGTH, most=MAX_TEXTS + 1)
    return [_Text(*row[:4], *map(stored_instant, row[4:])) for row in rows]


def _texts_of(rows: OutboxQuerySet) -> list[_Text]:
    texts = rows.dead().order_by().annotate(text=Substr("last_error", 1, READ_LENGTH))
    counted = texts.values_list("event_type", "text").annotate(
        count=Count("pk"), newest_id=Max("pk"), oldest=Min("done_at"), newest=Max("done_at")
    )
    return [_Text(*row) for row in counted.order_by("-count", "-newest_id")[: MAX_TEXTS + 1]]


def _count(alias: str, rows: OutboxQuerySet | None) -> int:
    if rows is not None:
        return rows.dead().order_by().count()
    connection = connections[alias]
    return dialect_of(connection).count_dead(connection)


def _add_examples(alias: str, causes: Sequence[Cause]) -> None:
    """Add the error of each cause's newest event, and the listeners that gave up."""
    by_id = {pk: each for each in causes for pk in each.newest_ids.values()}
    ids = [*by_id][:MAX_EXAMPLES]
    rows = OutboxEvent.objects.using(alias).filter(pk__in=ids).order_by("pk")
    texts = rows.annotate(text=Substr("last_error", 1, READ_LENGTH))
    for pk, text, progress in texts.values_list("pk", "text", "progress"):
        by_id[pk].example = (text or "").partition("\n")[0]
        found = (entries(progress) or {}) if progress else {}
        by_id[pk].listeners |= {title for title, each in found.items() if each.state == "dead"}
