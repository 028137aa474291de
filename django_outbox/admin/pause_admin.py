"""Admin of pauses: show what is paused, by whom and why; pause and resume."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.models import DELETION, LogEntry
from django.core.exceptions import ValidationError
from django.db import connections, router, transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import doorbell
from ..events import as_utc
from ..inspection.listeners import unknown_name
from ..models import OutboxPause, PauseQuerySet
from ..models.pause_queryset import pause_error, settable_kinds, until_error
from ..sql import dialect_of
from . import display
from .read_only import INPUT, ReadOnlyAdmin, may


class PauseForm(forms.ModelForm):  # type: ignore[type-arg]
    """Form to pause an event type, a listener, a stream or a queue."""

    force = forms.BooleanField(
        required=False,
        label=_("Pause an unknown name"),
        help_text=_("For a name that comes with the next deploy."),
    )

    until = forms.DateTimeField(
        required=False,
        label=_("Until"),
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    class Meta:
        model = OutboxPause
        fields = ("kind", "name", "until", "reason")
        help_texts = {
            "name": _(
                "Of an event type: the type. Of a listener: its event type and name, as "
                "outbox_status --listeners shows them, with a space between. Of a stream: its "
                "key. Of a queue: its name."
            )
        }
        widgets = {"reason": forms.Textarea(attrs={"rows": 3, "cols": 60})}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, field in self.fields.items():
            if name != "force":
                field.widget.attrs |= INPUT
        kind: Any = self.fields.get("kind")  # not there on the page of a pause, which is read-only
        if kind is not None:
            allowed = {"", *settable_kinds()}
            kind.choices = [each for each in kind.choices if each[0] in allowed]
            self.fields["until"].help_text = (
                gettext(
                    "A worker resumes delivery then (time zone %s). Empty: until you resume it."
                )
                % timezone.get_current_timezone_name()
            )

    def clean(self) -> dict[str, Any]:
        given = super().clean() or {}
        kind, name = given.get("kind"), given.get("name")
        if kind and name and (fault := pause_error(kind, name)):
            raise ValidationError({"name": fault})
        if kind and name and not given.get("force"):
            alias = router.db_for_write(OutboxPause)
            if fault := unknown_name(alias, kind, name):
                hint = gettext("Tick “Pause an unknown name” if it is right.")
                raise ValidationError({"name": f"{fault} {hint}"})
        return given

    def clean_until(self) -> datetime | None:
        if (given := self.cleaned_data["until"]) is None:
            return None
        connection = connections[router.db_for_write(OutboxPause)]
        until = timezone.localtime(as_utc(given))
        if fault := until_error(until, dialect_of(connection).clock()):
            raise ValidationError(fault)
        return until


@admin.display(description=_("paused"))
def since(pause: Any) -> Any:
    return display.since(gettext("%s ago"), pause.paused_at, pause.seen_at)


@admin.display(description=_("until"))
def until(pause: Any) -> Any:
    """Show when a worker resumes; for an open circuit breaker, when one tries the next event."""
    return display.until(pause.until, pause.seen_at)


class OutboxPauseAdmin(ReadOnlyAdmin):
    """Admin of pauses: add one to pause, resume to end it; each needs its own permission.

    An open circuit breaker is shown here, too. It cannot be added, but ended.
    """

    viewed_with = ("pause_outboxpause", "resume_outboxpause")
    form = PauseForm
    list_display = ["__str__", since, until, "paused_by", "reason"]
    list_per_page = 25
    list_max_show_all = 25
    ordering = ["-paused_at", "pk"]
    sortable_by = ()
    actions = ["resume"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may(request, "pause_outboxpause")

    def has_resume_permission(self, request: HttpRequest) -> bool:
        return may(request, "resume_outboxpause")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return ["kind", "name", "until", "reason", "force"]
        return ["kind", "name", "reason", "paused_by", since, until]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Take only kind, name and reason from the query of the URL."""
        given = super().get_changeform_initial_data(request)
        return {key: value for key, value in given.items() if key in ("kind", "name", "reason")}

    # --- pause ------------------------------------------------------------------------------------

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Pause; Django calls this only to add, because pauses cannot be changed."""
        pauses, by = OutboxPause.objects.using(self.alias), request.user.get_username()
        pauses.pause(obj.kind, obj.name, reason=obj.reason, by=by, until=obj.until)
        obj.pk = pauses.get(kind=obj.kind, name=obj.name).pk
        obj._state.adding = False
        self._notify_workers()

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        text = gettext("Paused. %s") % obj.reason
        if obj.until is not None:
            given = {"time": display.exact(obj.until), "reason": obj.reason}
            text = gettext("Paused until %(time)s. %(reason)s") % given
        return super().log_addition(request, obj, text)

    # --- resume -----------------------------------------------------------------------------------

    @admin.action(permissions=["resume"], description=_("Resume"))
    def resume(self, request: HttpRequest, queryset: PauseQuerySet) -> None:
        """End these pauses batch by batch; each batch commits by itself."""
        pauses, by = list(queryset), request.user.get_username()
        for each in pauses:
            if OutboxPause.objects.using(self.alias).filter(pk=each.pk).resume(by=by).pauses:
                user_id: Any = request.user.pk
                LogEntry.objects.log_actions(user_id, [each], DELETION, gettext("Resumed."))
        self._notify_workers()
        text = gettext("Resumed: %s.") % ", ".join(map(str, pauses))
        self.message_user(request, text if pauses else gettext("It is no longer paused."))

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        context["may_resume"] = context["original"] and self.has_resume_permission(request)
        return super().render_change_form(request, context, *args, **options)

    def _notify_workers(self) -> None:
        connection = connections[self.alias]
        transaction.on_commit(lambda: doorbell.ring(connection), using=self.alias)
