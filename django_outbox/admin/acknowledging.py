"""Form to acknowledge a cause of dead events until a time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

MORNING: Final = 9  # o'clock: until then a cause is known unless another time is given
MAX_DAYS: Final = 30  # for which a cause can be acknowledged


class AcknowledgementForm(forms.Form):
    """Until when a cause is known, in the current time zone."""

    until = forms.DateTimeField(
        label=_("Known until"),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    def __init__(self, now: datetime, data: Any = None) -> None:
        super().__init__(data)
        self._now = now
        field: Any = self.fields["until"]
        field.initial = next_morning(now)
        field.help_text = gettext("In the time zone %s.") % timezone.get_current_timezone_name()

    def clean_until(self) -> datetime:
        until: datetime = self.cleaned_data["until"]
        if timezone.is_naive(until):  # with USE_TZ=False
            until = timezone.make_aware(until)
        if not self._now < until <= self._now + timedelta(days=MAX_DAYS):
            text = gettext("Expected a time in the future, at most %d days ahead.")
            raise ValidationError(text % MAX_DAYS)
        return until


def next_morning(now: datetime) -> datetime:
    """Return when it is next nine o'clock, as a naive time in the current time zone."""
    local = timezone.make_naive(now)
    today = local.replace(hour=MORNING, minute=0, second=0, microsecond=0)
    return today if today > local else today + timedelta(days=1)
