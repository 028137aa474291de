"""What a purge may delete: rows past their time, and none that somebody else has locked."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ..conf import Settings
from ..outcomes import Status


def unlocked(rows: models.QuerySet[Any], connection: BaseDatabaseWrapper) -> list[Any]:
    """Lock rows but for what somebody else has locked, and return their keys.

    Whoever asks for it waits for nobody.
    """
    features = connection.features
    if features.has_select_for_update:
        rows = rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)
    return [*rows.values_list("pk", flat=True)]


def batches(every: models.QuerySet[Any], size: int) -> Iterator[Q]:
    """Walk the primary key upwards; yield a condition for each ``size`` rows, as it goes.

    Beside an open snapshot the way to the first row is long, for all that was deleted lies there.
    """
    ids = every.order_by("pk").values_list("pk", flat=True)
    low = ids.first()
    while low is not None:
        high = next(iter(ids.filter(pk__gte=low)[size : size + 1]), None)
        yield Q(pk__gte=low) if high is None else Q(pk__gte=low, pk__lt=high)
        low = high


def is_expired(settings: Settings, now: datetime) -> Q:
    """Return the condition of rows that are past their retention; empty if all are kept."""
    if settings.MODE == "writer_only":  # nobody finishes rows there: age alone tells
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
