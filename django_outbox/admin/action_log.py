"""The admin's log: one entry for all events that an action of a user changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils.translation import ngettext

from ..models import OutboxEvent

MAX_NAMED: Final = 200  # events whose ids the entry of an action names
MAX_ABOUT: Final = 1000  # characters of the filters that it names
MAX_REPR: Final = 200  # characters, as in Django


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
        entry = LogEntry.objects.create(
            user_id=self._user.pk,
            content_type=ContentType.objects.get_for_model(OutboxEvent),
            action_flag=self._flag,
            **values,
        )
        self.entry = entry.pk

    def _for_one(self, event: OutboxEvent) -> dict[str, Any]:
        text = " ".join(filter(None, [str(self._message), self._about]))
        return {"object_id": event.pk, "object_repr": str(event)[:MAX_REPR], "change_message": text}

    def _for_all(self) -> dict[str, Any]:
        number = ngettext("%d event", "%d events", self.count) % self.count
        more = "" if len(self._ids) >= self.count else ", …"
        which = self._about or ", ".join(self._ids) + more
        text = f"{self._message} {number}: {which}"
        return {"object_id": None, "object_repr": number, "change_message": text}
