"""Acknowledged causes of dead events: known until a time, so that they need no attention."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..conf import table_name
from .fields import DatabaseNow, ExactCharField, UTCDateTimeField
from .queryset import TableQuerySet

BY: Final = 255  # characters of ``by``


class AcknowledgementQuerySet(TableQuerySet["OutboxAcknowledgement"]):
    """Acknowledgements; each ends by itself at its time, by the database's clock.

    Example::

        cause = load_causes("default", limit=1).causes[0]
        OutboxAcknowledgement.objects.acknowledge(cause.digest, until=tomorrow, by="ada")
    """

    table = "outbox_acknowledgement"

    def active(self) -> AcknowledgementQuerySet:
        """Return the acknowledgements that have not ended."""
        return self.filter(until__gt=DatabaseNow())

    def acknowledge(self, digest: str, *, until: datetime, by: str = "") -> None:
        """Acknowledge a cause, in place of what was said of it before; delete those that ended."""
        every = self._all_rows()
        every.filter(until__lte=DatabaseNow()).delete()
        given = {"until": until, "by": by[:BY], "at": DatabaseNow()}
        every.update_or_create(digest=digest, defaults=given)


class OutboxAcknowledgement(models.Model):
    """A cause of dead events that is known until a time."""

    digest = ExactCharField(max_length=32, primary_key=True)  # of the cause; see inspection.causes
    until = UTCDateTimeField(_("until"))
    at = UTCDateTimeField(_("at"))
    by = ExactCharField(_("by"), max_length=BY, default="")

    objects = AcknowledgementQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_acknowledgement")
        verbose_name = _("acknowledged cause")
        verbose_name_plural = _("acknowledged causes")
        default_permissions = ()  # who may replay may acknowledge

    def __str__(self) -> str:
        return str(self.digest)
