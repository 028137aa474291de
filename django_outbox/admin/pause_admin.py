"""Admin of pauses: show what is paused, by whom, why and its backlog; pause and resume."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connections, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from .. import doorbell
from ..events import as_utc
from ..inspection.pauses import backlogs, known_names, unknown_name
from ..models import OutboxPause, PauseQuerySet
from ..models.fields import DatabaseNow
from ..models.pause_queryset import pause_error, settable_kinds, until_error
from ..sql import dialect_of
from ..sql.values import CLOSING_KINDS
from . import display
from .read_only import ReadOnlyAdmin


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
                "outbox_listeners shows them, with a space between. Of a stream: its key. Of a "
                "queue: its name."
            )
        }
        widgets = {
            "name": forms.TextInput(attrs={"class": "vTextField", "list": "outbox-names"}),
            "reason": forms.Textarea(attrs={"rows": 3, "cols": 60}),
        }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
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
        if fault := until_error(until, dialect_of(connection).clock(connection)):
            raise ValidationError(fault)
        return until


class PauseList(ChangeList):
    """Change list of pauses, each with its backlog."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        pauses = list(self.result_list)
        set_backlogs(pauses)
        self.result_list = pauses


def set_backlogs(pauses: list[Any]) -> None:
    """Set the backlog of these pauses, with one lookup for all of them."""
    if pauses:
        found = backlogs(router.db_for_write(OutboxPause), pauses)
        for each in pauses:
            each.backlog = found[each.pk]


@admin.display(description=_("waiting"))
def waiting(pause: Any) -> str:
    more = "" if pause.backlog.is_all else "+"
    events, streams = pause.backlog.events, pause.backlog.streams
    text = ngettext("%(count)d%(more)s event", "%(count)d%(more)s events", events)
    parts = [text % {"count": events, "more": more}]
    if streams:
        text = ngettext("%(count)d%(more)s stream", "%(count)d%(more)s streams", streams)
        parts.append(text % {"count": streams, "more": more})
    return ", ".join(parts)


@admin.display(description=_("paused"))
def since(pause: Any) -> Any:
    return display.since(gettext("%s ago"), pause.paused_at, pause.seen_at)


@admin.display(description=_("until"))
def until(pause: Any) -> Any:
    """Show when a worker resumes; for an open circuit breaker, when one tries the next event."""
    return display.until(pause.until, pause.seen_at)


@admin.display(description=_("name"))
def name(pause: Any) -> str:
    return format_html('<span class="outbox-id">{}</span>', pause.name)


