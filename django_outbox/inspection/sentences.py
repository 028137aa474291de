"""Problems in words, and the numbers, times and durations that people read."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..queue_settings import RELAY_PREFIX
from .counts import AtLeast
from .problems import Problem

# What is in brackets is left out unless all of it applies. "_1": if the count is 1.
SENTENCES: Final[dict[str, Any]] = {
    "no_worker": gettext_lazy("No worker is alive[, since %(since)s]"),
    "lost": gettext_lazy(
        "Worker %(name)s has been lost since %(since)s; %(count)s of %(of)s expected workers run"
    ),
    "replaced": gettext_lazy("Worker %(name)s has been lost since %(since)s; another replaced it"),
    "rescued": gettext_lazy(
        "Deliveries of lost workers that were rescued in the last 5 minutes: %(count)s"
    ),
    "poison": gettext_lazy(
        "Event %(id)s (%(name)s) was leased by %(count)s workers that were lost since %(since)s: "
        "%(by)s"
    ),
    "suspects": gettext_lazy(
        "One of %(count)s deliveries may stop its workers; each is tried alone now"
    ),
    "unserved": gettext_lazy(
        "No live worker serves %(queue)s, where %(count)s have been due since %(since)s"
        "[; start one with --queue %(name)s]"
    ),
    "late": gettext_lazy(
        "%(queue)s is %(age)s late since %(since)s, %(count)s due"
        "[: %(listener)s takes %(takes)s (p95)][, %(busy)s of %(threads)s threads busy]"
        "[; drains in %(drains_in)s][; %(arriving)s a minute arrive, %(done)s are done]"
    ),
    "dying": gettext_lazy(
        "%(count)s of the %(of)s deliveries that ended in the last 5 minutes are dead"
        "[; most of %(listener)s][: %(cause)s]"
    ),
    "stalled": gettext_lazy(
        "No delivery was done in the last 5 minutes; %(count)s executions failed"
        "[, most of %(listener)s]"
    ),
    "failing": gettext_lazy(
        "Listener %(listener)s fails: %(count)s of %(of)s executions in the last 5 minutes"
    ),
    "held_by_queue": gettext_lazy(
        "%(queue)s has been paused since %(since)s[ by %(by)s][ until %(until)s][: %(cause)s]"
        "[; %(count)s held for %(age)s]"
    ),
    "held_by_breaker": gettext_lazy(
        "The circuit breaker of %(queue)s has been open since %(since)s[: %(cause)s]"
        "[; %(count)s held for %(age)s][; next try %(until)s]"
    ),
    "held_by_away": gettext_lazy(
        "The broker of %(queue)s has been away since %(since)s[: %(cause)s]"
        "[; %(count)s held for %(age)s][; next try %(until)s]"
    ),
    "held_by_dead": gettext_lazy(
        "Key %(name)s has been held since %(since)s by the dead %(by)s[: %(cause)s]"
    ),
    "blocked": gettext_lazy(
        "%(count)s keys are blocked[, since %(since)s]: %(name)s (%(listener)s)[: %(cause)s]"
        "[; next try %(until)s]"
    ),
    "blocked_1": gettext_lazy(
        "Key %(name)s is blocked[, since %(since)s] (%(listener)s)[: %(cause)s]"
        "[; next try %(until)s]"
    ),
    "dead": gettext_lazy(
        "%(count)s deliveries are dead[, %(of)s of them in the last hour][; most of %(listener)s]"
        "[: %(cause)s]"
    ),
    "dead_1": gettext_lazy("1 delivery is dead[, of %(listener)s][: %(cause)s]"),
    "unrouted": gettext_lazy("No listener here for %(name)s; %(count)s wait"),
    "too_many": gettext_lazy("%(name)s: %(count)s, at most %(of)s expected"),
    "too_few": gettext_lazy("%(name)s: %(count)s, at least %(of)s expected"),
    "more": gettext_lazy("%(count)s more (%(name)s)"),
}
PAUSED: Final[dict[str, Any]] = {  # what else a person has paused
    "held_by_event_type": gettext_lazy("event type %s"),
    "held_by_listener": gettext_lazy("listener %s"),
    "held_by_stream": gettext_lazy("key %s"),
}
OPTIONAL: Final = re.compile(r"\[([^\]]*)\]")
NAMES: Final = re.compile(r"%\((\w+)\)s")


def sentence(problem: Problem, now: datetime) -> str:
    """Return a problem in words, in the active language and time zone; ``now``: the database's."""
    values = {name: _in_words(each, now) for name, each in asdict(problem).items()}
    if problem.queue:
        values["queue"] = queue_label(problem.queue)
    kind = problem.kind
    if kind in PAUSED:
        kind, values["queue"] = "held_by_queue", str(PAUSED[kind]) % problem.name

    def if_it_applies(part: re.Match[str]) -> str:
        return part[1] if all(values[name] for name in NAMES.findall(part[1])) else ""

    template = SENTENCES.get(f"{kind}_{problem.count}", SENTENCES[kind])
    text = OPTIONAL.sub(if_it_applies, str(template)) % values
    return f"{text[:1].upper()}{text[1:]}."


def _in_words(value: Any, now: datetime) -> str:
    if isinstance(value, datetime):
        return clock(value, now)
    if isinstance(value, float):
        return precise(value)
    return number(value) if isinstance(value, int) else value or ""


def queue_label(name: str) -> str:
    """Return the name of a queue, or of the relay that it belongs to."""
    is_relay = name.startswith(RELAY_PREFIX)
    return (_("relay %s") if is_relay else _("queue %s")) % name.removeprefix(RELAY_PREFIX)


def number(count: float) -> str:
    """Return a number with separators of thousands; ``10,000+`` if it stopped at a limit."""
    return str(count) if isinstance(count, AtLeast) else f"{count:,.0f}"


def clock(instant: datetime, now: datetime) -> str:
    """Return the time of day in the current time zone, with the date unless that is today."""
    local = timezone.localtime(instant)
    is_today = local.date() == timezone.localtime(now).date()
    return f"{local:%H:%M}" if is_today else f"{local:%Y-%m-%d %H:%M}"


def duration(seconds: float) -> str:
    """Return a duration in its largest units: ``40 s``, ``3 min``, ``1 h 30 min``, ``2 d 3 h``."""
    minutes = int(seconds) // 60
    if not minutes:
        return _("%d s") % seconds
    if minutes < 60:
        return _("%d min") % minutes
    large, small, sizes = _("%d h"), _("%d min"), divmod(minutes, 60)
    if minutes >= 48 * 60:
        large, small, sizes = _("%d d"), _("%d h"), divmod(minutes // 60, 24)
    count, rest = sizes
    return f"{large % count} {small % rest}" if rest else large % count


def precise(seconds: float) -> str:
    """Return a duration, also a short one: ``4 ms``, ``1.2 s``, ``3 min``."""
    if seconds >= 59.5:
        return duration(max(seconds, 60))
    if seconds >= 1:
        return _("%s s") % (f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}")
    return _("%s ms") % f"{seconds * 1000:.3g}" if seconds else _("0 s")
