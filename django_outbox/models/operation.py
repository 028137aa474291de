"""Operations: the log of who did what, and the bulk changes that a worker works off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.db.models import F, Lookup, Q, Transform
from django.db.models.expressions import Col
from django.db.models.lookups import In
from django.db.models.sql.where import WhereNode
from django.utils.translation import gettext_lazy as _

from ..conf import Settings, current, index_name, table_name
from ..events import ROW_ID_LENGTH
from ..listeners.outcomes import Status
from .fields import DatabaseNow, ExactCharField, ExactTextField, IsDead, UTCDateTimeField
from .queryset import TableQuerySet
from .replay import Spacing

if TYPE_CHECKING:
    from .event_queryset import OutboxQuerySet

KEPT: Final = timedelta(days=90)  # from the beginning of an operation that has ended
MAX_ABOUT: Final = 1000  # characters of the text that says what an operation is about
MAX_NAME: Final = 255  # characters of a person's name


class OperationQuerySet(TableQuerySet["OutboxOperation"]):
    """The log of operations, newest first by ``-pk``, and the bulk changes among them.

    Example::

        rows = OutboxEvent.objects.filter(event_type="order.placed")
        operation = OutboxOperation.objects.begin("replay", rows, by="ada", rate="100/m")
        ...
        OutboxOperation.objects.filter(pk=operation.pk).stop(by="ada")
    """

    table = "outbox_operation"

    def open(self) -> OperationQuerySet:
        """Return the bulk changes that workers work off, oldest first."""
        return self.filter(state=OutboxOperation.State.OPEN).order_by("pk")

    def begin(
        self,
        kind: str,
        rows: OutboxQuerySet,
        *,
        by: str = "",
        about: str = "",
        rate: str | None = None,
        limit: int | None = None,
        matched: int | None = None,
    ) -> OutboxOperation:
        """Have a worker replay, discard or run now what matches the filters of ``rows``.

        ``kind`` is ``"replay"``, ``"discard"`` or ``"run_now"``. Events that die later are left
        out. With a ``rate`` such as "100/m" so many become due, by id upwards; ``limit`` is how
        many at most, ``matched`` how many there are, if that is known.

        Raises ``ValueError`` for another kind or rate, a limit below 1, and for ``rows`` that are
        filtered by more than values of columns, or sliced.
        """
        if kind not in BULK_KINDS:
            raise ValueError(f"The kind is {kind!r}; expected one of {', '.join(BULK_KINDS)}.")
        if limit is not None and limit < 1:
            raise ValueError(f"The limit is {limit!r}; expected at least 1.")
        if rate is not None:
            Spacing(rate)
        where = conditions(rows)
        operation = OutboxOperation(
            kind=kind,
            state=OutboxOperation.State.OPEN,
            about=(about or in_words(where))[:MAX_ABOUT],
            by=by[:MAX_NAME],
            filters=json.dumps(where, default=str),
            rate=rate,
            limit=limit,
            matched=matched,
        )
        # Aware, and not an expression: the row that is returned says when it began.
        operation.started_at = self._clock()
        operation.save(using=self._write_alias(), force_insert=True)
        return operation

    def note(self, kind: str, about: str, *, by: str = "") -> OutboxOperation:
        """Add to the log what was done."""
        operation = acting(kind, by, about)
        operation.add(0, using=self._write_alias())
        return operation

    def stop(self, *, by: str = "") -> int:
        """End the open ones among these; return how many. What is done stays done."""
        stopped = {"state": OutboxOperation.State.STOPPED, "ended_at": DatabaseNow()}
        return self.using(self._write_alias()).open().update(**stopped, stopped_by=by[:MAX_NAME])

    def expired_condition(self, settings: Settings) -> Q:
        """Return the condition of the log older than 90 days."""
        over = ~Q(state=OutboxOperation.State.OPEN)
        return Q(over, started_at__lt=self._clock() - KEPT)

    def purge_batches(self, settings: Settings | None = None) -> Iterator[int]:
        """Delete the log older than 90 days; yield the size of each delete, which commits."""
        return self._purge_oldest(settings or current())


class OutboxOperation(models.Model):
    """What a person, a command or a breaker did; while it is open, what a worker works off."""

    class Kind(models.TextChoices):
        REPLAY = "replay", _("replay")
        DISCARD = "discard", _("discard")
        RUN_NOW = "run_now", _("run now")
        SKIP = "skip", _("skip")
        CANCEL = "cancel", _("cancel")
        RESCHEDULE = "reschedule", _("reschedule")
        RELEASE = "release", _("release")
        DELIVER_TO = "deliver_to", _("give to a listener")
        PAUSE = "pause", _("pause")
        RESUME = "resume", _("resume")
        BREAKER_OPENED = "breaker_opened", _("circuit breaker opened")
        BREAKER_CLOSED = "breaker_closed", _("circuit breaker closed")

    class State(models.TextChoices):
        OPEN = "open", _("running")
        DONE = "done", _("done")
        STOPPED = "stopped", _("stopped")

    id = models.BigAutoField(primary_key=True)
    kind = ExactCharField(_("what"), max_length=16, choices=Kind.choices)
    state = ExactCharField(_("state"), max_length=8, choices=State.choices, default=State.DONE)
    about = ExactTextField(_("of what"), default="")
    by = ExactCharField(_("by"), max_length=MAX_NAME, default="")
    started_at = UTCDateTimeField(_("began"))
    ended_at = UTCDateTimeField(_("ended"), null=True)
    stopped_by = ExactCharField(_("stopped by"), max_length=MAX_NAME, default="")
    filters = ExactTextField(null=True)  # JSON of ``conditions``, if to be worked off
    rate = ExactTextField(_("rate"), null=True)
    limit = models.IntegerField(_("at most"), null=True)
    matched = models.IntegerField(_("matched"), null=True)  # NULL: not counted
    done = models.IntegerField(_("deliveries"), default=0)
    skipped = models.IntegerField(_("skipped"), default=0)  # locked elsewhere, or changed before
    after = ExactCharField(max_length=ROW_ID_LENGTH, default="")  # the last id so far
    next_at = UTCDateTimeField(null=True)  # with a rate: when the next one is due

    objects = OperationQuerySet.as_manager()

    class Meta:
        db_table = table_name("outbox_operation")
        verbose_name = _("outbox operation")
        verbose_name_plural = _("outbox operations")
        default_permissions = ()  # those of events cover these
        indexes = [
            models.Index(fields=["state"], name=index_name("outbox_operation_open")),
            models.Index(fields=["started_at"], name=index_name("outbox_operation_time")),
        ]

    def __str__(self) -> str:
        return f"{self.Kind(self.kind).label} {self.about}".strip()

    @property
    def processed(self) -> int:
        return int(self.done + self.skipped)

    def counted(self, count: int, *, using: str) -> int:
        """Count what a batch changed, in its transaction; return that."""
        if count:
            self.add(count, using=using)
        return count

    def add(self, count: int, *, using: str) -> None:
        """Count what a batch changed; with the first one, write the row."""
        changes: dict[str, Any] = {"done": F("done") + count}
        if self.state != self.State.OPEN:
            changes["ended_at"] = DatabaseNow()
        # Its row may have been rolled back; on SQLite another one may have its id then.
        rows = OutboxOperation.objects.using(using).filter(kind=self.kind, about=self.about)
        if self.pk and rows.filter(pk=self.pk, by=self.by).update(**changes):
            return
        self.pk, self.done = None, count
        # No expression: from 6.0 on, Django would read it again, in whatever DateStyle.
        self.started_at = self.ended_at = rows._clock()
        self.save(using=using, force_insert=True)


BULK_KINDS: Final = ("replay", "discard", "run_now")
By = str | OutboxOperation  # who makes a change, or what it is part of


def acting(kind: str, by: By, about: str | models.QuerySet[Any]) -> OutboxOperation:
    """Return the log's row of what is about to be done; ``add`` writes it."""
    if isinstance(by, OutboxOperation):
        return by
    if not isinstance(about, str):
        try:
            about = in_words(conditions(about))
        except ValueError:
            about = ""
    return OutboxOperation(kind=kind, about=about[:MAX_ABOUT], by=by[:MAX_NAME])


