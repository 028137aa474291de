"""The queryset methods of ``OutboxEvent.objects``, which go by the database's clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection, connections
from django.db.utils import ConnectionHandler
from django.test import override_settings

from django_outbox import models as outbox_models
from django_outbox import signals
from django_outbox.events import stream_of
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream, missing_table
from django_outbox.sql import dialect_of
from tests.databases import vendor
from tests.surroundings import heard
from tests.table import stream_row, with_stream

pytestmark = pytest.mark.django_db(databases=["default", "other"])

NEW, DONE, RETRY, DEAD = Status.NEW, Status.DONE, Status.RETRY, Status.DEAD
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LONG_AGO = datetime(2001, 1, 1, tzinfo=timezone.utc)


def now(alias: str = "default") -> datetime:
    return dialect_of(connections[alias]).clock()


def row(
    event_id: str, status: Status = NEW, *, using: str = "default", **fields: Any
) -> OutboxEvent:
    """Store a row in any state; columns that are not given are as a write leaves them."""
    at = now(using)
    finished = status in (DONE, DEAD)
    defaults = {
        "event_type": "x",
        "payload": '{"a":1}',
        "occurred_at": at,
        "created_at": at,
        "first_due_at": at,
        "available_at": None if finished else at,
        "done_at": at if finished else None,
    }
    if fields.get("key"):
        defaults["stream"] = stream_of("", fields["key"])
    return OutboxEvent.objects.using(using).create(
        id=event_id, event_id=event_id, status=status, **with_stream({**defaults, **fields})
    )


def ids(rows: Any) -> list[str]:
    return [each.event_id for each in rows]


def get(event_id: str) -> OutboxEvent:
    return OutboxEvent.objects.get(event_id=event_id)


@pytest.fixture
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set Django's clock in this process a day ahead."""
    from django.utils import timezone as django_timezone

    monkeypatch.setattr(django_timezone, "now", lambda: datetime.now(timezone.utc) + DAY)


# --- filters by state -----------------------------------------------------------------------------


def test_adjectives_tell_the_states_apart() -> None:
    later, earlier = now() + HOUR, now() - HOUR
    row("new")
    row("retry", RETRY, available_at=earlier)
    row("later", available_at=later)
    row("leased", locked_by="w", locked_at=earlier, available_at=later)
    row("lost", RETRY, locked_by="w", locked_at=earlier, available_at=earlier + HOUR / 2)
    row("done", DONE)
    row("dead", DEAD, done_at=later)
    row("dead first", DEAD, done_at=earlier)
    rows = OutboxEvent.objects

    assert {*ids(rows.pending())} == {"new", "retry", "later", "leased", "lost"}
    assert ids(rows.leased()) == ["leased"]
    assert ids(rows.due()) == ["retry", "lost", "new"]  # oldest first
    assert ids(rows.done()) == ["done"]
    assert ids(rows.dead()) == ["dead first", "dead"]  # oldest first


def test_the_clock_is_the_databases(wrong_clock: None) -> None:
    row("due")
    row("later", available_at=now() + HOUR)
    row("leased", available_at=now() + HOUR, locked_by="w")
    assert ids(OutboxEvent.objects.due()) == ["due"]
    assert ids(OutboxEvent.objects.leased()) == ["leased"]


# --- replay ---------------------------------------------------------------------------------------


def dead_row(event_id: str = "dead", **fields: Any) -> OutboxEvent:
    options = {
        "attempts": 10,
        "rescues": 4,
        "last_error": "no",
        "first_due_at": LONG_AGO,
        "occurred_at": LONG_AGO,
        "created_at": LONG_AGO,
        "done_at": LONG_AGO,
        "headers": '{"h":"1"}',
        "tenant_id": "t",
        "deliver_at": LONG_AGO,
    }
    return row(event_id, DEAD, **{**options, **fields})


