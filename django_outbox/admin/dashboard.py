"""Admin dashboard: the current state of delivery, with problems first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from django.db import connections, router
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from ..clocks import monotonic
from ..conf import current
from ..inspection import in_thread
from ..inspection.overview import Overview, load_overview
from ..inspection.problems import Problem, find_problems
from ..inspection.sentences import number, precise, sentence
from ..models import OutboxEvent
from . import display, links, redaction
from .dashboard_tables import Permissions, sections
from .read_only import ReadOnlyAdmin, may

FOLDER: Final = "admin/django_outbox/dashboard/"  # of the templates
MAX_AGE: Final = 5.0  # seconds
MAX_STALE: Final = 10.0  # seconds; age of what is shown while another thread reads
MAX_CAUSES_AGE: Final = 30.0  # seconds; to group many dead events takes long
COMPLETE_AFTER: Final = 12.0  # seconds until all workers have written the numbers of a past minute
MINUTES: Final = 60  # points of a chart
WIDTH, HEIGHT = 100.0, 30.0  # of a chart, in the units of its viewBox


class DashboardAdmin(ReadOnlyAdmin):
    """One page instead of a change list; it needs the permission to view events."""

    viewed_with = ("view_outboxevent",)

    def get_urls(self) -> list[URLPattern]:
        # The first is named like a change list, so that the admin's own links lead here.
        return [
            self.page("", "changelist", self.dashboard_view, "GET", "HEAD"),
            self.page("refresh/", "refresh", self.refresh_view, "GET", "HEAD"),
        ]

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": _("Outbox: now"),
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
    return frozenset(each for each in ("pause", "resume") if may(request, f"{each}_outboxpause"))


def _context(snapshot: Snapshot, permissions: Permissions) -> dict[str, Any]:
    overview = snapshot.overview
    problems, now = find_problems(overview), overview.now
    drawn = charts(overview.points, now)
    return {
        "now_iso": now.isoformat(),
        "clock": f"{localtime(now):%Y-%m-%d %H:%M:%S %Z}",
        "is_new": overview.is_new,
        "is_writer_only": current().MODE == "writer_only",
        "problems": verdict(overview, problems),
        "is_bad": any(each.is_bad for each in problems),
        "tiles": tiles(overview, drawn),
        "tables": sections(overview, problems, permissions),
        "charts": drawn,
    }


# --- the verdict and the headline -----------------------------------------------------------------


def verdict(overview: Overview, problems: Sequence[Problem]) -> list[tuple[str, str, bool]]:
    """Return a sentence for each problem, where it leads to, and whether it is bad."""
    return [
        (redaction.hide_in_text(sentence(each, overview.now)), _url(each), each.is_bad)
        for each in problems
    ]


def _url(problem: Problem) -> str:
    """Return the page that cures a problem, or the table that shows it."""
    kind, id_ = problem.kind, problem.id or ""
    if kind in ("poison", "held_by_dead"):
        return links.url("outboxevent_change", id_)
    if kind.startswith("held_by_"):
        return links.url("outboxpause_change", id_)
    if kind in ("dead", "dying"):
        return links.cause_url(id_)
    if kind == "blocked":
        return links.url("outboxstream_changelist", state="blocked")
    if kind == "stalled":
        return links.url("outboxevent_changelist", state="retrying")
    if kind in ("late", "unserved"):
        return "#outbox-queues"
    return "#outbox-listeners" if kind in ("failing", "unrouted") else "#outbox-workers"


def tiles(overview: Overview, charts: Sequence[Chart]) -> list[tuple[str, str, bool]]:
    """Return the headline numbers: title, value, and whether the value needs attention."""
    alive, lost = overview.alive, len(overview.missing)
    due, held = (sum(getattr(each, name) for each in overview.queues) for name in ("due", "held"))
    running = _("%(alive)d of %(all)d") % {"alive": alive, "all": alive + lost}
    blocked, dead = overview.blocked_count, overview.causes.total
    return [
        (_("workers"), running if lost else str(alive), not alive or bool(lost)),
        (_("due now"), number(due), False),
        (_("late by"), precise(overview.lag), overview.lag > display.LATE_AFTER),
        (_("held"), number(held), False),
        (_("delivered"), charts[0].series[0].latest, False),
        (_("blocked keys"), number(blocked), bool(blocked)),
        (_("dead deliveries"), number(dead), bool(dead)),
    ]


# --- the charts: the last hour by minutes, as SVG paths ------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; ``None`` is a gap: no worker wrote its numbers for that minute."""

    label: str
    tone: str  # suffix of the CSS class that sets colour and dashes
    values: Sequence[int | None]
    path: str  # of the line, in SVG

    @property
    def latest(self) -> str:
        return _rate(next((each for each in reversed(self.values) if each is not None), None))

    @property
    def highest(self) -> str:
        return _rate(max((each for each in self.values if each is not None), default=None))


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    title: str
    description: str
    series: Sequence[Series]
    times: Sequence[str]  # of the first and the last point


