"""The two charts of the dashboard, as SVG paths: the last hour by minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from ..inspection.sentences import number

COMPLETE_AFTER: Final = 12.0  # seconds until all workers have written the numbers of a past minute
MINUTES: Final = 60  # points of a chart
WIDTH, HEIGHT = 100.0, 30.0  # of a chart, in the units of its viewBox

Row = dict[str, Any]
Values = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; ``None`` is a gap: no worker wrote its numbers for that minute."""

    label: str
    tone: str  # suffix of the CSS class that sets colour and dashes
    values: Values
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


def charts(rows: Sequence[Row], now: datetime) -> list[Chart]:
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


def _lines(rows: Sequence[Row | None], labels: dict[str, str]) -> list[Series]:
    lines = {each: [None if row is None else row[each] for row in rows] for each in labels}
    top = max((value or 0 for values in lines.values() for value in values), default=0)
    return [Series(labels[each], each, lines[each], _path(lines[each], top)) for each in labels]


def _path(values: Values, top: int) -> str:
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