def test_replay_makes_a_dead_event_new_and_due() -> None:
    dead_row()
    before = now()

    assert OutboxEvent.objects.filter(event_id="dead").replay() == 1

    found = get("dead")
    assert (found.status, found.attempts, found.rescues) == (NEW, 0, 0)
    assert (found.done_at, found.last_error, found.locked_by, found.locked_at) == (None,) * 4
    assert found.available_at is not None
    assert before <= found.available_at <= now()
    assert found.first_due_at == found.available_at  # UNROUTABLE_GRACE starts again
    assert (found.payload, found.headers, found.tenant_id) == ('{"a":1}', '{"h":"1"}', "t")
    assert found.occurred_at == found.created_at == LONG_AGO
    assert ids(OutboxEvent.objects.due()) == ["dead"]


def test_replay_takes_any_queryset() -> None:
    """It may be ordered, limited, or filtered by columns that a replay changes."""
    for number in range(6):
        dead_row(f"dead {number}", done_at=LONG_AGO + number * DAY, attempts=number)

    assert OutboxEvent.objects.dead()[:2].replay() == 2
    assert ids(OutboxEvent.objects.due()) == ["dead 0", "dead 1"]
    assert OutboxEvent.objects.dead().filter(attempts__gte=4).replay() == 2
    assert ids(OutboxEvent.objects.dead()) == ["dead 2", "dead 3"]


def test_replay_keeps_what_other_listeners_have_done() -> None:
    """A row is of one listener, so only those whose rows are dead run again."""
    row("shared", DONE, listener="x", routes="1 2")
    dead_row("shared.2", listener="x mail", routes="1 2")
    OutboxEvent.objects.update(event_id="shared")
    done = OutboxEvent.objects.filter(pk="shared").values().get()

    assert OutboxEvent.objects.of_event("shared").replay() == 1
    assert OutboxEvent.objects.filter(pk="shared").values().get() == done
    replayed = OutboxEvent.objects.get(pk="shared.2")
    assert (replayed.status, replayed.listener, replayed.routes) == (NEW, "x mail", "1 2")


def test_replay_is_announced_once_with_its_count() -> None:
    dead_row("a")
    dead_row("b")
    dead_row("c")
    with heard(signals.events_replayed) as told:
        OutboxEvent.objects.dead().replay()
        OutboxEvent.objects.dead().replay()
    assert told == [{"sender": "default", "count": 3}]


def test_a_replay_in_batches_ends_though_its_events_die_again() -> None:
    """No event is replayed twice, and events that die after the start are left out."""
    for number in range(7):
        dead_row(f"dead {number}")
    counts = []
    for count in OutboxEvent.objects.dead().replay_batches(size=2):
        counts.append(count)
        assert len(counts) < 9
        OutboxEvent.objects.filter(status=NEW).update(status=DEAD, done_at=now())
        dead_row(f"new {len(counts)}", done_at=now())  # its id sorts after all the others
    assert counts == [2, 2, 2, 1]
    assert OutboxEvent.objects.dead().count() == 11


@pytest.mark.parametrize("verb", ["replay_batches", "discard_batches"])
def test_batches_take_dead_events_alone_and_hold_their_size(verb: str) -> None:
    for number in range(5):
        dead_row(f"dead {number}", key="k" if number % 2 else None, seq=number)
        row(f"done {number}", DONE)
    stream_row("k", seq=9).save()
    dead = OutboxEvent.objects.filter(event_id__gt="dead 0")
    with pytest.raises(ValueError, match="expected at least 1"):
        list(getattr(dead, verb)(size=0))
    assert list(getattr(dead, verb)(size=3)) == [3, 1]
    assert ids(OutboxEvent.objects.dead()) == ["dead 0"]
    assert OutboxEvent.objects.done().count() == 5


def test_a_walk_over_dead_events_goes_on_where_it_was_left() -> None:
    began = now()
    for number in range(5):
        dead_row(f"dead {number}")
    dead_row("dead 9", done_at=now() + HOUR)
    dead = OutboxEvent.objects.dead()
    assert next(dead.batches(size=2, until=began)) == ["dead 0", "dead 1"]
    rest = dead.batches(size=2, until=began, after="dead 1")
    assert [*rest] == [["dead 2", "dead 3"], ["dead 4"]]


# --- discard and release --------------------------------------------------------------------------


