"""Actions of users on events that they have ticked, and how the admin speaks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..models import OutboxEvent, OutboxOperation, OutboxQuerySet, bulk, operation
from ..models.queryset import by_death
from ..models.replay import BATCH_SIZE, Spacing
from . import display
from .changelist import LONG_TEXTS

Kind: Final = OutboxOperation.Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAction:
    """An action that users can apply to events."""

    kind: OutboxOperation.Kind
    permission: str  # of the outbox; one may allow several actions
    label: Any  # lazily translated, as are the texts below
    question: Any  # formatted with what ``amount`` says
    hint: Any  # what happens to the deliveries
    log_message: Any  # in the admin's log of one event
    result_message: Any  # formatted with the number of deliveries
    log_flag: int = CHANGE  # action_flag of the LogEntry

    @property
    def name(self) -> str:
        return str(self.kind.value)

    def applicable(self, rows: OutboxQuerySet) -> OutboxQuerySet:
        """Return the events among these that allow it."""
        return bulk.APPLICABLE[self.kind](rows)

    def found(self, rows: OutboxQuerySet) -> OutboxQuerySet:
        """Return the same, by an index if there is one, of rows that are not chosen by their id."""
        return by_death(rows) if self in (REPLAY, DISCARD) else self.applicable(rows)


REPLAY: Final = EventAction(
    kind=Kind.REPLAY,
    permission="replay_outboxevent",
    label=_("Replay"),
    question=_("Replay %s?"),
    hint=_(
        "They are delivered again as if new: no attempts, due at once, with the same id, payload "
        "and headers. Other listeners of the same events are not called."
    ),
    log_message=_("Replayed."),
    result_message=ngettext_lazy("%d delivery was replayed.", "%d deliveries were replayed."),
)
DISCARD: Final = EventAction(
    kind=Kind.DISCARD,
    permission="discard_outboxevent",
    label=_("Discard"),
    question=_("Discard %s?"),
    hint=_("They are deleted and will never be delivered. This cannot be undone."),
    log_message=_("Discarded."),
    result_message=ngettext_lazy("%d delivery was discarded.", "%d deliveries were discarded."),
    log_flag=DELETION,
)
RUN_NOW: Final = EventAction(
    kind=Kind.RUN_NOW,
    permission="replay_outboxevent",
    label=_("Run now"),
    question=_("Run %s now?"),
    hint=_(
        "They are due at once instead of waiting for their time or next try. "
        "Attempts keep counting."
    ),
    log_message=_("Made due now."),
    result_message=ngettext_lazy("%d delivery was made due.", "%d deliveries were made due."),
)
SKIP: Final = EventAction(
    kind=Kind.SKIP,
    permission="discard_outboxevent",
    label=_("Skip"),
    question=_("Skip %s?"),
    hint=_(
        "They become dead and can be replayed, and the events behind them continue. With ON_DEAD "
        '= "block" they still block the stream: discard them instead.'
    ),
    log_message=_("Skipped."),
    result_message=ngettext_lazy("%d delivery was skipped.", "%d deliveries were skipped."),
)
BULK_ACTIONS: Final = (REPLAY, RUN_NOW, DISCARD)  # actions for all events that match a filter
ACTIONS: Final = (*BULK_ACTIONS, SKIP)


def amount(deliveries: int, events: int | None = None) -> str:
    """Say how many deliveries there are, and of how many events if these are fewer."""
    text = ngettext("%d delivery", "%d deliveries", deliveries) % deliveries
    if events is None or events == deliveries:
        return text
    text_of = ngettext(
        "%(deliveries)s of %(events)d event", "%(deliveries)s of %(events)d events", events
    )
    return text_of % {"deliveries": text, "events": events}


def chosen(ids: Iterable[str], alias: str) -> OutboxQuerySet:
    valid = {each for each in ids if "\0" not in each}  # which PostgreSQL rejects
    return OutboxEvent.objects.using(alias).filter(pk__in=valid)


def apply_at_once(
    action: EventAction, ids: Sequence[str], *, alias: str, user: Any, rate: str | None
) -> tuple[int, str]:
    """Apply the action in batches to those of these events that allow it.

    The log of operations gets one row. One event gets an entry in the admin's log, too. Return how
    many deliveries the action changed, and what to say to the user.
    """
    events, rows = OutboxEvent.objects.using(alias), chosen(ids, alias)
    fit = sorted(action.applicable(rows).values_list("pk", flat=True))
    others = Counter(rows.exclude(pk__in=fit).values_list("status", flat=True))
    one = [*rows.filter(pk__in=fit[:2]).defer(*LONG_TEXTS)]
    act = operation.acting(action.kind, user.get_username(), ", ".join(fit))
    done, spacing = 0, Spacing(rate) if rate else None
    # A worker may claim the stream at any moment; then nothing is logged.
    size = 1 if action is SKIP else BATCH_SIZE
    for start in range(0, len(fit), size):
        batch = events.filter(pk__in=fit[start : start + size])
        done += bulk.apply_to_batch(batch, act, spacing)
    if done and len(one) == 1:
        LogEntry.objects.log_actions(
            user.pk, one, action.log_flag, str(action.log_message), single_object=True
        )
    sentences = [str(action.result_message % done)]
    if spacing and (last_at := display.exact(spacing.last_at)):
        sentences.append(gettext("They are due one after the other, the last at %s.") % last_at)
    # Others were deleted, locked or changed before the action reached them.
    sentences += _left_out(others, max(len({*ids}) - done - others.total(), 0))
    return done, " ".join(sentences)


def _left_out(by_status: Counter[int], unavailable: int) -> Iterator[str]:
    if count := by_status.total():
        states = (f"{n} {OutboxEvent.Status(each).label}" for each, n in sorted(by_status.items()))
        text = ngettext(
            "%(count)d was skipped because of its state: %(states)s.",
            "%(count)d were skipped because of their state: %(states)s.",
            count,
        )
        yield text % {"count": count, "states": ", ".join(states)}
    if unavailable:
        text = ngettext(
            "%d was skipped because it is gone or has changed meanwhile.",
            "%d were skipped because they are gone or have changed meanwhile.",
            unavailable,
        )
        yield text % unavailable