def charts(rows: Sequence[dict[str, Any]], now: datetime) -> list[Chart]:
    """Return the charts of the last hour, up to the last minute that all workers have written."""
    last = (now - timedelta(seconds=COMPLETE_AFTER)).replace(second=0, microsecond=0)
    times = [last - timedelta(minutes=back) for back in range(MINUTES, 0, -1)]
    by_time = {row["started_at"]: row for row in rows}
    found = [by_time.get(each) for each in times]
    ends = [f"{localtime(each):%H:%M}" for each in (times[0], times[-1])]
    done = _lines(found, {"done": _("done")})
    failed = _lines(found, {"retry": _("retried"), "dead": _("dead")})
    return [
        Chart("throughput", _("Delivered"), _("deliveries done, per minute"), done, ends),
        Chart("failures", _("Not delivered"), _("failed deliveries, per minute"), failed, ends),
    ]


def _lines(rows: Sequence[dict[str, Any] | None], labels: dict[str, str]) -> list[Series]:
    lines = {each: [None if row is None else row[each] for row in rows] for each in labels}
    top = max((value or 0 for values in lines.values() for value in values), default=0)
    return [Series(labels[each], each, lines[each], _path(lines[each], top)) for each in labels]


def _path(values: Sequence[int | None], top: int) -> str:
    """Return the path of a line: a gap for a missing value, a dash for an isolated value."""
    step, parts, is_pen_down = WIDTH / (len(values) - 1), [], False
    for place, value in enumerate(values):
        if value is not None:
            y = HEIGHT - 1 - (HEIGHT - 2) * value / max(top, 1)
            parts.append(f"{'L' if is_pen_down else 'M'}{place * step:.2f},{y:.2f}")
            parts += [] if is_pen_down else ["h0.5"]
        is_pen_down = value is not None
    return "".join(parts)


def _rate(value: int | None) -> str:
    return "–" if value is None else _("%s/min") % number(value)


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
    return _read(router.db_for_write(OutboxEvent))


def recent_snapshot() -> Snapshot:
    """Return data that is at most ``MAX_STALE`` old.

    If it is older than ``MAX_AGE``, a thread reads it anew meanwhile: a refresh does not wait.
    """
    alias = router.db_for_write(OutboxEvent)
    known = _latest.get(alias)
    if known is None or not known.is_younger(MAX_STALE):
        with _lock:
            known = _latest.get(alias)
            return known if known and known.is_younger(MAX_AGE) else _read(alias, known)
    if not known.is_younger(MAX_AGE) and _lock.acquire(blocking=False):
        in_thread("outbox-dashboard", partial(_renew, alias, known))
    return known


def _renew(alias: str, known: Snapshot) -> None:
    try:
        _read(alias, known)
    finally:
        _lock.release()
        connections.close_all()


def _read(alias: str, known: Snapshot | None = None) -> Snapshot:
    """Read the data; the causes only if the ``known`` ones are old."""
    started = monotonic()
    if known is not None and started - known.causes_read_at >= MAX_CAUSES_AGE:
        known = None
    overview = load_overview(alias, causes=known.overview.causes if known else None)
    causes_read_at = known.causes_read_at if known else started
    found = Snapshot(overview=overview, read_at=started, causes_read_at=causes_read_at)
    _latest[alias] = found
    return found
