"""The dashboard's verdict, with a link to the cure of each problem, and its headline numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..conf import current
from ..inspection.counts import MAX_DEAD_SHARE, Rates
from ..inspection.holds import DEAD, MAX_HELD, longest
from ..inspection.overview import Overview
from ..inspection.workers import Loss
from ..models import OutboxPause
from . import dashboard_links as links
from . import display
from .charts import Chart, format_seconds
from .read_only import reverse

MAX_LOST_NAMED: Final = 3  # workers that a suspect has lost, the latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that needs attention, and the page or section that cures it."""

    text: str
    url: str
    section: str  # that shows it
    is_bad: bool  # True: events are not delivered; False: not urgent


def problems(overview: Overview) -> list[Problem]:
    """Return the problems, the worst first."""
    return [*_severe_problems(overview), *_minor_problems(overview)]


def _bad(text: str, section: str, url: str = "") -> Problem:
    return Problem(text=text, url=url or f"#outbox-{section}", section=section, is_bad=True)


def _minor(text: str, section: str, url: str = "") -> Problem:
    return Problem(text=text, url=url or f"#outbox-{section}", section=section, is_bad=False)


def _severe_problems(overview: Overview) -> Iterator[Problem]:
    if current().MODE == "writer_only":
        return  # its events do not wait for a worker
    if not overview.alive:
        yield _bad(_("No worker is alive."), "workers")
    if count := sum(each.is_newly_lost for each in overview.workers):
        text = ngettext("No heartbeat from %d worker.", "No heartbeat from %d workers.", count)
        yield _bad(text % count, "workers")
    yield from _bad_rates(overview.rates)
    yield from _suspects(overview)
    if overview.lag > display.LATE_AFTER:
        text = _("The oldest due delivery has waited for %s.") % display.duration(overview.lag)
        yield _bad(text, "types", links.events_url(state="due"))
    labels = {DEAD: _("dead event"), **dict(OutboxPause.Kind.choices)}
    for each in (each for each in longest(overview.holds).values() if each.age > MAX_HELD):
        what = {"time": display.duration(each.age), "what": f"{labels[each.kind]} {each.name}"}
        text = _("Deliveries have been held for %(time)s by: %(what)s.") % what
        yield _bad(text, "blocked" if each.kind == DEAD else "paused")
    for name in overview.unserved_queues:
        text = _("No live worker serves the queue %s, where deliveries are due.") % name
        yield _bad(text, "queues")


def _bad_rates(lately: Rates) -> Iterator[Problem]:
    if lately.rescued:
        text = _("A worker was lost: %d of its deliveries were rescued in the last 5 minutes.")
        yield _bad(text % lately.rescued, "workers")
    if lately.dead_share > MAX_DEAD_SHARE:
        text = _("%(dead)d of the %(ended)d deliveries that ended in the last 5 minutes are dead.")
        counts = {"dead": lately.dead, "ended": lately.done + lately.dead}
        yield _bad(text % counts, "dead")
    if lately.is_stalled:
        text = _("No delivery was done in the last 5 minutes; %d executions failed.")
        yield _bad(text % lately.retry, "types", links.events_url(state="retrying"))


def _suspects(overview: Overview) -> Iterator[Problem]:
    """Name the event that stops its workers; accuse none while there are several of them."""
    if len(overview.suspects) == 1:
        suspect = overview.suspects[0]
        text = ngettext(
            "Event %(id)s (%(type)s) was leased by %(count)d worker that was lost: %(workers)s.",
            "Event %(id)s (%(type)s) was leased by %(count)d workers that were lost: %(workers)s.",
            len(suspect.workers),
        ) % {
            "id": suspect.id,
            "type": suspect.event_type,
            "count": len(suspect.workers),
            "workers": _lost_workers(suspect),
        }
        yield _bad(text, "workers", links.event_url(suspect.id))
    elif overview.suspects:
        text = _("One of %d deliveries may stop its workers. Each of them is tried alone now.")
        yield _bad(text % len(overview.suspects), "suspects")


def _lost_workers(suspect: Loss) -> str:
    named = [
        _("%(worker)s at %(time)s")
        % {"worker": links.worker_name(worker), "time": links.time_of_day(at)}
        for worker, at in suspect.workers[-MAX_LOST_NAMED:]
    ]
    return ", ".join([*["…"] * (len(suspect.workers) > MAX_LOST_NAMED), *named])


def _minor_problems(overview: Overview) -> Iterator[Problem]:
    is_expected = current().MODE != "writer_only" and overview.alive > 0
    if is_expected and (lost := len(overview.missing)):
        text = ngettext(
            "%(lost)d of %(all)d expected workers is lost.",
            "%(lost)d of %(all)d expected workers are lost.",
            lost,
        )
        yield _minor(text % {"lost": lost, "all": lost + overview.alive}, "workers")
    if count := len(overview.pauses):
        text = ngettext("%d pause is active.", "%d pauses are active.", count)
        yield _minor(text % count, "paused")
    if count := overview.blocked.count:
        text = ngettext("%s stream is blocked.", "%s streams are blocked.", count)
        yield _minor(text % count, "blocked")
    if count := overview.causes.total:
        text = ngettext("%d delivery is dead.", "%d deliveries are dead.", count)
        yield _minor(text % count, "dead", reverse(links.CAUSES))
    if count := len(overview.unrouted):
        text = ngettext("%d event type has no listener.", "%d event types have no listener.", count)
        yield _minor(text % count, "types")


def tiles(overview: Overview, charts: Sequence[Chart]) -> list[tuple[str, str, bool]]:
    """Return the headline numbers: title, value, and whether the value needs attention."""
    alive, lost = overview.alive, len(overview.missing)
    due = sum(each.due for each in overview.queues)
    running = _("%(alive)d of %(all)d") % {"alive": alive, "all": alive + lost}
    blocked = overview.blocked.count
    return [
        (_("workers running"), running if lost else str(alive), not alive or bool(lost)),
        (_("due now"), str(due), False),
        (_("oldest due"), format_seconds(overview.lag), overview.lag > display.LATE_AFTER),
        (_("delivered"), charts[0].series[0].latest, False),
        (_("blocked streams"), str(blocked), bool(blocked)),
        (_("dead deliveries"), str(overview.causes.total), bool(overview.causes.total)),
    ]
