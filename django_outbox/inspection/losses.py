"""Events that were leased by lost workers, and which of them may have stopped these workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import BigIntegerField, ExpressionWrapper, OuterRef, Subquery

from ..listeners.outcomes import UNSETTLED, Status
from ..models import OutboxAttempt, OutboxEvent
from .counts import PERIOD

MAX_ENTRIES: Final = 10_000  # newest entries of the history that are searched
MAX_LOSSES: Final = 200  # leases of lost workers that are read
MIN_LOST: Final = 2  # workers that an event must have lost before it is a suspect


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An event and the lost workers that had leased it."""

    event_id: str
    event_type: str
    is_open: bool  # no listener has settled it since then, and it did not die long ago
    workers: Sequence[tuple[str, datetime]]  # each lost worker, and when that was found


def losses(alias: str, now: datetime) -> list[Loss]:
    """Return the events that lost workers had leased lately, newest first."""
    entries = OutboxAttempt.objects.using(alias)
    newest = Subquery(entries.order_by("-pk").values("pk")[:1])
    first = ExpressionWrapper(newest - MAX_ENTRIES, output_field=BigIntegerField())
    lost = entries.filter(pk__gt=first, kind=OutboxAttempt.Kind.LOST).order_by("-pk")
    event = OutboxEvent.objects.using(alias).filter(pk=OuterRef("event_id"))
    names = ("event_type", "status", "rescues", "done_at")
    rows: Any = lost.annotate(**{f"its_{each}": Subquery(event.values(each)) for each in names})
    by_event: dict[str, list[Any]] = {}
    for row in rows[:MAX_LOSSES]:
        if row.its_event_type is not None:  # else it was purged or discarded
            by_event.setdefault(row.event_id, []).append(row)
    since = now - timedelta(seconds=PERIOD)
    return [_loss(event_id, entries, since) for event_id, entries in by_event.items()]


def _loss(event_id: str, entries: Sequence[Any], since: datetime) -> Loss:
    newest = entries[0]
    is_dead = newest.its_status == Status.DEAD and (newest.its_done_at or since) > since
    workers = {each.by: each.at for each in entries}
    return Loss(
        event_id=event_id,
        event_type=newest.its_event_type,
        is_open=newest.its_rescues > 0 and (newest.its_status in UNSETTLED or is_dead),
        workers=sorted(workers.items(), key=lambda each: each[1]),
    )


def suspects(found: Sequence[Loss]) -> list[Loss]:
    """Return the open events that were leased by the most lost workers, at least ``MIN_LOST``.

    Workers lease several events at once, so that neighbours of the cause are suspects, too, until
    each was tried alone. Then only the cause is left.
    """
    open_ones = [each for each in found if each.is_open and len(each.workers) >= MIN_LOST]
    most = max((len(each.workers) for each in open_ones), default=0)
    return [each for each in open_ones if len(each.workers) == most]
