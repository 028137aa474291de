"""``write`` and ``write_many`` behave the same on every database; each run tests one of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, models, transaction
from django.db.transaction import TransactionManagementError
from django.dispatch import Signal
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox import (
    Event,
    InvalidEvent,
    NoActiveTransaction,
    PayloadTooLarge,
    signals,
    write,
    write_many,
)
from django_outbox.listeners.registry import digest
from django_outbox.models import OutboxEvent
from django_outbox.writing.on_commit import hot_queues
from tests.cases import cases
from tests.table import listening, undone
from tests.test_events import REFUSED, UNFIT, nested
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(databases=["default", "other"])

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


class ToOther:
    def db_for_write(self, model: type[models.Model], **hints: Any) -> str | None:
        return "other" if model is OutboxEvent else None


def queries(alias: str = "default") -> CaptureQueriesContext:
    return CaptureQueriesContext(connections[alias])


def rows(alias: str = "default") -> int:
    return OutboxEvent.objects.using(alias).count()


# --- one transaction ----------------------------------------------------------------------------


def test_changing_the_callers_objects_later_changes_nothing() -> None:
    payload, headers = {"a": [1]}, {"h": "1"}
    with transaction.atomic():
        write("x", payload, headers=headers)
        payload["a"].append(2)
        headers["h"] = "2"
    row = OutboxEvent.objects.get()
    assert (row.payload, row.headers) == ('{"a":[1]}', '{"h":"1"}')


# --- a row for each listener --------------------------------------------------------------------

HOOKS = {"QUEUES": {"hooks": {}}}
MAIL, PLAIN, AUDIT = "x mail", "x", "* audit"


def ignore(event: Event) -> None:
    """Do nothing."""


@contextmanager
def three_listeners() -> Iterator[None]:
    with (
        listening(ignore, "x", name="mail", queue="hooks"),
        listening(ignore, "x"),
        listening(ignore, "*", name="audit"),
    ):
        yield


@pytest.mark.parametrize("many", [False, True], ids=["write", "write_many"])
@pytest.mark.parametrize("key", [None, "k"])
def test_each_listener_gets_a_row_and_each_row_the_receipt_of_all(
    key: str | None, many: bool
) -> None:
    with three_listeners(), override_settings(OUTBOX=HOOKS), transaction.atomic():
        event = Event(event_type="x", payload=1, key=key)
        event_id = write_many([event])[0] if many else write(event)
    receipt = " ".join(sorted(map(digest, (MAIL, PLAIN, AUDIT))))
    found = [
        (each.pk, each.listener, each.queue, each.stream, each.routes)
        for each in OutboxEvent.objects.of_event(str(event_id))
    ]
    ids = {
        PLAIN: event_id,  # of the first queue, and more specific than its other listener
        AUDIT: f"{event_id}.{digest(AUDIT)}",
        MAIL: f"{event_id}.{digest(MAIL)}",
    }
    places = {PLAIN: ("default", ":k"), AUDIT: ("default", "audit:k"), MAIL: ("hooks", "mail:k")}
    assert sorted(found) == sorted(
        (id_, title, places[title][0], places[title][1] if key else None, receipt)
        for title, id_ in ids.items()
    )
    same = "event_id", "event_type", "payload", "key", "seq", "created_at", "first_due_at"
    assert OutboxEvent.objects.values(*same).distinct().count() == 1


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(
    ("settings", "event_type"),
    [({"ROUTE": "worker"}, "x"), ({"MODE": "writer_only"}, "x"), ({}, "y")],
    ids=["routed by workers", "writer_only", "no listener"],
)
def test_an_event_that_the_writer_does_not_route_has_one_row(
    settings: dict[str, str], event_type: str, key: str | None
) -> None:
    with (
        listening(ignore, "x"),
        listening(ignore, "x", name="mail", queue="hooks"),
        override_settings(OUTBOX={**HOOKS, **settings}),
        transaction.atomic(),
    ):
        event_id = write(event_type, key=key)
    (found,) = OutboxEvent.objects.all()
    assert (found.pk, found.listener, found.queue) == (event_id, None, "default")
    assert (found.routes or "", found.stream) == ("", "?:k" if key else None)


def test_only_the_first_row_has_the_unique_key() -> None:
    with three_listeners(), override_settings(OUTBOX=HOOKS), transaction.atomic():
        event_id = write("x", unique_key="u")
        assert write("x", unique_key="u", on_duplicate="ignore") == event_id
    keys = {each.pk: each.unique_key for each in OutboxEvent.objects.all()}
    assert keys.pop(str(event_id)) == "u"
    assert [*keys.values()] == [None, None]


# --- outside a transaction --------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [lambda: write("x"), lambda: write_many([Event(event_type="x")]), lambda: write_many([])],
)
def test_a_testcases_own_block_is_no_transaction(call: Callable[[], object]) -> None:
    """A forgotten ``atomic()`` fails in a ``TestCase`` too, inside the block that Django opens."""
    assert connection.in_atomic_block
    with queries() as sent, pytest.raises(NoActiveTransaction, match=r"transaction\.atomic\(\)"):
        call()
    assert len(sent) == 0


@pytest.mark.django_db(transaction=True)
def test_autocommit_is_no_transaction() -> None:
    assert not connection.in_atomic_block
    with queries() as sent, pytest.raises(NoActiveTransaction) as caught:
        write("x")
    assert len(sent) == 0
    assert isinstance(caught.value, TransactionManagementError)


def test_the_hint_names_the_alias_that_is_in_a_transaction() -> None:
    with (
        transaction.atomic(using="other"),
        pytest.raises(NoActiveTransaction, match=r"on 'default'.* active on \['other'\]"),
    ):
        write("x")
    assert rows() == rows("other") == 0


SENDING: dict[str, Callable[[Signal], object]] = {
    "send": lambda signal: signal.send(sender=None),
    "send_robust": lambda signal: signal.send_robust(sender=None)[0][1],
    "asend": lambda signal: async_to_sync(signal.asend)(sender=None),
}


@cases("way", SENDING)
def test_a_signal_receiver_is_told_what_it_can_do(way: str) -> None:
    def receiver(**named: object) -> None:
        write("x")

    signal = Signal()
    signal.connect(receiver)
    with pytest.raises(NoActiveTransaction) as outside:
        receiver()
    with pytest.raises(NoActiveTransaction) as caught:
        if isinstance(answer := SENDING[way](signal), Exception):
            raise answer
    assert "ATOMIC_REQUESTS" in str(caught.value)
    assert "ATOMIC_REQUESTS" not in str(outside.value)


@override_settings(DATABASE_ROUTERS=["tests.test_write.ToOther"])
def test_the_router_names_the_database() -> None:
    with transaction.atomic(using="other"):
        write("x")
    with transaction.atomic():
        with pytest.raises(NoActiveTransaction, match="on 'other'"):
            write("x")
        write("x", using="default")  # overrides the router
    assert (rows(), rows("other")) == (1, 1)


def test_a_transaction_that_must_roll_back_takes_no_event() -> None:
    with transaction.atomic(), transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            write("x")
    assert rows() == 0


# --- bad input --------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    **{
        f"payload: {name}": (lambda make=make: write("x", make()), InvalidEvent)
        for name, make in UNFIT.items()
    },
    **{
        str(fields): (lambda fields=fields: write(**{"event_type": "x", **fields}), InvalidEvent)
        for fields, _ in REFUSED
        if fields != {"aggregate_type": None}  # as if it were left out
    },
    "payload: lone surrogate": (lambda: write("x", ["\ud800"]), InvalidEvent),
    "payload: nesting 101": (lambda: write("x", nested(101)), InvalidEvent),
    "payload: nesting 20000": (lambda: write("x", nested(20_000)), InvalidEvent),
    "payload: too large": (lambda: write("x", "a" * 1_048_575), PayloadTooLarge),
    "delay: None": (lambda: write("x", deliver_after=None), TypeError),  # type: ignore[arg-type]
    "delay: due None": (lambda: write("x", available_at=None), TypeError),  # type: ignore[arg-type]
    "on_duplicate: unknown": (lambda: write("x", on_duplicate="skip"), ValueError),  # type: ignore[arg-type]
    "an Event and a payload": (lambda: write(Event(event_type="x"), 1), InvalidEvent),
    "an Event and a delay": (lambda: write(Event(event_type="x"), deliver_after=1), InvalidEvent),
    "many: no Event": (lambda: write_many([Event(event_type="x"), "y"]), InvalidEvent),  # type: ignore[list-item]
    "many: one bad payload": (
        lambda: write_many([Event(event_type="x"), Event(event_type="x", payload={1})]),
        InvalidEvent,
    ),
    "many: one too large": (
        lambda: write_many([Event(event_type="x"), Event(event_type="x", payload="a" * 2**20)]),
        PayloadTooLarge,
    ),
}


@cases("name", BAD)
@undone()
def test_bad_input_is_found_before_any_sql_and_poisons_nothing(name: str) -> None:
    call, error = BAD[name]
    with transaction.atomic():
        before = Order.objects.create(sku="before")
        with queries() as sent, pytest.raises(error) as caught:
            call()
        assert len(sent) == 0
        assert type(caught.value) is error
        Order.objects.create(sku="after")
    assert Order.objects.filter(pk__gte=before.pk).count() == 2
    assert rows() == 0


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 10})
def test_the_limit_is_a_setting_and_counts_utf8_bytes() -> None:
    """The limit is inclusive: a payload of exactly that many bytes passes."""
    with transaction.atomic():
        write("x", "éééé")  # 8 bytes plus two quotes
        with pytest.raises(PayloadTooLarge, match="11 bytes; at most 10"):
            write("x", "ééééa")
    assert OutboxEvent.objects.get().payload == '"éééé"'


# --- many ---------------------------------------------------------------------------------------


def events(count: int, **fields: Any) -> list[Event]:
    return [Event(event_type="x", payload=number, **fields) for number in range(count)]


# --- signals and hot queue ------------------------------------------------------------------------


class Queue:
    """A hot queue with room for this many events."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.events: list[Event] = []
        self.polls = 0

    def offer(self, event: Event) -> bool:
        if len(self.events) >= self.room:
            return False
        self.events.append(event)
        return True

    def poll(self) -> None:
        self.polls += 1

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.events]


