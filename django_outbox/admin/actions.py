"""Actions of users on events, in batches, with one entry in the admin's log for each action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..models import OutboxEvent, OutboxQuerySet
from ..models.replay import Spacing, lock_streams
from ..sql import dialect_of
from . import display, state_filter
from .changelist import LONG_TEXTS

Apply = Callable[[OutboxQuerySet, str, Spacing | None], int]  # events, who, due times

BATCH_SIZE: Final = 500  # events per transaction; workers and writers never wait long
MAX_NAMED: Final = 200  # events whose ids the entry of an action names
MAX_ABOUT: Final = 1000  # characters of the filters that it names
MAX_REPR: Final = 200  # characters, as in Django


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many events an action applies to, and how fast they are delivered then."""

    name: str
    label: Any  # lazily translated
    rate: str | None = None  # due one after the other; None: all at once
    limit: int | None = None  # events at most, the oldest first

    def spacing(self, start: datetime | None = None) -> Spacing | None:
        """Return the due times of the events, not before ``start``; None: all are due at once."""
        return None if self.rate is None else Spacing(self.rate, start=start)


AT_ONCE: Final = Pace(name="at_once", label=_("All at once"))
PACES: Final = (
    AT_ONCE,
    Pace(name="slowly", label=_("One after the other, 100 a minute"), rate="100/m"),
    Pace(name="first", label=_("Only the first ten"), limit=10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAction:
    """An action that users can apply to events."""

    name: str
    permission: str  # checked on OutboxEvent; one permission may allow several actions
    label: Any  # lazily translated, as are the texts below
    question: Any  # formatted with what ``amount`` says
    hint: Any  # what happens to the deliveries
    log_message: Any
    result_message: Any  # formatted with the number of deliveries
    log_flag: int  # action_flag of the LogEntry
    applicable: Callable[[OutboxQuerySet], OutboxQuerySet]  # selects the events that allow it
    # Finds candidates by an index, without a full scan.
    scan: state_filter.Scan
    apply: Apply
    batch_size: int = BATCH_SIZE  # events per transaction
    paces: tuple[Pace, ...] = ()  # that users may choose from; none: all at once


REPLAY: Final = EventAction(
    name="replay",
    permission="replay",
    label=_("Replay"),
    question=_("Replay %s?"),
    hint=_(
        "They are delivered again as if new: no attempts, due at once, with the same id, payload "
        "and headers. Other listeners of the same events are not called."
    ),
    log_message=_("Replayed."),
    result_message=ngettext_lazy("%d delivery was replayed.", "%d deliveries were replayed."),
    log_flag=CHANGE,
    applicable=OutboxQuerySet.dead,
    scan=state_filter.scan_dead,
    apply=lambda rows, by, spacing: rows.replay(by=by, rate=spacing),
    paces=PACES,
)
DISCARD: Final = EventAction(
    name="discard",
    permission="discard",
    label=_("Discard"),
    question=_("Discard %s?"),
    hint=_("They are deleted and will never be delivered. This cannot be undone."),
    log_message=_("Discarded."),
    result_message=ngettext_lazy("%d delivery was discarded.", "%d deliveries were discarded."),
    log_flag=DELETION,
    applicable=OutboxQuerySet.dead,
    scan=state_filter.scan_dead,
    apply=lambda rows, by, spacing: rows.discard(by=by),
)
RUN_NOW: Final = EventAction(
    name="run_now",
    permission="replay",
    label=_("Run now"),
    question=_("Run %s now?"),
    hint=_(
        "They are due at once instead of waiting for their time or next try. "
        "Attempts keep counting."
    ),
    log_message=_("Made due now."),
    result_message=ngettext_lazy("%d delivery was made due.", "%d deliveries were made due."),
    log_flag=CHANGE,
    applicable=OutboxQuerySet.waiting,
    scan=state_filter.scan_due_later,
    apply=lambda rows, by, spacing: rows.run_now(by=by),
)
SKIP: Final = EventAction(
    name="skip",
    permission="discard",
    label=_("Skip"),
    question=_("Skip %s?"),
    hint=_(
        "They become dead and can be replayed, and the events behind them continue. With ON_DEAD "
        '= "block" they still block the stream: discard them instead.'
    ),
    log_message=_("Skipped."),
    result_message=ngettext_lazy("%d delivery was skipped.", "%d deliveries were skipped."),
    log_flag=CHANGE,
    applicable=OutboxQuerySet.skippable,
    scan=state_filter.scan_due_later,
    apply=lambda rows, by, spacing: rows.skip(by=by),
    batch_size=1,  # a worker may claim the stream at any moment; then nothing is logged
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """The result of an action for the deliveries that a user chose."""

    action: EventAction
    done: int
    unavailable: int  # deleted, locked or changed before the action reached them
    not_applicable: Counter[int] = field(default_factory=Counter)  # by status
    last_at: str = ""  # when the last one is due, if they are due one after the other

    def __str__(self) -> str:
        sentences = [str(self.action.result_message % self.done)]
        if self.last_at:
            text = gettext("They are due one after the other, the last at %s.")
            sentences.append(text % self.last_at)
        if count := self.not_applicable.total():
            by_status = sorted(self.not_applicable.items())
            states = ", ".join(f"{n} {OutboxEvent.Status(each).label}" for each, n in by_status)
            text = ngettext(
                "%(count)d was skipped because of its state: %(states)s.",
                "%(count)d were skipped because of their state: %(states)s.",
                count,
            )
            sentences.append(text % {"count": count, "states": states})
        if self.unavailable:
            sentences.append(
                ngettext(
                    "%d was skipped because it is gone or has changed meanwhile.",
                    "%d were skipped because they are gone or have changed meanwhile.",
                    self.unavailable,
                )
                % self.unavailable
            )
        return " ".join(sentences)


def apply_to_batch(
    action: EventAction, batch: OutboxQuerySet, *, log: ActionLog, spacing: Spacing | None = None
) -> int:
    """Apply the action to one batch; return how many events it changed.

    Lock the events first, so that the log counts exactly those that the action changed. Rows that
    are locked elsewhere are skipped, so that the action does not wait for them.
    """
    connection, rows = connections[batch.db], action.applicable(batch).order_by()
    with dialect_of(connection).read_committed():
        lock_streams(rows)  # first, as writers do
        locked = rows.lock_unlocked()
        events = OutboxEvent.objects.using(batch.db).filter(pk__in=locked)
        logged = list(events.order_by("pk").defer(*LONG_TEXTS)) if locked else []
        count = action.apply(events, log.by, spacing) if locked else 0
        if count:
            log.add(logged)
    return count


def last_at(spacing: Spacing | None) -> str:
    """Return when the last event is due, in words; empty if all are due at once."""
    return display.exact(spacing.last_at) if spacing is not None else ""


class ActionLog:
    """Writes the entry with the first event, and updates it with each further batch.

    One event has its own entry, as any object in the admin. Several share one, which is about none
    of them.
    """

    def __init__(
        self,
        message: Any,
        flag: int,
        user: Any,
        *,
        about: str = "",
        entry: int | None = None,
        count: int = 0,
    ) -> None:
        """``about``: which events were chosen; ``entry``, ``count``: of an action that goes on."""
        self._message, self._flag, self._user, self._about = message, flag, user, about
        self.entry, self.count = entry, count
        self._ids: list[str] = []

    @property
    def by(self) -> str:
        """Return the name of the user."""
        return str(self._user.get_username())

    def add(self, events: Sequence[OutboxEvent]) -> None:
        """Note that the action changed these events. Call it in the transaction of the change."""
        self.count += len(events)
        self._ids += [each.pk for each in events[: MAX_NAMED - len(self._ids)]]
        values = self._for_one(events[0]) if self.count == 1 else self._for_all()
        if self.entry is not None:
            LogEntry.objects.filter(pk=self.entry).update(**values)
            return
        self.entry = LogEntry.objects.create(
            user_id=self._user.pk,
            content_type=ContentType.objects.get_for_model(OutboxEvent),
            action_flag=self._flag,
            **values,
        ).pk

    def _for_one(self, event: OutboxEvent) -> dict[str, Any]:
        text = " ".join(filter(None, [str(self._message), self._about]))
        return {"object_id": event.pk, "object_repr": str(event)[:MAX_REPR], "change_message": text}

    def _for_all(self) -> dict[str, Any]:
        number = amount(self.count)
        more = "" if len(self._ids) >= self.count else ", …"
        which = self._about or ", ".join(self._ids) + more
        text = f"{self._message} {number}: {which}"
        return {"object_id": None, "object_repr": number, "change_message": text}
