"""Actions of users on events, in batches, with one entry in the admin's log for each event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import connections
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..models import OutboxEvent, OutboxQuerySet
from ..sql import dialect_of
from . import state_filter
from .changelist import LONG

BATCH: Final = 500  # events per transaction; workers and writers never wait long


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """An action that users can apply to events."""

    name: str
    permission: str  # the name of a verb; one permission may allow several verbs
    label: Any  # lazily translated, as are the texts below
    asked: Any  # formatted with the number of events
    hint: Any  # what happens to the events
    log: Any
    told: Any  # formatted with the number of events
    unfit: Any  # formatted with the number of skipped events and their states
    flag: int  # action_flag of the LogEntry
    fits: Callable[[OutboxQuerySet], OutboxQuerySet]  # selects the events that allow it
    # Finds these events without a full scan.
    look: Callable[[str, state_filter.Span], state_filter.Found]
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
    look=state_filter.look_dead,
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
    look=state_filter.look_dead,
    act=OutboxQuerySet.discard,
)
RUN_NOW: Final = Verb(
    name="run_now",
    permission="replay",
    label=_("Run now"),
    asked=ngettext_lazy("Run %d event now?", "Run %d events now?"),
    hint=_(
        "They are due at once instead of waiting for their time or next try. "
        "Attempts keep counting."
    ),
    log=_("Made due now."),
    told=ngettext_lazy("%d event was made due.", "%d events were made due."),
    unfit=ngettext_lazy(
        "%(count)d was skipped because it does not wait for a time: %(states)s.",
        "%(count)d were skipped because they do not wait for a time: %(states)s.",
        "count",
    ),
    flag=CHANGE,
    fits=OutboxQuerySet.waiting,
    look=state_filter.look_later,
    act=OutboxQuerySet.run_now,
)
EDIT: Final = replace(  # confirmed by a form, not by a confirmation page
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
        "They become dead and can be replayed, and the events behind them continue. With ON_DEAD "
        '= "block" they still block the stream: discard them instead.'
    ),
    log=_("Skipped."),
    told=ngettext_lazy("%d event was skipped.", "%d events were skipped."),
    unfit=ngettext_lazy(
        "%(count)d was skipped because it has no key, is finished, or is held by a worker: "
        "%(states)s.",
        "%(count)d were skipped because they have no key, are finished, or are held by a worker: "
        "%(states)s.",
        "count",
    ),
    flag=CHANGE,
    fits=OutboxQuerySet.skippable,
    look=state_filter.look_later,
    act=OutboxQuerySet.skip,
    batch=1,  # a worker may claim the stream at any moment; then nothing is logged
)
FOR_ALL: Final = (REPLAY, RUN_NOW, DISCARD)  # verbs for all events that match a filter
VERBS: Final = (*FOR_ALL, SKIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a verb for the events that a user chose."""

    verb: Verb
    done: int
    gone: int  # deleted, locked or changed before the verb reached them
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
    """Apply the verb in batches to those of these events that allow it."""
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
    """Apply the verb to one batch; return how many events it changed.

    Lock the events first, so that the log names exactly those that the verb changed. Rows that
    are locked elsewhere are skipped, so that the verb does not wait for them.
    """
    connection = connections[batch.db]
    with dialect_of(connection).read_committed(connection):
        locked = verb.fits(batch).order_by().lock_unlocked()
        events = OutboxEvent.objects.using(batch.db).filter(pk__in=locked)
        told = list(events.order_by("pk").defer(*LONG)) if locked else []
        count = verb.act(events) if locked else 0
        if count:
            LogEntry.objects.log_actions(user_id, told, verb.flag, str(verb.log))
    return count


def status_label(status: int) -> str:
    return str(dict(OutboxEvent.Status.choices).get(status, gettext("unknown")))
