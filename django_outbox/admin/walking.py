"""Acting on all events that a filter names: in short steps, after each of which one can stop."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from django.core import signing
from django.core.exceptions import SuspiciousOperation
from django.db import connections

from .. import dialects
from ..models import OutboxEvent, OutboxQuerySet
from .acting import BATCH, Verb, act_on

STEP: Final = 2.0  # seconds of one request
SALT: Final = "django_outbox.walk"
MONTH: Final = 30 * 86400  # seconds for which a walk can be taken up again


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How far a walk has come; the visitor's browser keeps it, signed, from step to step."""

    until: str  # what ended later is left out: so the walk ends, though events die again
    total: int  # how many there were when it began
    is_all: bool  # False: there were more
    after: str = ""  # the last id that was looked at
    done: int = 0
    skipped: int = 0  # locked by somebody else, or changed when their turn came
    is_over: bool = False

    @property
    def seen(self) -> int:
        return self.done + self.skipped

    @property
    def token(self) -> str:
        return signing.dumps(asdict(self), salt=SALT, compress=True)


def begin(alias: str, *, total: int, is_all: bool) -> Walk:
    connection = connections[alias]
    now = dialects.of(connection).clock(connection)
    return Walk(until=now.isoformat(), total=total, is_all=is_all)


def taken_up(token: str) -> Walk:
    """Return a walk where it was left; ``SuspiciousOperation`` (status 400) if it is none."""
    try:
        return Walk(**signing.loads(token, salt=SALT, max_age=MONTH))
    except (signing.BadSignature, TypeError) as error:
        raise SuspiciousOperation("The state of this walk is not one that we gave.") from error


def step(walk: Walk, verb: Verb, rows: OutboxQuerySet, *, user_id: Any) -> Walk:
    """Act on the next of these, for STEP seconds and at least one batch."""
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
