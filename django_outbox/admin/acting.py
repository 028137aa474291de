"""What a person does to events: batch by batch, one entry in the admin's log for each event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from .. import dialects
from ..models import OutboxEvent, OutboxQuerySet, unlocked
from . import states
from .listing import LONG

BATCH: Final = 500  # events per transaction, so that workers and writers never wait long


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What a person can do to events."""

    name: str
    permission: str  # a verb's name, for one permission may allow several
    label: Any  # lazily translated, as are the texts below
    asked: Any  # takes the number of events by %
    hint: Any  # what will become of them
    log: Any
    told: Any  # takes the number of events by %
    unfit: Any  # takes the events left alone, and their states
    flag: int  # the kind of LogEntry
    fits: Callable[[OutboxQuerySet], OutboxQuerySet]  # those that it can be done to
    look: Callable[[str, states.Span], states.Found]  # finds them without reading the table
    act: Callable[[OutboxQuerySet], int]
    batch: int = BATCH  # events per transaction


REPLAY: Final = Verb(
    name="replay",
    permission="replay",
    label=_("Replay"),
    asked=ngettext_lazy("Replay %d event?", "Replay %d events?"),
    hint=_(
        "They are delivered again as if new: no attempts, due at once, with the same id, payload "
        "and headers. Listeners of a shared event that are done already are not called again."
    ),
    log=_("Replayed."),
    told=ngettext_lazy("%d event was replayed.", "%d events were replayed."),
    unfit=ngettext_lazy(
        "%(count)d was skipped because it is not dead: %(states)s.",
        "%(count)d were skipped because they are not dead: %(states)s.",
        "count",
    ),
    flag=CHANGE,
    fits=OutboxQuerySet.dead,
    look=states.look_dead,
    act=OutboxQuerySet.replay,
)
DISCARD: Final = Verb(
    name="discard",
    permission="discard",
    label=_("Discard"),
    asked=ngettext_lazy("Discard %d event?", "Discard %d events?"),
    hint=_("They are deleted and will never be delivered. This cannot be undone."),
    log=_("Discarded."),
    told=ngettext_lazy("%d event was discarded.", "%d events were discarded."),
    unfit=REPLAY.unfit,
    flag=DELETION,
    fits=OutboxQuerySet.dead,
    look=states.look_dead,
    act=OutboxQuerySet.discard,
)
RUN_NOW: Final = Verb(
    name="run_now",
    permission="replay",
    label=_("Run now"),
    asked=ngettext_lazy("Run %d event now?", "Run %d events now?"),
    hint=_("They wait no longer for their time or their next try. Attempts go on being counted."),
    log=_("Made due now."),
    told=ngettext_lazy("%d event was made due.", "%d events were made due."),
    unfit=ngettext_lazy(
        "%(count)d was skipped because it does not wait for a time: %(states)s.",
        "%(count)d were skipped because they do not wait for a time: %(states)s.",
        "count",
    ),
    flag=CHANGE,
    fits=OutboxQuerySet.waiting,
    look=states.look_later,
    act=OutboxQuerySet.run_now,
)
EDIT: Final = replace(  # asked by a form instead of a page
    REPLAY,
    name="edit",
    permission="edit",
    label=_("Edit and replay"),
    told=ngettext_lazy("%d event was edited and replayed.", "%d events were edited and replayed."),
)
SKIP: Final = Verb(
    name="skip",
    permission="discard",
    label=_("Skip"),
    asked=ngettext_lazy("Skip %d event?", "Skip %d events?"),
    hint=_(
        "They become dead, so that the events behind them may go on, and can be replayed. With "
        'ON_DEAD = "block" they keep the others waiting all the same: discard them then.'
    ),
    log=_("Skipped."),
    told=ngettext_lazy("%d event was skipped.", "%d events were skipped."),
    unfit=ngettext_lazy(
        "%(count)d was left: it has no key, is finished, or a worker has it: %(states)s.",
        "%(count)d were left: they have no key, are finished, or a worker has them: %(states)s.",
        "count",
    ),
    flag=CHANGE,
    fits=OutboxQuerySet.skippable,
    look=states.look_later,
    act=OutboxQuerySet.skip,
    batch=1,  # a worker may take its stream at any moment: then there is nothing to log
)
FOR_ALL: Final = (REPLAY, RUN_NOW, DISCARD)  # what can be done to all that match a filter
VERBS: Final = (*FOR_ALL, SKIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the events that a person chose."""

    verb: Verb
    done: int
    gone: int  # not there any more, or changed when their turn came
    unfit: Counter[int] = field(default_factory=Counter)  # not for this verb, by status

    def __str__(self) -> str:
        said = [str(self.verb.told % self.done)]
        if count := self.unfit.total():
            found = ", ".join(f"{n} {status_label(each)}" for each, n in sorted(self.unfit.items()))
            said.append(self.verb.unfit % {"count": count, "states": found})
        if self.gone:
            said.append(
                ngettext(
                    "%d was skipped because it is gone or has changed meanwhile.",
                    "%d were skipped because they are gone or have changed meanwhile.",
                    self.gone,
                )
                % self.gone
            )
        return " ".join(said)


def act(verb: Verb, ids: Sequence[str], *, alias: str, user_id: Any) -> Outcome:
    """Do it to those of these events that it fits, batch by batch."""
    named = [*dict.fromkeys(each for each in ids if "\0" not in each)]
    done, unfit = 0, Counter[int]()
    for start in range(0, len(named), verb.batch):
        some = named[start : start + verb.batch]
        batch = OutboxEvent.objects.using(alias).filter(pk__in=some)
        fitting = {*verb.fits(batch).values_list("pk", flat=True)}
        unfit.update(status for pk, status in batch.values_list("pk", "status")
                     if pk not in fitting)  # fmt: skip
        done += act_on(verb, batch, user_id=user_id)
    gone = len({*ids}) - done - unfit.total()
    return Outcome(verb=verb, done=done, unfit=unfit, gone=max(gone, 0))


def act_on(verb: Verb, batch: OutboxQuerySet, *, user_id: Any) -> int:
    """Lock what it fits first, so that the log names exactly the events acted upon.

    What somebody else has locked is left to them: nobody waits here.
    """
    connection = connections[batch.db]
    with dialects.of(connection).read_committed(connection):
        locked = unlocked(verb.fits(batch).order_by(), connection)
        events = OutboxEvent.objects.using(batch.db).filter(pk__in=locked)
        told = list(events.order_by("pk").defer(*LONG)) if locked else []
        count = verb.act(events) if locked else 0
        if count:
            LogEntry.objects.log_actions(user_id, told, verb.flag, str(verb.log))
    return count


def status_label(status: int) -> str:
    return str(dict(OutboxEvent.Status.choices).get(status, gettext("unknown")))
