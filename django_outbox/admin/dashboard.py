"""Admin dashboard: the current state of delivery, with problems first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from ..clocks import monotonic
from ..inspection.causes import Causes
from ..inspection.overview import Overview, load_overview
from ..models import OutboxEvent, OutboxPause
from .charts import charts
from .dashboard_problems import problems, tiles
from .dashboard_tables import Permissions, sections
from .read_only import ReadOnlyAdmin, may

FOLDER: Final = "admin/django_outbox/dashboard/"  # of the templates
MAX_AGE: Final = 5.0  # seconds
MAX_STALE: Final = 60.0  # seconds; age of what is shown while another thread reads
MAX_CAUSES_AGE: Final = 30.0  # seconds; to group many dead events takes long


class DashboardAdmin(ReadOnlyAdmin):
    """One page instead of a change list; it needs the permission to view events."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) or may(request, "view")

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


# --- what is read once for all who refresh the page ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The data of one page; it depends neither on the user nor on the language."""

    overview: Overview
    read_at: float  # monotonic
    causes_read_at: float  # monotonic

    def is_younger(self, seconds: float) -> bool:
        return monotonic() - self.read_at < seconds


# It is kept in the memory of the process: a shared cache would need settings of the project, and a
# dashboard that works while other services are down must not depend on one. So each process of the
# web server reads once per ``MAX_AGE``, however many tabs are open.
_latest: dict[str, Snapshot] = {}  # by database alias
_lock = threading.Lock()  # held by the thread that reads for the others


def fresh_snapshot() -> Snapshot:
    """Read the data now, and keep it for the next refresh."""
    return _read(causes=None, causes_read_at=monotonic())


def recent_snapshot() -> Snapshot:
    """Return data that is at most ``MAX_AGE`` old, or older while another thread reads."""
    alias = router.db_for_write(OutboxEvent)
    known = _latest.get(alias)
    if known is not None and known.is_younger(MAX_AGE):
        return known
    can_wait = known is None or not known.is_younger(MAX_STALE)
    if not _lock.acquire(blocking=can_wait):
        assert known is not None
        return known
    try:
        known = _latest.get(alias)
        if known is not None and known.is_younger(MAX_AGE):
            return known
        if known is None or monotonic() - known.causes_read_at >= MAX_CAUSES_AGE:
            return fresh_snapshot()
        return _read(causes=known.overview.causes, causes_read_at=known.causes_read_at)
    finally:
        _lock.release()


def _read(*, causes: Causes | None, causes_read_at: float) -> Snapshot:
    alias = router.db_for_write(OutboxEvent)
    overview = load_overview(alias, causes=causes)
    found = Snapshot(overview=overview, read_at=monotonic(), causes_read_at=causes_read_at)
    _latest[alias] = found
    return found