# --- the filters of a query set, as JSON ----------------------------------------------------------


def conditions(rows: models.QuerySet[Any]) -> list[Any]:
    """Return the filters of these rows: lists of connector, negation and conditions.

    A condition is a lookup and its value. Raises ``ValueError`` for what no JSON can say.
    """
    if rows.query.is_sliced:
        raise ValueError("These rows are sliced; expected rows that filters choose, and a limit.")
    return _plain(rows.query.where)


def _plain(node: Any) -> list[Any]:
    if isinstance(node, WhereNode):
        return [node.connector, node.negated, [_plain(each) for each in node.children]]
    if isinstance(node, IsDead):
        return ["status", int(Status.DEAD)]
    if not isinstance(node, Lookup):
        raise ValueError("A filter is an expression; expected columns and values.")
    # A key has been looked up: its streams are compared.
    names, column = ["in" if isinstance(node, In) else str(node.lookup_name)], node.lhs
    while isinstance(column, Transform):
        names, column = [str(column.lookup_name), *names], column.lhs
    value: Any = node.rhs
    if not isinstance(column, Col):
        raise ValueError("A filter compares an expression; expected columns and values.")
    if isinstance(value, DatabaseNow):
        value = NOW
    elif hasattr(value, "resolve_expression"):
        raise ValueError("A filter compares with more than a value; expected columns and values.")
    return ["__".join([column.target.name, *names]), value]


NOW: Final = {"now": True}  # a value that is the database's time when a worker asks


def condition(plain: list[Any]) -> Q:
    """Return the condition of ``conditions``."""
    if len(plain) == 2:
        name, value = plain
        return Q((name, DatabaseNow() if value == NOW else value))
    connector, negated, children = plain
    return Q(*map(condition, children), _connector=connector, _negated=negated)


def in_words(plain: list[Any]) -> str:
    """Return what is filtered by, for people to read."""
    if len(plain) == 2:
        name, value = plain
        values = value if isinstance(value, list) else [value]
        if name in ("status", "status__exact", "status__in"):
            values = [Status(each).name for each in values]
        text = ", ".join(map(str, values))
        return f"{name.removesuffix('__exact')}: {text}"
    connector, negated, children = plain
    text = f" {connector} ".join(map(in_words, children))
    return f"NOT ({text})" if negated else f"({text})" if connector == Q.OR else text
