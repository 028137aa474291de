"""Model fields, expressions and indexes that behave the same on every database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Func, Index, Lookup, Q, Value
from django.db.models.functions import StrIndex
from django.db.models.lookups import Exact, In

from ..events import as_utc, stored_instant, stream_of
from ..listeners.registry import lanes
from ..sql.values import to_database

# MySQL's default collation treats "Order-1" and "order-1 " as equal, and utf8mb3 schemas reject
# emoji. "C" saves PostgreSQL the locale in every comparison.
COLLATIONS = {"mysql": "utf8mb4_bin", "postgresql": "C"}


# Options of a field that no column has. Django changes ``serialize`` of a primary key.
UNSTORED = {"blank", "choices", "serialize", "verbose_name"}


class Stored:
    """Mixin for fields of which a migration notes only what the column has."""

    def deconstruct(self) -> Any:
        name, path, args, options = super().deconstruct()  # type: ignore[misc]
        return name, path, args, {k: v for k, v in options.items() if k not in UNSTORED}


class ExactText(Stored):
    """Mixin for text columns that compare byte by byte."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = super().db_parameters(connection)  # type: ignore[misc]
        return {**parameters, "collation": COLLATIONS.get(connection.vendor)}


class ExactCharField(ExactText, models.CharField):  # type: ignore[type-arg]
    """A varchar for which Django neither adds an index nor warns if it is unique.

    On PostgreSQL it would add a second index, ``_like``. On MySQL it warns of more than 255
    characters, which the indexes of InnoDB allow.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        kind = "varchar" if connection.vendor == "sqlite" else "character varying"
        return f"{kind}({self.max_length})"


@ExactCharField.register_lookup
class OfKey(In):
    """``stream__of_key``: the streams of a key, in the lanes that this process knows."""

    lookup_name = "of_key"

    def __init__(self, lhs: Any, rhs: str) -> None:
        super().__init__(lhs, [stream_of(each, rhs) for each in lanes()])


@ExactCharField.register_lookup
class OfEvent(models.Lookup):
    """``id__of_event``: the row with this id, and all rows of the event with it."""

    lookup_name = "of_event"

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        lhs, params = self.process_lhs(compiler, connection)
        given = [self.rhs, f"{self.rhs}.", f"{self.rhs}/"]
        return f"({lhs} = %s OR {lhs} > %s AND {lhs} < %s)", [*params, *given]


class ExactTextField(ExactText, models.TextField):  # type: ignore[type-arg]
    """Unbounded text."""


class SmallIntegerField(Stored, models.SmallIntegerField):  # type: ignore[type-arg]
    """A short number."""


class UTCDateTimeField(Stored, models.DateTimeField):  # type: ignore[type-arg]
    """An instant: stored in UTC and read aware, whatever USE_TZ, TIME_ZONE or the session say."""

    def get_internal_type(self) -> str:
        return "UTCDateTimeField"  # unknown to the backends' converters, so none shifts it

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        return {"postgresql": "timestamp with time zone", "mysql": "datetime(6)"}.get(
            connection.vendor, "datetime"
        )

    def get_prep_value(self, value: Any) -> Any:
        value = models.Field.get_prep_value(self, value)
        value = self.to_python(value)
        return as_utc(value) if isinstance(value, datetime) else value

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        if hasattr(value, "resolve_expression"):
            return value
        value = value if prepared else self.get_prep_value(value)
        return value if value is None else to_database(value, connection)

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Read PostgreSQL's instants as UTC: with USE_TZ=False its driver returns local time."""
        if compiler.connection.vendor == "postgresql":
            return f"({sql}) AT TIME ZONE 'UTC'", params
        return sql, params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> datetime | None:
        return stored_instant(value)


@ExactTextField.register_lookup
class BeginsWith(models.Lookup):
    """Compares a prefix byte by byte, without LIKE.

    For LIKE, Django escapes "_" and "%" with a backslash. MySQL takes it literally if ``sql_mode``
    has NO_BACKSLASH_ESCAPES. And SQLite's LIKE does not distinguish "a" from "A".
    """

    lookup_name = "begins_with"

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        found: tuple[str, Any] = compiler.compile(Exact(StrIndex(self.lhs, Value(self.rhs)), 1))
        return found


class DatabaseNow(Func):
    """The database's clock, the only one that due times and leases use.

    Django's ``Now()`` was hours off on MySQL and SQLite.
    """

    output_field = UTCDateTimeField()
    template = "CURRENT_TIMESTAMP"

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template="STATEMENT_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'now')"
        return super().as_sql(compiler, connection, template=template, **context)


def age(instant: datetime, now: datetime) -> float:
    """Return the seconds from ``instant`` to the database's ``now``; 0 for one in the future."""
    return max((now - instant).total_seconds(), 0.0)


class Worded(Lookup):
    """A condition on a column, word for word as in the index that it is for.

    SQLite uses a partial index only if a query repeats its condition word for word.
    """

    prepare_rhs = False
    words: str

    def __init__(self, name: str) -> None:
        super().__init__(F(name), True)

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        sql, params = self.process_lhs(compiler, connection)
        return f"{sql} {self.words}", params


class IsIndexed(Worded):
    """The status of an event that is in the index of streams."""

    words = "IN (0, 2, 3)"


class IsDead(Worded):
    """The status of a dead event."""

    words = "= 3"


class IsRescued(Worded):
    """The rescues of an event that workers were lost with."""

    words = ">= 1"


class PendingIndex(Index):
    """An index that is partial if the database supports it, and plain otherwise.

    ``where`` is kept out of ``condition`` so that Django does not warn (W037) on MariaDB; None: no
    partial index. ``plain_fields`` are the columns of the plain index; None: no plain index. With
    ``unique``, rows outside ``where`` get no index entry per row version, as they would with a
    unique column.
    """

    def __init__(
        self,
        *expressions: Any,
        where: Q | None = None,
        plain_fields: Sequence[str] | None = (),
        unique: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*expressions, **options)
        self.where, self.plain_fields, self.unique = where, plain_fields, unique

    def deconstruct(self) -> Any:
        path, expressions, options = super().deconstruct()
        own = {"where": self.where, "plain_fields": self.plain_fields, "unique": self.unique}
        return path, expressions, {**options, **own}

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **options: Any) -> Any:
        if not self._exists_on(schema_editor.connection):
            return _no_op_statement(schema_editor)
        if schema_editor.connection.features.supports_partial_indexes:
            index = Index(fields=self.fields, name=self.name, condition=self.where)
        else:
            index = Index(fields=self.plain_fields or self.fields, name=self.name)
        if self.unique:
            plain = schema_editor.sql_create_index
            options["sql"] = plain.replace("CREATE INDEX", "CREATE UNIQUE INDEX")
        return index.create_sql(model, schema_editor, using, **options)

    def remove_sql(self, model: Any, schema_editor: Any, **options: Any) -> Any:
        if not self._exists_on(schema_editor.connection):
            return _no_op_statement(schema_editor)
        return super().remove_sql(model, schema_editor, **options)

    def _exists_on(self, connection: Any) -> bool:
        partial = connection.features.supports_partial_indexes
        return (self.where if partial else self.plain_fields) is not None


def _no_op_statement(schema_editor: Any) -> str:
    """Return a statement without effect, because the caller must return one."""
    return f"SELECT 1{schema_editor.connection.features.bare_select_suffix}"