def test_what_waits_is_made_due_now() -> None:
    """Attempts and leases stay. An event with a key still waits for the events before it."""
    row("scheduled", available_at=now() + HOUR)
    row("retry", RETRY, attempts=3, available_at=now() + HOUR)
    row("leased", available_at=now() + HOUR, locked_by="w")
    dead_row("dead")
    row("head", RETRY, key="k", seq=1, available_at=None, deliver_at=now() + HOUR)
    row("behind", NEW, key="k", seq=2, available_at=None)
    stream_row("k", seq=2, due_at=now() + HOUR).save()
    assert OutboxEvent.objects.run_now() == 3
    assert {*ids(OutboxEvent.objects.due())} == {"scheduled", "retry"}
    assert (get("retry").status, get("retry").attempts) == (RETRY, 3)
    assert [each.key for each in OutboxStream.objects.due()] == ["k"]
    head = get("head")
    assert head.deliver_at is not None
    assert head.deliver_at <= now()
    assert OutboxEvent.objects.run_now() == 1  # a failed head still waits, so it counts again


def test_release_gives_leases_back_unstarted() -> None:
    lease = {"locked_by": "w", "locked_at": now(), "available_at": now() + HOUR}
    row("new", attempts=0, **lease)
    row("retry", RETRY, attempts=3, rescues=1, **lease)
    row("other", **{**lease, "locked_by": "v"})
    row("unleased", available_at=now() + HOUR)
    row("done", DONE, locked_by="w")

    assert OutboxEvent.objects.filter(locked_by="w").release() == 2

    assert {*ids(OutboxEvent.objects.due())} == {"new", "retry"}
    found = get("retry")
    assert (found.locked_by, found.locked_at) == (None, None)
    assert (found.status, found.attempts, found.rescues) == (RETRY, 3, 1)
    assert ids(OutboxEvent.objects.leased()) == ["other"]


# --- purge ----------------------------------------------------------------------------------------


def ages(*, status: Status, days: tuple[float, ...], prefix: str = "", **fields: Any) -> None:
    """Store one row for each age: the days since it was finished."""
    for age in days:
        row(f"{prefix}{age}", status, done_at=now() - age * DAY, **fields)


@pytest.mark.parametrize(
    ("outbox", "left"),
    [
        ({}, ["0", "6.9"]),  # 7 days
        ({"RETENTION_DONE": 86400}, ["0"]),
        ({"RETENTION_DONE": None}, ["0", "6.9", "7.1", "900"]),
    ],
    ids=str,
)
def test_done_events_are_purged_by_age_since_they_were_done(
    outbox: dict[str, Any], left: list[str], wrong_clock: None
) -> None:
    """The age goes by the database's clock, not by this process's."""
    ages(status=DONE, days=(0, 6.9, 7.1, 900), created_at=LONG_AGO)
    with override_settings(OUTBOX=outbox):
        assert OutboxEvent.objects.expired().count() == 4 - len(left)
        assert OutboxEvent.objects.purge() == 4 - len(left)
        assert OutboxEvent.objects.purge() == 0  # a second purge finds nothing
    assert sorted(ids(OutboxEvent.objects.all())) == left


@pytest.mark.parametrize(
    ("retention", "left"), [(None, {"1", "900"}), (2 * 86400, {"1"}), (0, set())]
)
def test_dead_events_stay_until_a_person_acts(retention: float | None, left: set[str]) -> None:
    ages(status=DEAD, days=(1, 900))
    with override_settings(OUTBOX={"RETENTION_DEAD": retention}):
        OutboxEvent.objects.purge()
    assert {*ids(OutboxEvent.objects.all())} == left


def test_live_events_are_never_purged() -> None:
    for status in (NEW, RETRY):
        row(status.name, status, available_at=LONG_AGO, created_at=LONG_AGO, done_at=LONG_AGO)
    with override_settings(OUTBOX={"RETENTION_DONE": 0, "RETENTION_DEAD": 0}):
        assert OutboxEvent.objects.purge() == 0


