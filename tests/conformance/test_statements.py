"""Each statement of ``tests.statements`` on a server: what it reads, and for whom it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, models, transaction
from django.db.models import F, Value
from django.db.models.functions import Concat, Right

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxLease, OutboxPause, OutboxStream
from django_outbox.queue_settings import parked_queue
from django_outbox.sql import dialect_of, engine_connection
from tests.databases import vendor
from tests.plans import analyze, effort, undone
from tests.statements import NOW, PAUSE, calls, names
from tests.table import insert, multiply, now

pytestmark = pytest.mark.django_db(transaction=True)

Rows = set[tuple[type[models.Model], Any]]  # primary keys

MANY = 100  # rows that a statement is about
SOME = 30  # of so few rows, MariaDB 11.8 scans a small table, and MySQL reads them by their index
MOST = (3 if vendor() == "sqlite" else 10) * MANY  # that it costs, in the units of ``effort``
DUE = {
    OutboxEvent: "available_at",
    OutboxStream: "due_at",
    OutboxLease: "locked_until",
    OutboxPause: "until",
}


@pytest.fixture
def own() -> Iterator[Any]:
    """Return a connection of the engine."""
    with closing(engine_connection("default", lock_wait=0.05)) as own:
        yield own


def insert_named(count: int) -> None:
    """Insert the rows that the statements name, in the states that their names say."""
    due = now() - timedelta(seconds=50)
    leased, later = {"locked_by": "w", "locked_at": NOW}, due + timedelta(hours=1)
    parked = parked_queue(PAUSE + 1)
    OutboxPause.objects.create(pk=PAUSE, kind="event_type", name="other", paused_at=NOW)
    for pk, name in enumerate(("away", "hooks", "relay"), start=PAUSE + 2):
        OutboxPause.objects.create(pk=pk, kind="breaker", name=name, paused_at=NOW, until=due)
    states: dict[str, dict[str, Any]] = {
        "held": {"available_at": due, **leased},
        "free": {"available_at": later, "stream": "?d1:a", "seq": 1},
        "parked": {"available_at": due, "queue": parked},
        "old": {"available_at": due, "queue": "old"},
        "keyed": {"key": "held", "seq": 7, "listener": None},
    }
    given = {"event_type": "order.placed", "payload": "{}", "listener": "order.placed"}
    given |= {"routes": "d1", "occurred_at": NOW, "created_at": NOW}
    OutboxEvent.objects.bulk_create(
        OutboxEvent(id=each, event_id=each, attempts=n % 2, **(given | columns))
        for state, columns in states.items()
        for n, each in enumerate(names(state, count))
    )
    with_key = OutboxEvent.objects.filter(key="held")
    with_key.update(stream=Concat(Value(":held"), Right("id", 3)))
    OutboxStream.objects.bulk_create(
        OutboxStream(stream=each, key=each, seq=7, **columns)
        for each, columns in [
            (":idle", {}),
            ("lane:idle", {}),
            *((each, {"due_at": due, **leased}) for each in names(":held", count)),
            *((each, {"due_at": due, "queue": "old"}) for each in names(":old", count)),
            *((each, {"due_at": due, "queue": parked}) for each in names(":parked", 10)),
        ]
    )
    owners = {"a": "", "purge": None, "z": "w"}
    OutboxLease.objects.bulk_create(OutboxLease(name=n, locked_by=o) for n, o in owners.items())


# -- what they read --------------------------------------------------------------------------------


def insert_half_drained() -> None:
    """Insert 35,000 events, 10,000 of them each with its own key, and drain most of them."""
    ids, events, due = insert(35_000, due=-30), OutboxEvent.objects, now()
    with_key = events.filter(pk__gte=ids[25_000], pk__lte=ids[-1])
    with_key.update(key="k", stream=Concat(Value(":"), "id"), seq=1, available_at=None)
    first, *others = (f":{each}" for each in ids[25_000:])
    multiply(OutboxStream(stream=first, key="k", seq=1, due_at=due), others)
    ended = {"status": Status.DONE, "done_at": due, "available_at": None}
    events.filter(pk__gte=ids[0], pk__lt=ids[18_000]).update(**ended)
    with_key.filter(pk__gte=ids[30_000]).update(**ended)
    OutboxStream.objects.filter(pk__gte=f":{ids[30_000]}", pk__lt=":a").update(due_at=None)


def learn() -> None:
    for model in DUE:
        analyze(model)


def costs(own: Any) -> dict[str, int]:
    """Return which statements cost too much, and how much, by how PostgreSQL plans them."""
    found = {}
    for mode in ("generic", "custom") if vendor() == "postgres" else ("",):
        if mode:
            with own.cursor() as cursor:
                cursor.execute(f"SET plan_cache_mode = force_{mode}_plan")
        for name, call in calls(MANY).items():
            found[f"{name} {mode}"] = effort(lambda call=call: call(dialect_of(own)), own)
    # All that is pending of a stream: what of it failed is not apart from the rest in the index.
    return {name: cost for name, cost in found.items() if cost > MOST and "retries" not in name}


def test_no_statement_costs_more_in_a_table_that_a_drain_has_half_emptied(
    own: Any, emptied: None
) -> None:
    """Whether what was planned, or known, was of the small table at its beginning or of today's."""
    if vendor() == "sqlite":  # of empty tables: forget what was known
        learn()
    insert_named(MANY)
    assert costs(own) == {}
    insert(15_000, due=None, key="k", stream=":held000", seq=8, counted="seq")
    if vendor() != "sqlite":  # it is rarely analyzed
        learn()
    assert costs(own) == {}
    insert_half_drained()
    assert costs(own) == {}
    learn()
    if vendor() == "sqlite":  # a connection reads the statistics when it opens
        own.close()
    assert costs(own) == {}


