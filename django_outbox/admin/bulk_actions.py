"""Actions on all events that match a filter, a few seconds per request."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from django.core import signing
from django.core.exceptions import SuspiciousOperation
from django.db import connections

from ..models import OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from .actions import BATCH_SIZE, EventAction, apply_to_batch

SECONDS_PER_REQUEST: Final = 2.0  # of work, at least one batch
SALT: Final = "django_outbox.bulk_action"
MAX_AGE: Final = 30 * 86400  # seconds for which a bulk action can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgress:
    """Progress of a bulk action; the browser keeps it, signed, from request to request."""

    until: str  # ISO time; later deaths are left out, or events that die again would repeat
    total: int  # events that matched at the beginning
    is_all: bool  # False: more events matched
    after: str = ""  # the last id that was processed
    done: int = 0
    skipped: int = 0  # locked elsewhere, or changed before the action reached them
    is_finished: bool = False

    @property
    def processed(self) -> int:
        return self.done + self.skipped

    @property
    def token(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)


def begin(alias: str, *, total: int, is_all: bool) -> BulkProgress:
    connection = connections[alias]
    now = dialect_of(connection).clock(connection)
    return BulkProgress(until=now.isoformat(), total=total, is_all=is_all)


def resume(token: str) -> BulkProgress:
    """Return the progress in a token; raise ``SuspiciousOperation`` (status 400) if invalid."""
    try:
        return BulkProgress(**signing.loads(token, salt=SALT, max_age=MAX_AGE))
    except (signing.BadSignature, TypeError) as error:
        raise SuspiciousOperation("The state of this bulk action is not valid.") from error


def advance(
    progress: BulkProgress, action: EventAction, rows: OutboxQuerySet, *, user_id: Any
) -> BulkProgress:
    """Apply the action to the next events for ``SECONDS_PER_REQUEST``; return the progress."""
    until = datetime.fromisoformat(progress.until)
    deadline = time.monotonic() + SECONDS_PER_REQUEST
    events = OutboxEvent.objects.using(rows.db)
    for ids in action.applicable(rows).batches(size=BATCH_SIZE, after=progress.after, until=until):
        done = apply_to_batch(action, events.filter(pk__in=ids), user_id=user_id)
        progress = replace(
            progress,
            after=ids[-1],
            done=progress.done + done,
            skipped=progress.skipped + len(ids) - done,
        )
        if time.monotonic() >= deadline:
            return progress
    return replace(progress, is_finished=True)
