"""Admin dashboard: the current state of delivery, with problems first."""

from __future__ import annotations

from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from ..inspection.overview import load_overview
from ..models import OutboxEvent, OutboxStatistics
from .charts import PERIODS, charts, format_instant, start_of
from .dashboard_tables import problems, sections, tiles
from .read_only import ReadOnlyAdmin, may

MAX_TYPES: Final = 30  # event types that the table of deliveries shows
FIRST_IF_PROBLEM: Final = ("workers", "paused")  # sections that come first if there is any problem
SECTION_ORDER: Final = (
    "workers", "paused", "queues", "relays", "backlog", "blocked", "dead", "unrouted", "types",
    "listeners",
)  # fmt: skip


class DashboardAdmin(ReadOnlyAdmin):
    """One page instead of a change list; it needs the permission to view events."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may(request, "view")

    def get_urls(self) -> list[URLPattern]:
        view = require_safe(self.admin_site.admin_view(self.dashboard_view))
        # Named like a change list, so that the admin's own links lead here.
        return [path("", view, name=f"{self.opts.app_label}_{self.opts.model_name}_changelist")]

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        name = request.GET.get("period", "")
        name = name if name in PERIODS else "1h"
        context = {
            **self.admin_site.each_context(request),
            **_context(name),
            "title": _("Outbox dashboard"),
            "opts": self.opts,
            "media": self.media,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_outbox/dashboard/page.html", context)


def _context(name: str) -> dict[str, Any]:
    alias, period = router.db_for_write(OutboxEvent), PERIODS[name]
    overview = load_overview(alias)
    statistics = OutboxStatistics.objects.using(alias)
    by_type = statistics.since(start_of(period, overview.now), span=period.span).by_type(MAX_TYPES)
    found, found_problems = sections(overview, by_type, period), problems(overview)
    shown = [each for each in SECTION_ORDER if each in found]
    urgent = [
        each
        for each in shown
        if found_problems and (each in FIRST_IF_PROBLEM or found[each].needs_attention)
    ]
    drawn_charts = charts(alias, period, overview.now)
    return {
        "now_iso": overview.now.isoformat(),
        "clock": f"{format_instant(overview.now)} {localtime(overview.now):%Z}",
        "problems": found_problems,
        "is_bad": any(each.is_bad for each in found_problems),
        "tiles": tiles(overview, drawn_charts),
        "urgent": [found[each] for each in urgent],
        "others": [found[each] for each in shown if each not in urgent],
        "charts": drawn_charts,
        "periods": [(each, PERIODS[each].title, each == name) for each in PERIODS],
    }
