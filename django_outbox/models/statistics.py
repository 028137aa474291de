"""Statistics of settled events over time: how many, how late, and how long listeners took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections, models
from django.db.models import F, Min, Q, Sum
from django.utils.translation import gettext_lazy as _

from ..conf import Settings, current, index_name, table_name
from ..listeners.options import TITLE_LENGTH
from .fields import ExactCharField, UTCDateTimeField
from .queryset import TableQuerySet

KEPT: Final = timedelta(hours=3)  # the dashboard shows one
OUTCOMES: Final = ("done", "retry", "dead")
# Upper bounds of the histogram buckets in seconds; one more bucket counts what is slower.
BOUNDS: Final = (
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    3600.0,
)
WAIT_COLUMNS: Final = tuple(f"wait_{number}" for number in range(len(BOUNDS) + 1))
RUN_COLUMNS: Final = tuple(f"run_{number}" for number in range(len(BOUNDS) + 1))
COUNTS: Final = (*OUTCOMES, "rescued", "run_ms", *WAIT_COLUMNS, *RUN_COLUMNS)
UNIQUE_FIELDS: Final = ("owner", "started_at", "listener")


def bucket(seconds: float) -> int:
    """Return the number of the bucket that a time belongs to."""
    return bisect_left(BOUNDS, seconds)


def quantile(counts: Sequence[int], part: float) -> float | None:
    """Estimate the quantile ``part`` (0 to 1) in seconds from bucket counts; None if all are 0.

    The error is at most the width of a bucket. Beyond the last bound, return that bound.

    Example::

        counts = [0] * 17
        counts[3] = 100  # all took more than 10 ms and at most 25 ms
        assert 0.010 < quantile(counts, 0.95) <= 0.025
    """
    rank, below = part * sum(counts), 0
    if not rank:
        return None
    for number, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = BOUNDS[number - 1] if number else 0.0
            return low + (BOUNDS[number] - low) * (rank - below) / count
        below += count
    return BOUNDS[-1]


class StatisticsQuerySet(TableQuerySet["OutboxStatistics"]):
    """Sums over the rows of many workers, computed by the database.

    Example::

        an_hour_ago = timezone.now() - timedelta(hours=1)
        for row in OutboxStatistics.objects.since(an_hour_ago).by_listener(most=10):
            print(row["listener"], row["done"], row["dead"])
    """

    table = "outbox_statistics"

    def since(self, instant: datetime) -> StatisticsQuerySet:
        """Return rows of minutes that begin at or after an instant."""
        return self.filter(started_at__gte=instant)

    def by_listener(self, most: int) -> list[dict[str, Any]]:
        """Return the sums by listener, most deliveries first; "" stands for all others."""
        deliveries = Sum(F("done") + F("retry") + F("dead"))
        every: Any = self.values("listener")
        rows = every.annotate(total=deliveries, first=Min("started_at")).filter(total__gt=0)
        rows = rows.annotate(**{name: Sum(name) for name in COUNTS})
        return [*rows.order_by("-total", "listener")[:most]]

    def expired_condition(self, settings: Settings) -> Q:
        """Return the condition of rows older than three hours."""
        return Q(started_at__lt=self._clock() - KEPT)

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Delete every expired row; yield the size of each delete, which commits by itself."""
        return self._purge_oldest(settings or current())


class OutboxStatistics(models.Model):
    """What one worker settled for one listener in one minute."""

    id = models.BigAutoField(primary_key=True)
    started_at = UTCDateTimeField()  # the beginning of the minute, by the database's clock
    owner = ExactCharField(max_length=128)  # the worker, the only one that writes its rows
    listener = ExactCharField(max_length=TITLE_LENGTH)  # title; "": those beyond the top
    done = models.IntegerField(default=0)
    retry = models.IntegerField(default=0)
    dead = models.IntegerField(default=0)
    rescued = models.IntegerField(default=0)  # of these, rescued from a lost worker
    run_ms = models.BigIntegerField(default=0)  # milliseconds that all of them ran

    objects = StatisticsQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_statistics")
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()  # the permission to view events covers these
        constraints = [
            # The owner comes first, so that rows of two workers are not adjacent in the index. So
            # on MariaDB no insert waits for that of another worker.
            models.UniqueConstraint(fields=UNIQUE_FIELDS, name=index_name("outbox_stats_once"))
        ]
        indexes = [models.Index(fields=["started_at"], name=index_name("outbox_stats_time"))]

    def __str__(self) -> str:
        return f"{self.started_at:%Y-%m-%d %H:%M} {self.listener or '*'} ({self.owner})"


# Numbers of events, by schedule-to-start time and by time in listeners.
for _name in (*WAIT_COLUMNS, *RUN_COLUMNS):
    OutboxStatistics.add_to_class(_name, models.IntegerField(default=0))


def write_statistics(alias: str, rows: Sequence[OutboxStatistics]) -> None:
    """Write rows of one worker, and overwrite those with the same key that it wrote before."""
    features = connections[alias].features
    by_name = features.supports_update_conflicts_with_target  # not MySQL: any unique index there
    OutboxStatistics.objects.using(alias).bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=UNIQUE_FIELDS if by_name else None,
        update_fields=COUNTS,
    )
