"""Replay and discard by a person: dead events only, one entry in the admin's log for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import transaction
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..models import OutboxEvent, OutboxQuerySet
from ..outcomes import Status
from .listing import LIMIT, LONG

BATCH: Final = 500  # events per transaction, so that workers and writers never wait long


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What a person can do to dead events; its name is that of the permission, too."""

    name: str
    label: Any  # lazily translated, as are the next two
    log: Any
    told: Any  # takes the number of events by %
    flag: int  # the kind of LogEntry
    act: Callable[[OutboxQuerySet], int]


REPLAY: Final = Verb(
    name="replay",
    label=_("Replay"),
    log=_("Replayed."),
    told=ngettext_lazy("%d event was replayed.", "%d events were replayed."),
    flag=CHANGE,
    act=OutboxQuerySet.replay,
)
DISCARD: Final = Verb(
    name="discard",
    label=_("Discard"),
    log=_("Discarded."),
    told=ngettext_lazy("%d event was discarded.", "%d events were discarded."),
    flag=DELETION,
    act=OutboxQuerySet.discard,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the events that a person chose."""

    verb: Verb
    done: int
    alive: Counter[int]  # chosen but not dead, by status
    gone: int  # not there any more, or dead no longer when its turn came
    is_all: bool  # False: LIMIT was reached, and there may be more

    def __str__(self) -> str:
        said = [str(self.verb.told % self.done), *self._skipped()]
        if not self.is_all:
            said.append(gettext("There may be more; do it again to go on."))
        return " ".join(said)

    def _skipped(self) -> list[str]:
        said = []
        if count := self.alive.total():
            states = ", ".join(f"{n} {_label(status)}" for status, n in sorted(self.alive.items()))
            said.append(
                ngettext(
                    "%(count)d was skipped because it is not dead: %(states)s.",
                    "%(count)d were skipped because they are not dead: %(states)s.",
                    count,
                )
                % {"count": count, "states": states}
            )
        if self.gone:
            said.append(
                ngettext(
                    "%d was skipped because it is gone or no longer dead.",
                    "%d were skipped because they are gone or no longer dead.",
                    self.gone,
                )
                % self.gone
            )
        return said


def act(verb: Verb, chosen: OutboxQuerySet, *, asked: int, user_id: Any) -> Outcome:
    """Do it to the dead events among those chosen, in batches, at most LIMIT.

    ``asked`` is the number of events that were named; those not among ``chosen`` count as gone.
    """
    status = chosen.order_by("pk").values_list("pk", "status")
    dead = [pk for pk, _status in status.filter(status=Status.DEAD)[:LIMIT]]
    alive = Counter(found for _pk, found in status.exclude(status=Status.DEAD)[:LIMIT])
    done = sum(
        _act(verb, chosen.db, dead[start : start + BATCH], user_id=user_id)
        for start in range(0, len(dead), BATCH)
    )
    return Outcome(
        verb=verb,
        done=done,
        alive=alive,
        gone=max(asked - alive.total(), len(dead)) - done,
        is_all=len(dead) < LIMIT,
    )


def _act(verb: Verb, alias: str, ids: Sequence[str], *, user_id: Any) -> int:
    """Lock what is still dead first, so that the log names exactly the events acted upon."""
    rows = OutboxEvent.objects.using(alias)
    with transaction.atomic(using=alias):
        dead = rows.dead().filter(pk__in=ids).order_by("pk").defer(*LONG)
        locked = list(dead.select_for_update())
        if locked:
            LogEntry.objects.log_actions(user_id, locked, verb.flag, str(verb.log))
            verb.act(rows.filter(pk__in=[event.pk for event in locked]))
    return len(locked)


def _label(status: int) -> str:
    return str(dict(OutboxEvent.Status.choices).get(status, status))