class OutboxPauseAdmin(ReadOnlyAdmin):
    """Admin of pauses: add one to pause, resume to end it; each needs its own permission.

    An open circuit breaker is shown here, too. It cannot be added, but ended.
    """

    form = PauseForm
    list_display = ["__str__", since, until, "paused_by", waiting, "reason"]
    list_per_page = 25
    list_max_show_all = 25
    ordering = ["-paused_at", "pk"]
    sortable_by = ()
    actions = ["resume"]
    change_form_template = "admin/django_outbox/outboxpause/change_form.html"

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_outbox.pause_outboxpause")

    def has_resume_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_outbox.resume_outboxpause")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow users who may pause or resume to see what is paused."""
        may_view = super().has_view_permission(request, obj)
        return may_view or self.has_add_permission(request) or self.has_resume_permission(request)

    def get_queryset(self, request: HttpRequest) -> PauseQuerySet:
        pauses = cast("PauseQuerySet", super().get_queryset(request))
        return pauses.annotate(seen_at=DatabaseNow())

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            set_backlogs([found])
        return found

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[PauseList]:
        return PauseList

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return ["kind", "name", "until", "reason", "force"]
        by = () if obj.kind == OutboxPause.Kind.BREAKER else ("paused_by",)
        end = () if obj.until is None else (until,)
        return ["kind", name, "reason", (since, *by, *end), waiting]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Take only kind, name and reason from the query of the URL."""
        given = super().get_changeform_initial_data(request)
        return {key: value for key, value in given.items() if key in ("kind", "name", "reason")}

    # --- pause ------------------------------------------------------------------------------------

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Pause; Django calls this only to add, because pauses cannot be changed."""
        pauses = self._pauses()
        by = request.user.get_username()
        pauses.pause(obj.kind, obj.name, reason=obj.reason, by=by, until=obj.until)
        found = pauses.get(kind=obj.kind, name=obj.name)
        obj.pk, obj.paused_at, obj.paused_by = found.pk, found.paused_at, found.paused_by
        obj._state.adding = False

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        text = gettext("Paused. %s") % obj.reason
        if obj.until is not None:
            given = {"time": display.exact(obj.until), "reason": obj.reason}
            text = gettext("Paused until %(time)s. %(reason)s") % given
        return super().log_addition(request, obj, text)

    def response_add(
        self, request: HttpRequest, obj: Any, post_url_continue: str | None = None
    ) -> HttpResponse:
        self._notify_workers()
        text = gettext("Paused: %s.") % obj
        if obj.until is not None:
            given = {"pause": obj, "time": display.clock(obj.until, obj.paused_at)}
            text = gettext("Paused until %(time)s: %(pause)s.") % given
        self.message_user(request, text, messages.SUCCESS)
        return HttpResponseRedirect(self._url("changelist"))

    # --- resume -----------------------------------------------------------------------------------

    @admin.action(permissions=["resume"], description=_("Resume"))
    def resume(self, request: HttpRequest, queryset: PauseQuerySet) -> None:
        events = streams = 0
        pauses = list(queryset)
        for each in pauses:
            done = self._pauses().filter(pk=each.pk).resume()
            if done.pauses:
                self._log(request, each)
            events, streams = events + done.events, streams + done.streams
        self._notify_workers()
        if all(each.kind in CLOSING_KINDS for each in pauses):  # their events were due all along
            message = gettext("Resumed: %(names)s.")
        else:
            message = gettext(
                "Resumed: %(names)s. Due now: %(events)d events, %(streams)d streams."
            )
        names = ", ".join(map(str, pauses))
        text = message % {"names": names, "events": events, "streams": streams}
        self.message_user(request, text, messages.SUCCESS)

    def get_urls(self) -> list[URLPattern]:
        view = require_POST(self.admin_site.admin_view(self.resume_view))
        url = path("<path:object_id>/resume/", view, name="django_outbox_outboxpause_resume")
        return [url, *super().get_urls()]

    def resume_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Resume one pause from its own page."""
        if not self.has_resume_permission(request):
            raise PermissionDenied
        if (found := self.get_object(request, unquote(object_id))) is None:
            self.message_user(request, gettext("It is no longer paused."), messages.WARNING)
        else:
            self.resume(request, self.get_queryset(request).filter(pk=found.pk))
        return HttpResponseRedirect(self._url("changelist"))

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        pause = context["original"]
        if pause is None:
            found = known_names(self._pauses().db).items()
            context["outbox_names"] = {OutboxPause.Kind(kind).label: each for kind, each in found}
        elif self.has_resume_permission(request):
            context["outbox_resume"] = self._url("resume", quote(pause.pk))
        return super().render_change_form(request, context, *args, **options)

    def _pauses(self) -> PauseQuerySet:
        return OutboxPause.objects.using(router.db_for_write(OutboxPause))

    def _log(self, request: HttpRequest, pause: Any) -> None:
        user_id: Any = request.user.pk
        LogEntry.objects.log_actions(user_id, [pause], DELETION, gettext("Resumed."))

    def _notify_workers(self) -> None:
        alias = self._pauses().db
        transaction.on_commit(lambda: doorbell.ring(connections[alias]), using=alias)

    def _url(self, page: str, *arguments: str) -> str:
        name = f"admin:django_outbox_outboxpause_{page}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)
