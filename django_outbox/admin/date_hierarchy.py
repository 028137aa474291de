"""Filter events by when they were written; a month, day or hour is a range of event ids.

An event id begins with its creation time, so a period is a range of the primary key and needs no
index on a time column. Events whose ids the writer chose are not in these ranges.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone as django_timezone
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

from ..events import id_timestamp, least_id

Span = tuple[str | None, str | None]

RELATIVE_PERIODS: Final = {
    "hour": (_("The last hour"), timedelta(hours=1)),
    "day": (_("The last 24 hours"), timedelta(days=1)),
}
PERIOD: Final = re.compile(r"(\d{4})-(\d\d)(?:-(\d\d)(?:T(\d\d))?)?", re.ASCII)
MAX_MONTHS: Final = 12  # newest months that the filter offers
MAX_DAYS: Final = 7  # newest days that it offers with them


def span_of(value: str | None) -> Span:
    """Return the range of ids of a period; raise ``IncorrectLookupParameters`` if invalid."""
    if value is None:
        return None, None
    if value in RELATIVE_PERIODS:
        return least_id(datetime.now(timezone.utc) - RELATIVE_PERIODS[value][1]), None
    start, end = _period(value)
    # The end is excluded in effect: no real id is the least of its millisecond (80 zero bits).
    return least_id(start), least_id(end)


def _period(value: str) -> tuple[datetime, datetime]:
    found = PERIOD.fullmatch(value)
    try:
        assert found is not None
        year, month, day, hour = (None if part is None else int(part) for part in found.groups())
        assert year is not None and month is not None
        start = datetime(year, month, day or 1, hour or 0)  # noqa: DTZ001 - made aware below
        if hour is not None:
            end = start + timedelta(hours=1)
        elif day is not None:
            end = start + timedelta(days=1)
        else:
            end = start + timedelta(days=calendar.monthrange(year, month)[1])
        zone = django_timezone.get_current_timezone()
        aware = [django_timezone.make_aware(each, zone) for each in (start, end)]
        least_id(aware[0]), least_id(aware[1])
    except (AssertionError, ValueError, OverflowError) as error:
        raise IncorrectLookupParameters(WrittenFilter.parameter_name) from error
    return aware[0], aware[1]


class WrittenFilter(admin.SimpleListFilter):
    """Filter by the time written: recent periods, months, days and hours."""

    title = _("written")
    parameter_name = "written"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        self._ids = model_admin.get_queryset(request).values_list("pk", flat=True)
        return [(name, label) for name, (label, _span) in RELATIVE_PERIODS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        span_of(self.value())  # only validates; EventList applies the range
        return queryset

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        chosen = self.value()
        yield {
            "selected": chosen is None,
            "query_string": changelist.get_query_string(remove=[self.parameter_name]),
            "display": _("Any time"),
        }
        for name, label in [*self.lookup_choices, *self._periods(chosen)]:
            yield {
                "selected": chosen == name,
                "query_string": changelist.get_query_string({self.parameter_name: name}),
                "display": label,
            }

    def _periods(self, chosen: str | None) -> list[tuple[str, str]]:
        """Return the chosen period with those that contain it, and the next smaller periods."""
        first, last = self._time_range()
        if chosen is None or chosen in RELATIVE_PERIODS:
            days = [last - timedelta(days=n) for n in range(MAX_DAYS)]
            return [
                *_days(each for each in days if each.date() >= first.date()),
                *_months(first, last),
            ]
        start = django_timezone.localtime(_period(chosen)[0])
        found = _months(start, start)
        if len(chosen) == len("2026-11"):
            length = calendar.monthrange(start.year, start.month)[1]
            days = [start.replace(day=n) for n in range(1, length + 1)]
            return found + _days(e for e in days if first.date() <= e.date() <= last.date())
        found += _days([start])
        hours = [start.replace(hour=n) for n in range(24)]
        return found + [(e.strftime("%Y-%m-%dT%H"), e.strftime("%H:00–%H:59")) for e in hours]

    def _time_range(self) -> tuple[datetime, datetime]:
        """Return when the first event was written, according to its id, and the current time."""
        now = django_timezone.localtime(datetime.now(timezone.utc))
        for pk in self._ids.order_by("pk")[:1]:
            if (made := id_timestamp(pk)) and made < now:
                return django_timezone.localtime(made), now
        return now - timedelta(days=365), now


def _months(first: datetime, last: datetime) -> list[tuple[str, str]]:
    year, month = last.year, last.month
    found: list[tuple[str, str]] = []
    while (year, month) >= (first.year, first.month) and len(found) < MAX_MONTHS:
        each = datetime(year, month, 1)  # noqa: DTZ001 - only displayed
        found.append((f"{year:04}-{month:02}", date_format(each, "YEAR_MONTH_FORMAT")))
        year, month = (year, month - 1) if month > 1 else (year - 1, 12)
    return found


def _days(days: Any) -> list[tuple[str, str]]:
    return [(e.strftime("%Y-%m-%d"), date_format(e, "MONTH_DAY_FORMAT")) for e in days]