@pytest.fixture
def queue(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setitem(hot_queues.by_alias, "default", made)
    return made


def callbacks() -> int:
    return len(connection.run_on_commit)


def test_x5_every_savepoint_has_its_own_callback_and_takes_only_its_own_events_along(
    queue: Queue,
) -> None:
    """A savepoint that is rolled back drops its own callback and events, and no others."""
    with transaction.atomic():
        write("before")
        with undone():
            write("undone")
            write("undone too")
            assert callbacks() == 2
        with transaction.atomic():
            write("kept")
        write("after")
        assert callbacks() == 2
    assert queue.types == ["before", "after", "kept"]


def test_delayed_events_are_not_offered_but_the_claimer_polls(queue: Queue) -> None:
    """A delayed event cannot start now, but the claimer has to know its due time."""
    with transaction.atomic():
        write("later", deliver_after=60)
    assert (queue.types, queue.polls) == ([], 1)


def test_a_full_queue_drops_and_says_so(queue: Queue) -> None:
    """A dropped event stays due in its row, and the claimer polls for it."""
    queue.room = 1
    told: list[tuple[str, str]] = []

    def queued(sender: str, event: Event, **kwargs: Any) -> None:
        told.append(("queued", event.event_type))

    def dropped(sender: str, event: Event, **kwargs: Any) -> None:
        told.append(("dropped", event.event_type))

    signals.event_queued.connect(queued)
    signals.event_dropped.connect(dropped)
    try:
        with transaction.atomic():
            write("a")
            write("b")
            assert told == []
    finally:
        signals.event_queued.disconnect(queued)
        signals.event_dropped.disconnect(dropped)
    assert told == [("queued", "a"), ("dropped", "b")]
    assert queue.polls == 1
    assert OutboxEvent.objects.due().count() == 2


@override_settings(OUTBOX={"HOT_QUEUE_CAPACITY": 3})
def test_one_transaction_keeps_no_more_payloads_than_fit(queue: Queue) -> None:
    """A transaction must not fill the memory with hot events that the queue cannot hold."""
    with transaction.atomic():
        write_many(events(10))
    assert (len(queue.events), queue.polls) == (3, 1)


@override_settings(OUTBOX={"ENABLED": False})
def test_disabled_still_writes_and_hands_nothing_over(queue: Queue) -> None:
    with transaction.atomic():
        write("x")
        assert callbacks() == 0
    assert rows() == 1
    assert (queue.types, queue.polls) == ([], 0)


def test_a_queue_that_fails_costs_the_caller_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in our ``on_commit`` callback does not stop the caller's other callbacks."""
    monkeypatch.setattr(queue, "offer", lambda event: 1 / 0)
    done: list[int] = []
    with transaction.atomic():
        write("x")
        transaction.on_commit(lambda: done.append(1))
    assert done == [1]
    assert rows() == 1


def test_a_write_in_an_on_commit_callback_is_handed_over_too(queue: Queue) -> None:
    def again() -> None:
        with transaction.atomic():
            write("second")

    with transaction.atomic():
        write("first")
        transaction.on_commit(again)
    assert queue.types == ["first", "second"]


def test_a_write_is_announced_and_receivers_cannot_harm_it() -> None:
    seen: list[tuple[str, str]] = []

    def receiver(sender: str, event: Event, **kwargs: Any) -> None:
        seen.append((sender, event.event_type))
        raise ZeroDivisionError

    signals.event_written.connect(receiver)
    try:
        with transaction.atomic():
            write("a")
            write_many(events(1))
    finally:
        signals.event_written.disconnect(receiver)
    assert seen == [("default", "a"), ("default", "x")]
    assert rows() == 2


# --- from models.py -------------------------------------------------------------------------------


def test_write_can_be_imported_and_called_from_a_models_module(tmp_path: Path) -> None:
    """Models may import ``write`` before our app is loaded; calling it then gives a clear error."""
    app = tmp_path / "early"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "models.py").write_text(
        textwrap.dedent(
            """
            from django.db import models
            from django_outbox import NoActiveTransaction, write

            try:
                write("too early")
            except NoActiveTransaction:
                called = True

            class Thing(models.Model):
                def save(self, **options):
                    super().save(**options)
                    write("thing.saved", aggregate=self)
            """
        )
    )
    script = textwrap.dedent(
        """
        import django
        from django.conf import settings

        settings.configure(
            INSTALLED_APPS=["early", "django_outbox"],
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        )
        django.setup()
        from django.core.management import call_command
        from django.db import transaction
        from early.models import Thing, called
        from django_outbox.models import OutboxEvent

        assert called
        call_command("migrate", run_syncdb=True, verbosity=0)
        with transaction.atomic():
            Thing().save()
        print(OutboxEvent.objects.get().aggregate_type)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:{Path(outbox.__file__).parents[1]}"},
    )
    assert (done.stdout.strip(), done.stderr) == ("early.Thing", "")