# -- for whom they wait ----------------------------------------------------------------------------

needs_row_locks = pytest.mark.skipif(vendor() == "sqlite", reason="has one writer at a time")
WAITING = {
    "settle as done",
    "settle as done, with a key",
    "delete what is done",
    "settle",
    "settle, with a key",
    "route rows",
    "lock an event",
    "lock rows",
    "note a receipt",
    "note a lost worker",
    "keep a stream suspected",
    "wake streams",
    "number events",
    "give streams a new version",
    "take a named lease",
    "renew a named lease",
    "release a named lease",
    "win the probe of a breaker",
    "prolong a breaker",
    "close a breaker",
    "delete events",
    "delete streams",
}


@pytest.fixture
def wanted(own: Any) -> dict[str, Rows]:
    """Insert some rows; return which of them each call changes or locks when nobody else does."""
    insert_named(SOME)
    insert(20, due=-1)
    insert(20, due=None, status=Status.DONE, done_at=now())
    return {name: outcome(own, call)[1] for name, call in calls(SOME).items()}


def outcome(own: Any, call: Callable[[Any], object]) -> tuple[bool, Rows]:
    """Return whether a call waited for a lock, and which rows it changed, or else locked."""
    waited, before = False, contents(own)

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal waited
        try:
            return execute(sql, params, many, context)
        except OperationalError as error:
            waited = dialect_of(own).is_lock_wait(error)
            raise

    with undone(own):
        try:
            with own.execute_wrapper(note):
                call(dialect_of(own))
        except OperationalError:
            assert waited
            return True, set()
        changed = {(model, pk) for model, pk, *_ in before - contents(own)}
        return waited, changed or everything() - lockable()


def contents(own: Any) -> set[tuple[Any, ...]]:
    """Return all rows, each with its model and first its primary key."""
    found = set[tuple[Any, ...]]()
    with own.cursor() as cursor:
        for model in DUE:
            cursor.execute(f"SELECT * FROM {own.ops.quote_name(model._meta.db_table)}")
            found |= {(model, *row) for row in cursor.fetchall()}
    return found


def everything() -> Rows:
    """Return all rows, but the pause for which something is parked: it cannot end meanwhile."""
    found = {(each, pk) for each in DUE for pk in each.objects.values_list("pk", flat=True)}
    return found - {(OutboxPause, PAUSE)}


def lockable() -> Rows:
    """Return the rows that no other session has locked."""
    with transaction.atomic():
        free = {each: each.objects.select_for_update(skip_locked=True) for each in DUE}
        found = {(each, row.pk) for each, rows in free.items() for row in rows}
        transaction.set_rollback(True)
    return found


@contextmanager
def changing(which: Rows) -> Iterator[None]:
    """Keep a transaction open that has changed rows, and their entries in the indexes."""
    with transaction.atomic():
        for model, due in DUE.items():
            pks = [pk for each, pk in which if each is model]
            model.objects.filter(pk__in=pks).update(**{due: F(due) + timedelta(seconds=1)})
        yield
        transaction.set_rollback(True)


@needs_row_locks
def test_no_statement_waits_for_a_row_that_it_does_not_change(
    own: Any, wanted: dict[str, Rows]
) -> None:
    found = {}
    for name, call in calls(SOME).items():
        with changing(everything() - wanted[name]):
            found[name] = outcome(own, call)
    assert found == {name: (False, rows) for name, rows in wanted.items()}


@needs_row_locks
def test_a_statement_leaves_a_locked_row_out_and_changes_the_others(
    own: Any, wanted: dict[str, Rows]
) -> None:
    """Except for those whose caller relies on all rows: they wait."""
    waited = set()
    for name, call in calls(SOME).items():
        rows = wanted[name]
        if vendor() != "postgres" and name in WAITING:
            continue  # for a second, for the same reason
        locked = {min(rows, key=str)} if rows else everything()
        with changing(locked):
            waits, changed = outcome(own, call)
        assert waits or rows - locked <= changed, name
        waited |= {name} if waits else set()
    assert waited == (WAITING if vendor() == "postgres" else {"claim what is due"})
