"""Which rows a purge may delete: those past their retention that no other session has locked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Case, Q, Value, When

from ..conf import Settings
from ..listeners.outcomes import Status


def batches(every: models.QuerySet[Any], size: int) -> Iterator[Q]:
    """Scan the primary key upwards; yield a condition for each ``size`` rows.

    Find the first row only once: while an old snapshot is open, the search passes all deleted rows.
    """
    ids = every.order_by("pk").values_list("pk", flat=True)
    low = ids.first()
    while low is not None:
        high = next(iter(ids.filter(pk__gte=low)[size : size + 1]), None)
        yield Q(pk__gte=low) if high is None else Q(pk__gte=low, pk__lt=high)
        low = high


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The result of a scan for one batch of rows."""

    last: str  # primary key
    rows: int
    deleted: int


def scan(
    every: Any, expired: Q, *, after: str, until: str | None = None, size: int
) -> Iterator[Batch]:
    """Read the primary keys above ``after`` and below ``until`` upwards, each row once.

    Delete expired rows, batch by batch.
    """
    rows = every.order_by("pk").annotate(expired=Case(When(expired, then=Value(1)), default=0))
    if until is not None:
        rows = rows.filter(pk__lt=until)
    while found := [*rows.filter(pk__gt=after).values_list("pk", "expired")[:size]]:
        after = found[-1][0]
        ids = [pk for pk, is_over in found if is_over]
        deleted = every.filter(expired, pk__in=ids)._delete_unlocked() if ids else 0
        yield Batch(last=after, rows=len(found), deleted=deleted)
        if len(found) < size:
            return


def ages(settings: Settings) -> set[float]:
    """Return the seconds after which events are past their retention; empty if all are kept."""
    done, unique, dead = settings.RETENTION_DONE, settings.RETENTION_UNIQUE, settings.RETENTION_DEAD
    if settings.MODE == "writer_only":
        unique = dead = None
    elif done is None:
        unique = None
    elif unique is not None:
        unique = max(done, unique)
    return {age for age in (done, unique, dead) if age is not None}


def expired_condition(settings: Settings, now: datetime) -> Q:
    """Return the condition of rows that are past their retention; empty if all are kept."""
    if settings.MODE == "writer_only":  # no worker settles rows there: only age counts
        age = settings.RETENTION_DONE
        return Q() if age is None else Q(created_at__lt=now - timedelta(seconds=age))
    expired = Q()
    for status, retention in (
        (Status.DONE, settings.RETENTION_DONE),
        (Status.DEAD, settings.RETENTION_DEAD),
    ):
        if retention is not None:
            expired |= Q(status=status, done_at__lt=now - timedelta(seconds=retention))
    if expired:
        forgotten = Q(unique_key=None) | ~Q(status=Status.DONE)
        if settings.RETENTION_UNIQUE is not None:
            kept = now - timedelta(seconds=settings.RETENTION_UNIQUE)
            forgotten |= Q(done_at__lt=kept)
        expired &= forgotten
    return expired
