"""Actions on all events that match a filter, in short steps; the user can stop after each."""

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
from .actions import BATCH, Verb, act_on

STEP: Final = 2.0  # seconds of work in one request
SALT: Final = "django_outbox.walk"
MONTH: Final = 30 * 86400  # seconds for which a bulk action can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Progress of a bulk action; the browser keeps it, signed, from step to step."""

    until: str  # ISO time; later deaths are left out, or events that die again would repeat
    total: int  # events that matched at the beginning
    is_all: bool  # False: more events matched
    after: str = ""  # the last id that was processed
    done: int = 0
    skipped: int = 0  # locked elsewhere, or changed before the action reached them
    is_over: bool = False

    @property
    def seen(self) -> int:
        return self.done + self.skipped

    @property
    def token(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)


def begin(alias: str, *, total: int, is_all: bool) -> Walk:
    connection = connections[alias]
    now = dialect_of(connection).clock(connection)
    return Walk(until=now.isoformat(), total=total, is_all=is_all)


def taken_up(token: str) -> Walk:
    """Return the progress in a token; raise ``SuspiciousOperation`` (status 400) if invalid."""
    try:
        return Walk(**signing.loads(token, salt=SALT, max_age=MONTH))
    except (signing.BadSignature, TypeError) as error:
        raise SuspiciousOperation("The state of this bulk action is not valid.") from error


def step(walk: Walk, verb: Verb, rows: OutboxQuerySet, *, user_id: Any) -> Walk:
    """Act on the next events for ``STEP`` seconds, at least one batch; return the progress."""
    until, ends = datetime.fromisoformat(walk.until), time.monotonic() + STEP
    events = OutboxEvent.objects.using(rows.db)
    for ids in verb.fits(rows).batches(size=BATCH, after=walk.after, until=until):
        done = act_on(verb, events.filter(pk__in=ids), user_id=user_id)
        walk = replace(
            walk,
            after=ids[-1],
            done=walk.done + done,
            skipped=walk.skipped + len(ids) - done,
        )
        if time.monotonic() >= ends:
            return walk
    return replace(walk, is_over=True)
