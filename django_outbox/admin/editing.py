"""Form to edit and replay a dead event, validated by the code that ``write`` uses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from django import forms
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import ValidationError
from django.db import connections
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import hooks
from ..conf import current
from ..events import Event
from ..exceptions import InvalidEvent, PayloadError
from ..models import OutboxEvent
from ..sql import dialect_of
from ..writing.write import serialize
from . import display, edit_diff, redaction
from .actions import EventAction

MAX_PAYLOAD_LENGTH: Final = 500_000  # characters of a payload that a form can hold
FIELDS: Final = ("payload", "headers")
CONFIRMED: Final = "confirmed"  # form field: the user has seen what changes
AGAIN: Final = "again"  # form field: the user wants to change more


class EventForm(forms.Form):
    """Payload and headers as text; numbered masks stand for hidden values and are put back."""

    payload = forms.CharField(
        label=_("payload"), strip=False, widget=forms.Textarea(attrs={"rows": 20, "cols": 100})
    )
    headers = forms.CharField(
        label=_("headers"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 6, "cols": 100}),
        help_text=_("An object whose values are strings; leave it empty for none."),
    )
    seen = forms.CharField(widget=forms.HiddenInput)  # digest of the row when it was shown

    def __init__(self, event: OutboxEvent, data: Any = None) -> None:
        self._event, self._secrets = event, dict[str, list[Any]]()
        shown = {name: self._masked(name) for name in FIELDS}
        super().__init__(data, initial={**shown, "seen": digest(event)})

    def clean_payload(self) -> str:
        return self._restored("payload")

    def clean_headers(self) -> str:
        return self._restored("headers")

    def clean(self) -> None:
        """Build an event as ``write`` does, so that only a valid one is saved."""
        if not self.errors:
            try:
                self.texts = serialize(self._new_event())
            except (InvalidEvent, PayloadError) as error:
                raise ValidationError(str(error)) from error

    def _new_event(self) -> Event:
        text, event_type = self.cleaned_data["payload"], self._event.event_type
        headers = _headers(self.cleaned_data["headers"])
        serializer = hooks.serializer()
        if serializer is hooks.JSON:
            return Event.from_json(event_type, text, headers=headers)
        return Event(event_type=event_type, payload=serializer.loads(text), headers=headers)

    def _masked(self, name: str) -> str:
        text = getattr(self._event, name) or ""
        self._secrets[name] = []
        try:
            value, self._secrets[name] = redaction.hide_numbered(redaction.parse(text))
        except (ValueError, RecursionError):  # not JSON: hidden values cannot be found in it
            return "" if current().REDACT else text
        return redaction.dump(value, "  ")

    def _restored(self, name: str) -> str:
        text = str(self.cleaned_data[name])
        try:
            value = redaction.parse(text)
        except (ValueError, RecursionError) as error:
            if name == "payload" and hooks.serializer() is hooks.JSON:
                raise ValidationError(gettext("This is not JSON: %s.") % error) from error
            return text
        try:
            return redaction.dump(redaction.restore(value, self._secrets[name]))
        except ValueError as error:
            message = gettext(
                "%(name)s contains a mask that matches no hidden value. Leave masks where they "
                "were, or replace them with a new value."
            )
            raise ValidationError(message % {"name": error}) from error


def changes(event: OutboxEvent, form: EventForm) -> list[tuple[Any, edit_diff.Diff]]:
    """Return the name of each text that a valid form changes, and what it changes."""
    stored = zip(FIELDS, form.texts, strict=True)
    found = [
        (form.fields[name].label, edit_diff.compare(getattr(event, name), text))
        for name, text in stored
    ]
    return [each for each in found if not each[1].is_empty]


def can_be_edited(event: OutboxEvent) -> bool:
    return len(event.payload) <= MAX_PAYLOAD_LENGTH


def digest(event: OutboxEvent) -> str:
    return hashlib.sha256(repr([event.payload, event.headers]).encode()).hexdigest()


def save(event_id: str, form: EventForm, *, action: EventAction, alias: str, user: Any) -> bool:
    """Change and replay the event; return whether that was done.

    It is not if the event is locked, not dead any more, or changed since the form was shown. The
    admin log keeps the old payload and headers, without the values that REDACT hides.
    """
    connection = connections[alias]
    payload, headers = form.texts
    rows = OutboxEvent.objects.using(alias).filter(pk=event_id)
    with dialect_of(connection).read_committed(connection):
        if not rows.dead().order_by().lock_unlocked():
            return False
        before = rows.get()
        if digest(before) != form.cleaned_data["seen"]:
            return False
        message = gettext(
            "Edited and replayed. Payload before: %(payload)s Headers before: %(headers)s"
        )
        old = {name: display.redacted(getattr(before, name) or "") or "–" for name in FIELDS}
        rows.edit(payload=payload, headers=headers)
        action.apply(rows, user.get_username(), None)
        LogEntry.objects.log_actions(user.pk, [before], CHANGE, message % old)
    return True


def _headers(text: str) -> dict[str, Any]:
    """Parse the headers; raise ``InvalidEvent``. ``Event`` itself validates names and values."""
    if not text.strip():
        return {}
    try:
        value = redaction.parse(text)
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(gettext("The headers are not JSON: %s.") % error) from error
    if not isinstance(value, redaction.Pairs) or len({k for k, _v in value}) < len(value):
        raise InvalidEvent(gettext("Headers must be a JSON object with unique keys."))
    not_text: Sequence[Any] = [k for k, v in value if not _is_text(v)]
    if not_text:
        raise InvalidEvent(gettext("The header %r is not text; put it in quotes.") % not_text[0])
    return dict(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, redaction.Number)
