"""Admin of operations: what a worker works off, with its progress; and the log of who did what."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Case, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import OutboxOperation, live_workers
from ..queue_settings import per_second
from . import display, links
from .actions import ACTIONS, amount
from .read_only import ReadOnlyAdmin, may

PERMISSIONS: Final = {each.kind: each.permission for each in ACTIONS}
OPEN: Final = OutboxOperation.State.OPEN
CELL: Final = '<div data-part="operation-{}">{}<div>{}</div>{}</div>'
BAR: Final = '<progress max="{}" value="{}" aria-label="{}"></progress>'
ENDLESS: Final = '<progress aria-label="{}"></progress>'
BUTTON: Final = '<button type="submit" class="button" formaction="{}/stop/">{}</button>'


@admin.display(description=_("began"))
def began(operation: Any) -> str | SafeString:
    return display.since(gettext("%s ago"), operation.started_at, operation.seen_at)


@admin.display(description=_("of what"))
def about(operation: Any) -> str | SafeString:
    return format_html('<span class="outbox-id" dir="ltr">{}</span>', operation.about)


@admin.display(description=_("progress"))
def progress(operation: Any) -> str | SafeString:
    """Return how far it is and how long it takes, with a button that stops it."""
    if operation.filters is None:  # it was done at once
        return amount(operation.done) if operation.done else ""
    bar, state = "", operation.get_state_display()
    if operation.stopped_by:
        state = gettext("%(state)s by %(name)s") % {"state": state, "name": operation.stopped_by}
    texts = [state, _done(operation), operation.rate]
    if operation.skipped:
        texts.append(gettext("%d skipped") % operation.skipped)
    if operation.state == OPEN:
        bar = format_html(ENDLESS, gettext("Progress"))
        if (most := goal(operation)) is not None:
            bar = format_html(BAR, most, operation.processed, gettext("Progress"))
        if (left := seconds_left(operation)) is not None:
            texts.append(gettext("about %s left") % display.duration(left))
    button = format_html(BUTTON, operation.pk, gettext("Stop")) if operation.stops else ""
    return format_html(CELL, operation.pk, bar, " · ".join(filter(None, texts)), button)


def goal(operation: Any) -> int | None:
    """Return how many it is to process; None if nothing has counted them."""
    matched: int | None = operation.matched
    return matched if None in (matched, operation.limit) else min(matched, operation.limit)


def seconds_left(operation: Any) -> float | None:
    """Estimate how long it still takes; None if its size is not known, or it has not begun."""
    if (most := goal(operation)) is None:
        return None
    left = max(most - operation.processed, 0)
    if operation.rate:
        return float(left / per_second(operation.rate))
    if not operation.processed:
        return None
    elapsed = (operation.seen_at - operation.started_at).total_seconds()
    return float(left * elapsed / operation.processed)


def _done(operation: Any) -> str:
    if (most := goal(operation)) is None:
        return amount(operation.done)
    given = {
        "done": number_format(operation.done, force_grouping=True),
        "all": number_format(most, force_grouping=True),
    }
    return gettext("%(done)s of %(all)s") % given


class OutboxOperationAdmin(ReadOnlyAdmin):
    """The operations that are running come first; who may begin one may stop it."""

    viewed_with = ("view_outboxevent",)
    list_display = ["kind", about, progress, "by", began]
    list_display_links = None
    fields = readonly_fields = (
        *("kind", "state", "about", "by", "started_at", "ended_at", "stopped_by"),
        *("rate", "limit", "matched", "done", "skipped"),
    )
    list_filter = ["state", "kind"]
    list_per_page = 50
    ordering = [Case(When(state=OPEN, then=Value(0)), default=Value(1)).asc(), "-id"]
    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Annotate ``stops``: whether the user may stop it."""
        mine = [kind for kind, permission in PERMISSIONS.items() if may(request, permission)]
        stops = Case(When(state=OPEN, kind__in=mine, then=Value(True)), default=Value(False))
        annotated: QuerySet[Any] = super().get_queryset(request).annotate(stops=stops)
        return annotated

    def get_urls(self) -> list[URLPattern]:
        stop = self.page("<int:object_id>/stop/", "stop", self.stop_view, "POST")
        return [stop, *super().get_urls()]

    def stop_view(self, request: HttpRequest, object_id: int) -> HttpResponse:
        found = self.get_queryset(request).filter(pk=object_id)
        if not found.filter(stops=True):
            raise PermissionDenied
        operations = OutboxOperation.objects.using(self.alias).filter(pk=object_id)
        operations.stop(by=request.user.get_username())
        self.message_user(request, gettext("Stopped. What is done stays done."))
        return HttpResponseRedirect(links.url("outboxoperation_changelist"))

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Say that no worker is alive, if something waits for one."""
        rows = self.get_queryset(request)
        waits = rows.filter(state=OPEN).exists() and not live_workers(rows.db)
        own = {"title": capfirst(self.opts.verbose_name_plural), "outbox_waits": waits}
        return super().changelist_view(request, {**(extra_context or {}), **own})
