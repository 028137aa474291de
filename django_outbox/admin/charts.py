"""Delivery statistics as charts: data for the page's script, an SVG sketch and a text table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from math import log10
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timezone import get_current_timezone, localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import OutboxStatistics
from ..models.statistics import RUN_COLUMNS, WAIT_COLUMNS, quantile
from .display import duration

COMPLETE_AFTER: Final = 12.0  # seconds until all workers have written the numbers of a past minute
WIDTH, HEIGHT = 100.0, 30.0  # of the SVG sketch, in the units of its viewBox
MIN_SECONDS: Final = 0.001  # seconds; lower end of the scale of charts of times

Row = dict[str, Any]
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The time range of the charts and their resolution."""

    title: Any
    span: int  # seconds per point
    steps: int  # number of points


PERIODS: Final = {
    "1h": Period(title=gettext_lazy("1 hour"), span=60, steps=60),
    "24h": Period(title=gettext_lazy("24 hours"), span=600, steps=144),
    "7d": Period(title=gettext_lazy("7 days"), span=3600, steps=168),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart; ``None`` is a gap."""

    label: str
    tone: str  # suffix of the CSS class that sets colour and dashes
    values: Values
    unit: str

    @property
    def latest(self) -> str:
        return format_value(
            next((each for each in reversed(self.values) if each is not None), None), self.unit
        )

    @property
    def highest(self) -> str:
        return format_value(
            max((each for each in self.values if each is not None), default=None), self.unit
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    name: str
    title: str
    description: str
    unit: str  # "rate", "seconds" or "count"
    series: Sequence[Series]

    @property
    def is_empty(self) -> bool:
        return all(value is None for each in self.series for value in each.values)

    @property
    def sketch(self) -> SafeString:
        """Return the lines as SVG, for browsers that do not run scripts."""
        return format_html(
            '<svg class="outbox-sketch" viewBox="0 0 {} {}" preserveAspectRatio="none" '
            'aria-hidden="true" focusable="false">{}</svg>',
            f"{WIDTH:g}",
            f"{HEIGHT:g}",
            format_html_join(
                "",
                '<path class="outbox-line outbox-{}" d="{}"/>',
                ((each.tone, self._path(each.values)) for each in self.series),
            ),
        )

    def _path(self, values: Values) -> str:
        """Return the path of a line: a gap for a missing value, a dash for an isolated value."""
        known = [value for each in self.series for value in each.values if value is not None]
        low, high = self._height(MIN_SECONDS), self._height(max(known, default=0))
        step, parts, is_pen_down = WIDTH / max(len(values) - 1, 1), [], False
        for number, value in enumerate(values):
            if value is None:
                is_pen_down = False
                continue
            fraction = (self._height(value) - low) / (high - low) if high > low else 0.0
            y = HEIGHT - 1 - (HEIGHT - 2) * max(fraction, 0.0)
            parts.append(f"{'L' if is_pen_down else 'M'}{number * step:.2f},{y:.2f}")
            parts += [] if is_pen_down else ["h0.5"]
            is_pen_down = True
        return "".join(parts)

    def _height(self, value: float) -> float:
        return log10(max(value, MIN_SECONDS)) if self.unit == "seconds" else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    times: Sequence[datetime]
    span: int  # seconds between two times
    charts: Sequence[Chart]

    @property
    def data(self) -> dict[str, Any]:
        """Return the data that the page's script draws."""
        return {
            "zone": str(get_current_timezone()),
            "first": int(self.times[0].timestamp()),
            "span": self.span,
            "charts": [
                {
                    "name": each.name,
                    "unit": each.unit,
                    "series": [
                        {"label": line.label, "tone": line.tone, "values": line.values}
                        for line in each.series
                    ],
                }
                for each in self.charts
            ],
        }

    @property
    def titles(self) -> list[str]:
        return [f"{chart.title}: {each.label}" for chart in self.charts for each in chart.series]

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """Return every value as text, the newest first."""
        lines = [each for chart in self.charts for each in chart.series]
        return [
            (format_instant(at), [format_value(each.values[number], each.unit) for each in lines])
            for number, at in reversed([*enumerate(self.times)])
        ]


def dashboard_charts(rows: Sequence[Row], period: Period, now: datetime) -> Charts:
    """Return the dashboard's charts of a period, up to the last span that all workers wrote."""
    minutes = period.span / 60
    return _drawn(rows, period, now, lambda found: _rates(found, minutes, ("retry", "dead")))


def all_charts(alias: str, period: Period, now: datetime) -> Charts:
    """Return all charts of a period."""
    since = OutboxStatistics.objects.using(alias).since(_times_of(period, now)[0], span=period.span)
    minutes, failures = period.span / 60, ("retry", "dead", "deferred", "rescued")

    def draw(found: Sequence[Row | None]) -> list[Chart]:
        return [*_rates(found, minutes, failures), *_times(found), *_lag_and_workers(found)]

    return _drawn(since.over_time(), period, now, draw)


def _drawn(
    rows: Sequence[Row],
    period: Period,
    now: datetime,
    draw: Callable[[Sequence[Row | None]], list[Chart]],
) -> Charts:
    times, by_time = _times_of(period, now), {row["started_at"]: row for row in rows}
    return Charts(times=times, span=period.span, charts=draw([by_time.get(each) for each in times]))


def _times_of(period: Period, now: datetime) -> list[datetime]:
    """Return the times of a period's points, up to the last span that all workers have written."""
    end = int(now.timestamp() - COMPLETE_AFTER) // period.span * period.span
    return [
        datetime.fromtimestamp(end - period.span * back, timezone.utc)
        for back in range(period.steps, 0, -1)
    ]


def start_of(period: Period, now: datetime) -> datetime:
    """Return the start of a period, for tables of sums over it."""
    return now - timedelta(seconds=period.span * period.steps)


def _rates(rows: Sequence[Row | None], minutes: float, failures: Sequence[str]) -> list[Chart]:
    labels = {
        "retry": _("retried"),
        "dead": _("dead"),
        "deferred": _("deferred"),
        "rescued": _("rescued"),
    }

    def line(name: str, label: str) -> Series:
        values = [None if row is None else _short(row[name] / minutes) for row in rows]
        return Series(label=label, tone=name, unit="rate", values=values)

    return [
        Chart(
            name="throughput",
            title=_("Delivered"),
            unit="rate",
            description=_("events done, per minute"),
            series=[line("done", _("done"))],
        ),
        Chart(
            name="failures",
            title=_("Not delivered"),
            unit="rate",
            description=_("deliveries with another outcome, per minute"),
            series=[line(name, labels[name]) for name in failures],
        ),
    ]


def _times(rows: Sequence[Row | None]) -> list[Chart]:
    def lines(names: Sequence[str]) -> list[Series]:
        counts = [[row[name] for name in names] if row else [] for row in rows]
        return [
            Series(
                label=f"p{percent:g}",
                tone=f"p{percent:g}",
                unit="seconds",
                values=[_rounded(quantile(each, percent / 100)) for each in counts],
            )
            for percent in (50, 95, 99)
        ]

    return [
        Chart(
            name="wait",
            title=_("Schedule to start"),
            unit="seconds",
            description=_("from due until started"),
            series=lines(WAIT_COLUMNS),
        ),
        Chart(
            name="run",
            title=_("Time in listeners"),
            unit="seconds",
            description=_("of one delivery"),
            series=lines(RUN_COLUMNS),
        ),
    ]


def _lag_and_workers(rows: Sequence[Row | None]) -> list[Chart]:
    def line(name: str, *, label: str, tone: str, unit: str) -> Series:
        values = [None if row is None else row[name] for row in rows]
        return Series(label=label, tone=tone, unit=unit, values=values)

    return [
        Chart(
            name="lag",
            title=_("Oldest due event"),
            unit="seconds",
            description=_("how long it had waited"),
            series=[line("oldest", label=_("lag"), tone="lag", unit="seconds")],
        ),
        Chart(
            name="workers",
            title=_("Workers"),
            unit="count",
            description=_("that reported statistics"),
            series=[line("workers", label=_("workers"), tone="workers", unit="count")],
        ),
    ]


def _short(value: float) -> float:
    """Return a value with at most two decimals, and without any if it is whole."""
    return int(value) if value == int(value) else round(value, 2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def format_value(value: float | None, unit: str) -> str:
    """Return a value with its unit and two or three significant digits."""
    if value is None:
        return "–"
    if unit == "seconds":
        return format_seconds(value)
    return _("%s/min") % _digits(value) if unit == "rate" else _digits(value)


def format_instant(instant: datetime) -> str:
    """Return date and time in the current time zone, whatever USE_TZ says."""
    return localtime(instant).strftime("%Y-%m-%d %H:%M:%S")


def format_seconds(seconds: float) -> str:
    """Return seconds as a readable duration: ``4 ms``, ``1.2 s``, ``3 min``."""
    if seconds >= 60:
        return duration(seconds)
    if seconds >= 1:
        return _("%s s") % _digits(seconds)
    return _("%s ms") % _digits(seconds * 1000) if seconds else _("0 s")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
