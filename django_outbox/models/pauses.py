"""Pausing and resuming; what keeps paused rows waiting is SQL of ``dialects``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from django.db import connections, models, router
from django.db.models import Q

from .. import dialects
from ..conf import current
from ..dialects.fields import DatabaseNow
from ..dialects.vocabulary import POSTPONED_FOR
from ..events import ACTIVE
from ..outcomes import UNSETTLED
from ..signals import announce, delivery_paused, delivery_resumed

if TYPE_CHECKING:
    from . import OutboxPause  # noqa: F401 - named in a string below

BATCH: Final = 500  # events that are brought back in one statement
KEYS: Final = 200  # streams that are looked at, and woken, together
LONGEST: Final = 255  # characters of a name

LATER: Final = Q(available_at__gt=DatabaseNow())
LEASED: Final = Q(LATER, locked_by__isnull=False)
POSTPONED: Final = Q(LATER, locked_by=None, locked_at__isnull=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a resume came to."""

    pauses: int  # that are over
    events: int  # that were made due
    streams: int  # the same


class PauseQuerySet(models.QuerySet["OutboxPause"]):
    """``pause`` adds one, ``resume`` ends these; workers heed both within about a second."""

    def pause(self, kind: str, name: str, *, reason: str = "", by: str = "") -> bool:
        """Deliver no event of this type, to this listener or of this stream; False if it is so.

        ``kind`` is ``"event_type"``, ``"listener"`` (``name`` is its title: event type and name) or
        ``"stream"`` (its key). What is running is finished; what waits is neither lost nor counted.

        Raises ``ValueError`` for a kind or name that nothing can have.
        """
        if fault := unfit(kind, name):
            raise ValueError(fault)
        _, is_new = self.using(self._write_alias()).get_or_create(
            kind=kind,
            name=name,
            defaults={"reason": reason, "paused_by": by[:LONGEST], "paused_at": DatabaseNow()},
        )
        if is_new:
            announce(
                delivery_paused, sender=self._write_alias(), kind=kind, name=name, reason=reason,
                by=by,
            )  # fmt: skip
        return is_new

    def resume(self) -> Resumed:
        """End these pauses, and make what waited for them due now, batch by batch.

        Should it be cut short, what is left comes due by itself within ten minutes.
        """
        alias, pauses, events, streams = self._write_alias(), 0, 0, 0
        every = self.model.objects.using(alias)
        for pk, kind, name in self.using(alias).order_by("pk").values_list("pk", "kind", "name"):
            # It waits for whoever is just postponing rows, and who comes later finds it gone.
            if not every.filter(pk=pk).delete()[0]:
                continue
            found = _Waiting(alias, kind, name)
            count = (found.bring_back_events(), found.wake_streams())
            pauses, events, streams = pauses + 1, events + count[0], streams + count[1]
            announce(delivery_resumed, sender=alias, kind=kind, name=name, count=sum(count))
        return Resumed(pauses=pauses, events=events, streams=streams)

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]


def of_pauses(alias: str) -> Q:
    """Return the condition of events that are postponed, or will be with a worker's next look."""
    from . import OutboxPause

    pauses = OutboxPause.objects.using(alias)
    types = pauses.filter(kind="event_type").values("name")
    keys = pauses.filter(kind="stream").values("name")
    return Q(event_type__in=types) | Q(key__in=keys) | POSTPONED


def unfit(kind: str, name: str) -> str | None:
    """Say why nothing can be paused under this kind and name."""
    from . import OutboxPause

    kinds = [*OutboxPause.Kind.values]
    if kind not in kinds:
        return f"The kind is {kind!r}; expected one of {', '.join(kinds)}."
    if not name or "\0" in name or len(name) > LONGEST:
        return f"The name of a {kind} is {name!r}; expected 1 to {LONGEST} characters."
    if kind == "stream" and name == ACTIVE:
        return f"{name!r} is no stream: it is the lease of the mode single_node."
    return None


class _Waiting:
    """What waits for a pause that is over, and perhaps for others."""

    def __init__(self, alias: str, kind: str, name: str) -> None:
        self._alias, self._connection = alias, connections[alias]
        self._kind, self._name = kind, name
        self._dialect = dialects.of(self._connection)
        now = self._dialect.clock(self._connection)
        # Nothing was postponed beyond this, and whoever would do so now knows of the resume.
        self._until = now + timedelta(seconds=max(POSTPONED_FOR, current().LEASE))

    def bring_back_events(self) -> int:
        """Make the events without a key due; what still waits for an event type stays."""
        from . import OutboxEvent, OutboxPause

        if self._kind == "stream":
            return 0
        rows = OutboxEvent.objects.using(self._alias).postponed()
        rows = rows.filter(available_at__lte=self._until)
        if self._kind == "event_type":
            rows = rows.filter(event_type=self._name)
        else:  # whose events a listener gets, only the workers know
            paused = OutboxPause.objects.using(self._alias).filter(kind="event_type")
            rows = rows.exclude(event_type__in=paused.values("name"))
        rows, count, low = rows.order_by("available_at", "event_id"), 0, None
        while True:
            batch = rows if low is None else rows.filter(available_at__gte=low)
            # The due time is asked for apart: PostgreSQL would sort all by what is selected.
            ids = list(batch.values_list("pk", flat=True)[:BATCH])
            if not ids:
                return count
            low = rows.filter(pk=ids[-1]).order_by().values_list("available_at", flat=True).first()
            count += self._dialect.bring_back(self._connection, ids=ids)

    def wake_streams(self) -> int:
        """Make the streams due whose heads waited; their new version undoes a late put-off."""
        from . import OutboxStream

        streams = OutboxStream.objects.using(self._alias).real()
        if self._kind == "stream":
            return self._wake([*streams.filter(pk=self._name).values_list("pk", flat=True)])
        # Leased ones too: their worker may have read them when they were still paused.
        waiting = streams.filter(due_at__gt=DatabaseNow(), due_at__lte=self._until)
        keys = [*waiting.order_by("pk").values_list("pk", flat=True)]
        return sum(
            self._wake(self._with_heads(keys[start : start + KEYS]))
            for start in range(0, len(keys), KEYS)
        )

    def _with_heads(self, keys: Sequence[str]) -> list[str]:
        """Return those of these streams whose first event may have waited."""
        from . import OutboxEvent

        heads = self._dialect.heads(self._connection, keys=keys, statuses=UNSETTLED)
        events = OutboxEvent.objects.using(self._alias).filter(pk__in=[*heads.values()])
        if self._kind == "event_type":
            events = events.filter(event_type=self._name)
        found = {*events.values_list("pk", flat=True)}
        return [key for key, event_id in heads.items() if event_id in found]

    def _wake(self, keys: Sequence[str]) -> int:
        if keys:
            self._dialect.wake(self._connection, keys)
        return len(keys)
