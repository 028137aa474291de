"""History of attempts: what failed, which workers were lost, and who replayed, for each event."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from django.db import models
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.utils.translation import gettext_lazy as _

from ..conf import index_name, table_name
from ..events import LENGTHS
from .fields import DatabaseNow, ExactCharField, ExactTextField, UTCDateTimeField
from .queryset import TableQuerySet

HISTORY_LENGTH: Final = 20  # entries of one event that are shown, and kept by the daily scan
ENTRIES_PER_DELETE: Final = 1000  # SQLite and PostgreSQL limit the parameters of a statement
BY: Final = 255  # characters of ``by``


class AttemptQuerySet(TableQuerySet["OutboxAttempt"]):
    """Entries of the history.

    Example::

        for entry in OutboxAttempt.objects.of(event_id):
            print(entry.at, entry.kind, entry.by, entry.error)
    """

    table = "outbox_attempt"

    def of(self, event_id: str) -> AttemptQuerySet:
        """Return the entries of one event, newest first."""
        return self.filter(event_id=event_id).order_by("-id")

    def trim(self, event_ids: Collection[str]) -> int:
        """Delete all but the newest ``HISTORY_LENGTH`` entries of each event; return how many."""
        number = Window(RowNumber(), partition_by=F("event_id"), order_by=F("id").desc())
        every = self._all_rows()
        rows = every.filter(event_id__in=event_ids).annotate(place=number)
        return every._delete_ids(
            [*rows.filter(place__gt=HISTORY_LENGTH).values_list("pk", flat=True)]
        )

    def forget(self, event_ids: Collection[str]) -> int:
        """Delete the entries of events that are purged; return how many."""
        every = self._all_rows()
        rows = every.filter(event_id__in=event_ids).values_list("pk", flat=True)
        return every._delete_ids([*rows])

    def note_replays(self, event_ids: Collection[str], *, by: str) -> None:
        """Add an entry for each event that is replayed.

        ``by`` names who replays; it may be empty. Call it in the transaction of the replay.
        """
        self._all_rows().bulk_create(
            OutboxAttempt(
                event_id=each, at=DatabaseNow(), kind=OutboxAttempt.Kind.REPLAYED, by=by[:BY]
            )
            for each in event_ids
        )

    def _delete_ids(self, ids: list[int]) -> int:
        """Delete by primary key: on MySQL, a DELETE by another index locks gaps of it."""
        return sum(
            self.filter(pk__in=ids[start : start + ENTRIES_PER_DELETE])._raw_delete(self.db)
            for start in range(0, len(ids), ENTRIES_PER_DELETE)
        )


class OutboxAttempt(models.Model):
    """One entry in the history of an event: a failed call, a lost worker or a replay.

    ``event_id`` is not a foreign key: a purge of events must not wait for their history.
    """

    class Kind(models.TextChoices):
        FAILED = "failed", _("failed")  # a call that is followed by another, or by a fallback
        DEAD = "dead", _("died")
        LOST = "lost", _("worker lost")
        REPLAYED = "replayed", _("replayed")

    id = models.BigAutoField(primary_key=True)
    event_id = ExactCharField(max_length=LENGTHS["event_id"])
    at = UTCDateTimeField(_("at"))  # by the database's clock
    kind = ExactCharField(_("kind"), max_length=16, choices=Kind.choices)
    number = models.IntegerField(_("number"), default=0)  # of the call, or of the lost worker
    by = ExactCharField(_("by"), max_length=BY, default="")  # the worker, or who replayed
    listener = ExactTextField(_("listener"), default="")  # its title; "" if none was called
    milliseconds = models.IntegerField(_("milliseconds"), null=True)  # in the listener
    error = ExactTextField(_("error"), default="")  # begins with the class, as ``last_error``

    objects = AttemptQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_attempt")
        verbose_name = _("outbox attempt")
        verbose_name_plural = _("outbox attempts")
        default_permissions = ()
        indexes = [models.Index(fields=["event_id", "id"], name=index_name("outbox_attempt_event"))]

    def __str__(self) -> str:
        return f"{self.event_id} {self.get_kind_display()}"
