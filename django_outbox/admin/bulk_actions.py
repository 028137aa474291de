"""Actions on all events that match a filter, a few seconds per request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from django.core import signing
from django.core.exceptions import SuspiciousOperation
from django.db import connections

from ..models import OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from .actions import (
    AT_ONCE,
    BATCH_SIZE,
    MAX_ABOUT,
    ActionLog,
    ActionResult,
    EventAction,
    Pace,
    apply_to_batch,
    last_at,
)

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
    about: str = ""  # which events were chosen, for the log
    log_entry: int | None = None  # its entry in the admin's log
    pace: str = AT_ONCE.name
    next_at: str | None = None  # ISO time; when the next event is due, if one by one
    last_at: str = ""  # in words; when the last one so far is due, if one by one
    is_finished: bool = False

    @property
    def processed(self) -> int:
        return self.done + self.skipped

    @property
    def token(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)


def begin(alias: str, *, total: int, is_all: bool, about: Sequence[str] = ()) -> BulkProgress:
    """Return the progress at the beginning. ``about``: which events were chosen, for the log."""
    connection = connections[alias]
    now = dialect_of(connection).clock()
    text = "; ".join(map(str, about))[:MAX_ABOUT]
    return BulkProgress(until=now.isoformat(), total=total, is_all=is_all, about=text)


def resume(token: str) -> BulkProgress:
    """Return the progress in a token; raise ``SuspiciousOperation`` (status 400) if invalid."""
    try:
        return BulkProgress(**signing.loads(token, salt=SALT, max_age=MAX_AGE))
    except (signing.BadSignature, TypeError) as error:
        raise SuspiciousOperation("The state of this bulk action is not valid.") from error


def advance(
    progress: BulkProgress, action: EventAction, rows: OutboxQuerySet, *, user: Any
) -> BulkProgress:
    """Apply the action to the next events for ``SECONDS_PER_REQUEST``; return the progress."""
    until, deadline = _instant(progress.until), time.monotonic() + SECONDS_PER_REQUEST
    events, pace = OutboxEvent.objects.using(rows.db), pace_named(action, progress.pace)
    spacing = pace.spacing(_instant(progress.next_at))
    log = ActionLog(
        action.log_message,
        action.log_flag,
        user,
        about=progress.about,
        entry=progress.log_entry,
        count=progress.done,
    )
    applicable, size = action.applicable(rows), min(action.batch_size, BATCH_SIZE)
    for ids in applicable.batches(size=size, after=progress.after, until=until):
        meant = ids if pace.limit is None else ids[: pace.limit - progress.processed]
        batch = events.filter(pk__in=meant)
        done = apply_to_batch(action, batch, log=log, spacing=spacing)
        progress = replace(
            progress,
            after=ids[-1],
            done=progress.done + done,
            skipped=progress.skipped + len(meant) - done,
            log_entry=log.entry,
            next_at=spacing.next_at.isoformat() if spacing and spacing.next_at else None,
            last_at=last_at(spacing),
        )
        if pace.limit is not None and progress.processed >= pace.limit:
            break
        if time.monotonic() >= deadline:
            return progress
    return replace(progress, is_finished=True)


def apply_at_once(
    action: EventAction, ids: Sequence[str], *, alias: str, user: Any, pace: Pace
) -> ActionResult:
    """Apply the action in batches to those of these events that allow it."""
    valid = [each for each in ids if "\0" not in each]
    rows = OutboxEvent.objects.using(alias).filter(pk__in=valid)
    fit = {*action.applicable(rows).values_list("pk", flat=True)}
    statuses = rows.exclude(pk__in=fit).values_list("status", flat=True)
    others = Counter(statuses if pace.limit is None else ())
    progress = replace(begin(alias, total=len(fit), is_all=True), pace=pace.name)
    while not progress.is_finished:
        progress = advance(progress, action, rows, user=user)
    chosen = len({*ids}) if pace.limit is None else progress.processed
    return ActionResult(
        action=action,
        done=progress.done,
        not_applicable=others,
        unavailable=max(chosen - progress.done - others.total(), 0),
        last_at=progress.last_at,
    )


def _instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def pace_named(action: EventAction, name: str) -> Pace:
    """Return the pace of this name; raise ``SuspiciousOperation`` if the action has none."""
    for each in (*action.paces, AT_ONCE):
        if each.name == name:
            return each
    raise SuspiciousOperation("This action does not have this pace.")