@pytest.mark.parametrize(
    ("unique", "left"),
    [
        (7 * 86400, {"done 1", "done 6"}),
        (2 * 86400, {"done 1"}),
        (0, set()),
        (None, {"done 1", "done 6", "done 8"}),
    ],
)
def test_unique_keys_outlive_the_retention(unique: float | None, left: set[str]) -> None:
    """RETENTION_DONE = 0 keeps rows with a unique_key for RETENTION_UNIQUE."""
    for age in (1, 6, 8):
        row(f"done {age}", DONE, done_at=now() - age * DAY, unique_key=f"done {age}")
        row(f"dead {age}", DEAD, done_at=now() - age * DAY, unique_key=f"dead {age}")
        row(f"plain {age}", DONE, done_at=now() - age * DAY)
    outbox = {"RETENTION_DONE": 0, "RETENTION_DEAD": 0, "RETENTION_UNIQUE": unique}
    with override_settings(OUTBOX=outbox):
        OutboxEvent.objects.purge()
    assert {*ids(OutboxEvent.objects.all())} == left


def backlog(count: int, *, every: int = 3) -> None:
    """Store finished rows, of which one in ``every`` is still live."""
    at = now()
    OutboxEvent.objects.bulk_create(
        OutboxEvent(
            id=f"{number:06}",
            event_id=f"{number:06}",
            event_type="x",
            payload="null",
            occurred_at=at,
            created_at=at,
            status=DONE if number % every else NEW,
            done_at=LONG_AGO if number % every else None,
            available_at=None if number % every else at,
        )
        for number in range(count)
    )


@override_settings(OUTBOX={"PURGE_BATCH_SIZE": 4})
def test_purge_deletes_bounded_batches_upwards() -> None:
    """Oldest ids first, and no batch exceeds the batch size."""
    backlog(20)
    batches, left = [], []
    for count in OutboxEvent.objects.purge_batches():
        batches.append(count)
        left.append(min(ids(OutboxEvent.objects.done()), default="none"))

    assert max(batches) <= 4
    assert sum(batches) == 13
    assert left == sorted(left)
    assert OutboxEvent.objects.count() == 7


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX={"PURGE_BATCH_SIZE": 4})
def test_every_batch_commits_by_itself() -> None:
    backlog(20)
    batches = OutboxEvent.objects.purge_batches()
    first = next(batches)
    connection.close()  # rolls back a transaction that is still open
    assert OutboxEvent.objects.count() == 20 - first < 20


def test_purge_keeps_to_its_queryset() -> None:
    ages(status=DONE, days=(8, 9), prefix="x ", event_type="x")
    ages(status=DONE, days=(8, 9), prefix="y ", event_type="y")
    assert OutboxEvent.objects.filter(event_type="x").purge() == 2
    assert OutboxEvent.objects.order_by("event_id")[:1].purge() == 1
    assert ids(OutboxEvent.objects.all()) == ["y 9"]


def test_purge_is_announced_with_its_count() -> None:
    ages(status=DONE, days=(8, 9))
    with heard(signals.events_purged) as told:
        OutboxEvent.objects.purge()
        OutboxEvent.objects.purge()
    assert told == [{"sender": "default", "count": 2}]


# --- counts and ages ------------------------------------------------------------------------------


def test_counts_by_status_names_every_status() -> None:
    assert OutboxEvent.objects.counts_by_status() == {"NEW": 0, "DONE": 0, "RETRY": 0, "DEAD": 0}
    for number, status in enumerate([NEW, DONE, DONE, RETRY, DEAD, DEAD, DEAD]):
        row(str(number), status, event_type="xy"[number % 2])
    assert OutboxEvent.objects.counts_by_status() == {"NEW": 1, "DONE": 2, "RETRY": 1, "DEAD": 3}
    of_x = OutboxEvent.objects.filter(event_type="x").dead()
    assert of_x.counts_by_status() == {"NEW": 0, "DONE": 0, "RETRY": 0, "DEAD": 2}


def test_the_age_of_the_oldest_due_event(wrong_clock: None) -> None:
    assert OutboxEvent.objects.oldest_pending_age() is None
    row("later", available_at=now() + HOUR)
    row("leased", available_at=now() + HOUR, locked_by="w")
    row("done", DONE)
    assert OutboxEvent.objects.oldest_pending_age() is None
    row("young", available_at=now() - timedelta(seconds=10))
    row("old", RETRY, available_at=now() - timedelta(seconds=100), created_at=LONG_AGO)
    age = OutboxEvent.objects.oldest_pending_age()
    assert age is not None
    assert 100 <= age < 160


