"""Base of the querysets of all tables: the database to write to, its clock, and deletion."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.db import connections, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, Value, When
from django.db.models.sql.datastructures import BaseTable

from ..conf import Settings, current, index_name
from ..log import first_line
from ..sql import dialect_of
from ..sql.halving import in_halves
from .fields import IsDead

logger = logging.getLogger("django_outbox")

M = TypeVar("M", bound=models.Model)
Q = TypeVar("Q", bound="TableQuerySet[Any]")


class ByPrimaryKey(BaseTable):
    """A table of which MySQL reads the primary key alone.

    It locks all that it reads: entries of another index too, which workers have to change.
    """

    index = "PRIMARY"

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        sql, params = super().as_sql(compiler, connection)
        return sql + f" FORCE INDEX ({self.index})" * (connection.vendor == "mysql"), params


class ByStream(ByPrimaryKey):
    """The table of events, of which MySQL reads the index of streams."""

    @property
    def index(self) -> str:  # type: ignore[override]
        return index_name("outbox_event_stream")


def _by_primary_key(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    hint = " FORCE INDEX (PRIMARY)" * (context["connection"].vendor == "mysql")
    return execute(sql.replace(" SET ", f"{hint} SET ", 1), params, many, context)


class TableQuerySet(models.QuerySet[M]):
    """Rows of one table of the outbox; changes go to the database for writing."""

    table: str  # its name in ``sql``, without the project's prefix

    def lock(self) -> list[Any]:
        """Lock these rows in the order of their primary keys; return these.

        Waits for other transactions. Filter by primary keys: MySQL waits for the row behind a
        range, too. Call it in a transaction.
        """
        return [*self._locking().order_by("pk").values_list("pk", flat=True)]

    def lock_unlocked(self) -> list[Any]:
        """Lock those of these rows that no other session has locked; return their primary keys.

        Never waits for another transaction. Call it in a transaction.
        """
        skip = self._connection().features.has_select_for_update_skip_locked
        return [*self._locking(skip_locked=skip).values_list("pk", flat=True)]

    def update_by_id(self, **values: Any) -> int:
        """Update these rows, which are filtered by primary keys; return how many.

        MySQL would rather scan a small table, and so wait for rows that others have locked.
        """
        with self._connection().execute_wrapper(_by_primary_key):
            return self.update(**values)

    def expired_condition(self, settings: Settings) -> models.Q:
        """Return the condition of rows past their retention; empty if all are kept."""
        raise NotImplementedError

    def expired(self: Q, settings: Settings | None = None) -> Q:
        """Return rows past their retention, which the next purge deletes."""
        condition = self.expired_condition(settings or current())
        return self.using(self._write_alias()).filter(condition) if condition else self.none()

    def purge(self) -> int:
        """Delete every expired row, whatever this is filtered by; return how many."""
        return sum(self.purge_batches())

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Do what ``purge`` does; yield the size of each delete, which may be 0.

        Each delete commits by itself. ``settings`` replaces the project's settings for retention
        and batch size. The primary key is read upwards, so it needs no index.
        """
        return (each.deleted for each in self._all_rows()._purged(settings or current()))

    def _purged(self, settings: Settings) -> Iterator[Batch]:
        """Delete the expired among these, which have no order; yield the result of each batch."""
        if condition := self.expired_condition(settings):
            yield from scan(self, condition, size=settings.PURGE_BATCH_SIZE)

    def _purge_oldest(self, settings: Settings) -> Iterator[int]:
        """Delete expired rows, the oldest first, in batches; yield the size of each delete."""
        old = self._all_rows().expired(settings).order_by("started_at")
        count = size = settings.PURGE_BATCH_SIZE
        while count == size and (ids := [*old.values_list("pk", flat=True)[:size]]):
            count = self._all_rows().filter(pk__in=ids)._delete_unlocked()
            yield count

    def _locking(self: Q, *, skip_locked: bool = False) -> Q:
        if not self._connection().features.has_select_for_update:
            return self
        return self.select_for_update(skip_locked=skip_locked)._read_by(ByPrimaryKey)

    def _read_by(self: Q, kind: type[ByPrimaryKey]) -> Q:
        """Have MySQL read the table by an index; change these rows and return them."""
        alias = self.query.get_initial_alias()
        self.query.alias_map[alias] = kind(self.query.alias_map[alias].table_name, alias)
        return self

    def _all_rows(self: Q) -> Q:
        """Return all rows of the table, whatever this queryset is restricted to."""
        return self.__class__(model=self.model, using=self._write_alias())

    def _write_alias(self) -> str:
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]

    def _connection(self) -> BaseDatabaseWrapper:
        connection: BaseDatabaseWrapper = connections[self._write_alias()]
        return connection

    def _clock(self) -> datetime:
        """Return the database's current time, aware."""
        return dialect_of(self._connection()).clock()

    def _delete_unlocked(self) -> int:
        """Delete those of these rows that no other session has locked; return how many.

        Rows that the database refuses to delete stay: another table may have a foreign key to them.
        """
        try:
            return self._delete_together()
        except Exception as error:  # noqa: BLE001 - raised again unless it is about some rows
            reason = error
        connection, count, refused = self._connection(), 0, 0
        ids = [*self.values_list("pk", flat=True)]
        nothing: list[Any] = [type(each)() for each in ids[:1]]  # no row has "" or 0 as its key
        dialect_of(connection).delete(self.table, ids=nothing)
        for part in in_halves(
            connection, ids, lambda some: self.filter(pk__in=some)._delete_together(), accepts=True
        ):
            count += part.result if part.is_written else 0
            refused += not part.is_written
        if refused:
            logger.error(
                "rows not deleted table=%s count=%d error=%s",
                self.table,
                refused,
                first_line(reason),
            )
        return count

    def _delete_together(self) -> int:
        connection = self._connection()
        with transaction.atomic(using=connection.alias):
            ids = self.lock_unlocked()
            return dialect_of(connection).delete(self.table, ids=ids)


def by_death(rows: Q) -> Q:
    """Return the dead among these events, by the index that has them: MySQL would scan the table.

    In the index of streams, dead events without a stream are adjacent.
    """
    dead = rows.filter(IsDead("status"))
    if connections[rows.db].features.supports_partial_indexes:
        return dead
    alone = models.Q(stream=None, seq=None)
    return dead.filter(alone | models.Q(stream__gt=""))._read_by(ByStream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The result of a scan for one batch of rows."""

    last: Any  # primary key
    rows: int
    expired: int
    deleted: int


def scan(
    every: Any, expired: models.Q, *, size: int, after: Any = None, until: str | None = None
) -> Iterator[Batch]:
    """Read the primary keys above ``after`` and below ``until`` upwards, each row once.

    Delete expired rows, batch by batch. ``after``: None for the beginning.
    """
    rows = every.order_by("pk").annotate(expired=Case(When(expired, then=Value(1)), default=0))
    if until is not None:
        rows = rows.filter(pk__lt=until)
    behind = rows if after is None else rows.filter(pk__gt=after)
    while found := [*behind.values_list("pk", "expired")[:size]]:
        behind = rows.filter(pk__gt=(after := found[-1][0]))
        ids = [pk for pk, is_over in found if is_over]
        deleted = every.filter(expired, pk__in=ids)._delete_unlocked() if ids else 0
        yield Batch(last=after, rows=len(found), expired=len(ids), deleted=deleted)
        if len(found) < size:
            return
