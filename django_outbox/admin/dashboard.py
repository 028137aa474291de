"""Admin dashboard: the current state of delivery, with problems first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from ..models import OutboxPause
from .charts import charts
from .dashboard_cache import Snapshot, fresh_snapshot, recent_snapshot
from .dashboard_problems import problems, tiles
from .dashboard_tables import Permissions, sections
from .read_only import ReadOnlyAdmin, may

FOLDER: Final = "admin/django_outbox/dashboard/"  # of the templates


class DashboardAdmin(ReadOnlyAdmin):
    """One page instead of a change list; it needs the permission to view events."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may(request, "view")

    def get_urls(self) -> list[URLPattern]:
        # The first is named like a change list, so that the admin's own links lead here.
        return [
            self._path("", "changelist", self.dashboard_view),
            self._path("refresh/", "refresh", self.refresh_view),
        ]

    def _path(
        self, route: str, name: str, view: Callable[[HttpRequest], HttpResponse]
    ) -> URLPattern:
        def guarded(request: HttpRequest) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name
            return view(request)

        name = f"{self.opts.app_label}_{self.opts.model_name}_{name}"
        return path(route, self.admin_site.admin_view(require_safe(guarded)), name=name)

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": _("Outbox dashboard"),
            "opts": self.opts,
            "media": self.media,
            **_context(fresh_snapshot(), _permissions(request)),
        }
        return TemplateResponse(request, f"{FOLDER}page.html", context)

    def refresh_view(self, request: HttpRequest) -> HttpResponse:
        """Return what changes on the dashboard, without the page around it."""
        context = _context(recent_snapshot(), _permissions(request))
        return TemplateResponse(request, f"{FOLDER}parts.html", context)


def _permissions(request: HttpRequest) -> Permissions:
    label = OutboxPause._meta.app_label
    verbs = ("pause", "resume")
    return frozenset(each for each in verbs if request.user.has_perm(f"{label}.{each}_outboxpause"))


def _context(snapshot: Snapshot, permissions: Permissions) -> dict[str, Any]:
    overview = snapshot.overview
    found, now, drawn = problems(overview), overview.now, charts(overview.points, overview.now)
    tables = sections(overview, found, permissions)
    return {
        "now_iso": now.isoformat(),
        "clock": f"{localtime(now):%Y-%m-%d %H:%M:%S %Z}",
        "problems": found,
        "is_bad": any(each.is_bad for each in found),
        "tiles": tiles(overview, drawn),
        "urgent": [each for each in tables if each.name == "dead"],
        "others": [each for each in tables if each.name != "dead"],
        "charts": drawn,
    }
