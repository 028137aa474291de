"""Events that were leased by lost workers, and which of them may have stopped these workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import connections

from ..listeners import history
from ..models import OutboxEvent
from .counts import pending_queries

MAX_LOSSES: Final = 200  # events that are read
MIN_LOST: Final = 2  # workers that an event must have lost before it is a suspect


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A pending event and the lost workers that had leased it."""

    event_id: str
    event_type: str
    workers: Sequence[tuple[str, datetime]]  # each lost worker, and when that was found


def losses(alias: str) -> list[Loss]:
    """Return the pending events that lost workers had leased, newest first."""
    if connections[alias].features.supports_partial_indexes:
        queries = [OutboxEvent.objects.using(alias).rescued()]
    else:  # an index of them would cost replays and claims deadlocks: seek among what waits
        queries = [each.filter(rescues__gte=1) for each in pending_queries(alias)]
    found = []
    for query in queries:
        rows = query.order_by("-pk").values_list("pk", "event_type", "history")
        for event_id, event_type, text in rows[:MAX_LOSSES]:
            lost = {each.by: each.at for each in history.entries(text) if each.kind == "lost"}
            found.append(Loss(event_id=event_id, event_type=event_type, workers=[*lost.items()]))
    return sorted(found, key=lambda each: each.event_id, reverse=True)[:MAX_LOSSES]


def suspects(found: Sequence[Loss]) -> list[Loss]:
    """Return the events that were leased by the most lost workers, at least ``MIN_LOST``.

    Workers lease several events at once, so that neighbours of the cause are suspects, too, until
    each was tried alone. Then only the cause is left.
    """
    most = max((len(each.workers) for each in found), default=0)
    return [each for each in found if len(each.workers) == most >= MIN_LOST]