def test_an_event_with_a_key_waits_since_its_stream_is_due() -> None:
    def stream(key: str, due: int, **values: Any) -> None:
        due_at = now() + timedelta(seconds=due)
        OutboxStream.objects.create(
            stream=stream_of("", key), key=key, seq=2, due_at=due_at, **values
        )
        for seq in (1, 2):
            row(f"{key}{seq}", key=key, seq=seq, event_type=f"{key}{seq}", available_at=None)

    row("without", available_at=now() - timedelta(seconds=10), event_type="without")
    stream("later", 100)
    stream("held", 100, locked_by="w")
    stream("idle", -500)
    OutboxEvent.objects.filter(key="idle").update(status=DONE)
    stream("old", -200)
    stream("older", -300)

    def oldest(**of: Any) -> float | None:
        age = OutboxEvent.objects.filter(**of).oldest_pending_age()
        return None if age is None else age // 60

    assert oldest() == 5
    assert oldest(event_type="without") == 0
    assert oldest(event_type="old1") == 3
    assert oldest(event_type="old2") is None  # it waits for the event before it
    assert [oldest(key=key) for key in ("idle", "later", "held")] == [None] * 3


# --- aliases, instants, tables --------------------------------------------------------------------


class ReadsElsewhere:
    """A database router that sends reads to a replica."""

    def db_for_read(self, model: type[Any], **hints: Any) -> str:
        return "other"

    def db_for_write(self, model: type[Any], **hints: Any) -> str:
        return "default"


def test_verbs_act_where_writes_go() -> None:
    """The methods read where they write, because a read replica may be behind."""
    dead_row()
    dead_row("another")
    with override_settings(DATABASE_ROUTERS=[ReadsElsewhere()]):
        assert OutboxEvent.objects.filter(status=DEAD).replay() == 2
        assert OutboxEvent.objects.using("default").release() == 0
    assert get("dead").status == NEW


def test_instants_are_stored_utc_to_the_microsecond() -> None:
    given = datetime(2030, 1, 2, 8, 4, 5, 678901, tzinfo=timezone(5 * HOUR))
    row("it", available_at=given)
    assert get("it").available_at == given
    assert get("it").available_at.tzinfo is timezone.utc  # type: ignore[union-attr]
    if vendor() != "postgres":
        with connection.cursor() as cursor:
            cursor.execute("SELECT CAST(available_at AS CHAR) FROM outbox_event")
            assert cursor.fetchone()[0] == "2030-01-02 03:04:05.678901"
    assert OutboxEvent.objects.filter(available_at=given).exists()
    assert not OutboxEvent.objects.filter(available_at__gt=given).exists()
    assert OutboxEvent.objects.filter(available_at__gte=given - timedelta(microseconds=1)).exists()


@pytest.mark.skipif(vendor() == "postgres", reason="there the setting is the session's time zone")
def test_the_time_zone_of_a_database_shifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``DATABASES["default"]["TIME_ZONE"]`` tells Django which zone other programs wrote in."""
    row("before", available_at=LONG_AGO)
    here = connections["default"]
    monkeypatch.setitem(here.settings_dict, "TIME_ZONE", "Asia/Tokyo")
    for name in ("timezone", "timezone_name"):
        here.__dict__.pop(name, None)
    try:
        assert str(here.timezone) == "Asia/Tokyo"
        row("it", available_at=LONG_AGO)
        assert {each.available_at for each in OutboxEvent.objects.all()} == {LONG_AGO}
        assert OutboxEvent.objects.filter(available_at=LONG_AGO).count() == 2
    finally:
        for name in ("timezone", "timezone_name"):
            here.__dict__.pop(name, None)


def test_a_row_is_named_in_one_line_without_payload() -> None:
    found = row("01", aggregate_id="7", payload='"secret"')
    assert str(found) == "x 01 (7)"


@pytest.fixture
def empty_database(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
    handler = ConnectionHandler({"default": settings})
    monkeypatch.setattr(outbox_models, "connections", handler)
    yield
    handler.close_all()


def test_a_missing_table_is_told_with_the_command_that_makes_it(empty_database: None) -> None:
    message = missing_table("default") or ""
    assert "'outbox_event'" in message
    assert "manage.py migrate django_outbox --database default" in message
