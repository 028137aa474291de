"""Admin dashboard: the current state of delivery, with problems first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.db import connections, router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from ..models import OutboxEvent, OutboxPause, OutboxStatistics
from ..sql import dialect_of
from . import dashboard_links as links
from .charts import PERIODS, all_charts, dashboard_charts, format_instant, start_of
from .dashboard_cache import Snapshot, fresh_snapshot, recent_snapshot
from .dashboard_full_tables import full_tables, types
from .dashboard_problems import problems
from .dashboard_tables import Permissions, sections, tiles
from .read_only import ReadOnlyAdmin, may

MAX_TYPES: Final = 100  # event types that the table of deliveries shows
FOLDER: Final = "admin/django_outbox/dashboard/"  # of the templates


class DashboardAdmin(ReadOnlyAdmin):
    """Pages instead of a change list; they need the permission to view events."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may(request, "view")

    def get_urls(self) -> list[URLPattern]:
        # The first is named like a change list, so that the admin's own links lead here.
        return [
            self._path("", "changelist", self.dashboard_view),
            self._path("refresh/", "refresh", self.refresh_view),
            self._path("deliveries/", "deliveries", self.deliveries_view),
            self._path("tables/<slug:name>/", "table", self.table_view),
            self._path("resume/<int:pause_id>/", "resume", self.resume_view, "POST"),
        ]

    def _path(
        self, route: str, name: str, view: Callable[..., HttpResponse], *methods: str
    ) -> URLPattern:
        def guarded(request: HttpRequest, **arguments: Any) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name
            return view(request, **arguments)

        allowed = require_http_methods(["GET", "HEAD", *methods])(guarded)
        return path(
            route,
            self.admin_site.admin_view(allowed),
            name=f"{self.opts.app_label}_{self.opts.model_name}_{name}",
        )

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        period = _period(request)
        context = _context(fresh_snapshot(period), period, self._permissions(request))
        context["is_dashboard"] = True
        return self._page(request, "page.html", _("Outbox dashboard"), context)

    def refresh_view(self, request: HttpRequest) -> HttpResponse:
        """Return what changes on the dashboard, without the page around it."""
        period = _period(request)
        context = _context(recent_snapshot(period), period, self._permissions(request))
        return TemplateResponse(request, f"{FOLDER}parts.html", context)

    def deliveries_view(self, request: HttpRequest) -> HttpResponse:
        """Show all charts, and the deliveries by type."""
        name, alias = _period(request), self._alias
        period, now = PERIODS[name], dialect_of(connections[alias]).clock(connections[alias])
        rows = OutboxStatistics.objects.using(alias).since(start_of(period, now), span=period.span)
        context = {
            "charts": all_charts(alias, period, now),
            "periods": _periods(name),
            "section": types(rows.by_type(MAX_TYPES), period),
            **_clock(now),
        }
        return self._page(request, "deliveries.html", _("Deliveries"), context)

    def table_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show one table with all its rows."""
        if (load := full_tables().get(name)) is None:
            raise Http404
        section = load(self._alias)
        return self._page(request, "table.html", section.title, {"section": section})

    def resume_view(self, request: HttpRequest, pause_id: int) -> HttpResponse:
        """Ask on GET, resume on POST; then return to the dashboard."""
        pauses: Any = self.admin_site.get_model_admin(OutboxPause)
        if not pauses.has_resume_permission(request):
            raise PermissionDenied
        pause = pauses.get_object(request, str(pause_id))
        if request.method == "POST":
            answer: HttpResponse = pauses.resume_view(request, str(pause_id))
            return HttpResponseRedirect(self._url) if answer.status_code == 302 else answer
        return self._page(request, "resume.html", _("Resume"), {"pause": pause})

    def _page(
        self, request: HttpRequest, template: str, title: str, context: dict[str, Any]
    ) -> HttpResponse:
        common = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "dashboard_url": self._url,
        }
        return TemplateResponse(request, f"{FOLDER}{template}", {**common, **context})

    def _permissions(self, request: HttpRequest) -> Permissions:
        label = OutboxPause._meta.app_label
        return frozenset(
            each
            for each in ("pause", "resume")
            if request.user.has_perm(f"{label}.{each}_outboxpause")
        )

    @property
    def _url(self) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        return reverse(name, current_app=self.admin_site.name)

    @property
    def _alias(self) -> str:
        return router.db_for_write(OutboxEvent)


def _period(request: HttpRequest) -> str:
    name = request.GET.get("period", "")
    return name if name in PERIODS else "1h"


def _periods(chosen: str) -> list[tuple[str, Any, bool]]:
    return [(each, PERIODS[each].title, each == chosen) for each in PERIODS]


def _clock(now: Any) -> dict[str, str]:
    clock = f"{format_instant(now)} {localtime(now):%Z}"
    return {"now_iso": now.isoformat(), "clock": clock}


def _context(snapshot: Snapshot, period: str, permissions: Permissions) -> dict[str, Any]:
    overview = snapshot.overview
    found, now = problems(overview), overview.now
    charts = dashboard_charts(overview.points, PERIODS[period], now)
    tables = sections(overview, found, permissions)
    return {
        **_clock(now),
        "problems": found,
        "is_bad": any(each.is_bad for each in found),
        "tiles": tiles(overview, charts),
        "urgent": [each for each in tables if each.needs_attention and each.is_wide],
        "others": [each for each in tables if not (each.needs_attention and each.is_wide)],
        "charts": charts,
        "periods": _periods(period),
        "period": period,
        "links": [
            (links.table_url("workers"), _("Workers")),
            (links.table_url("backlog"), _("Waiting by type")),
            (links.table_url("queues"), _("Queues")),
            (links.table_url("relays"), _("Relays")),
            (links.table_url("unrouted"), _("Event types without a listener here")),
            (links.table_url("listeners"), _("Listeners registered here")),
            (links.table_url("suspects"), _("Events of lost workers")),
        ],
    }
