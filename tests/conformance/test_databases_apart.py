"""Two databases, each with its own outbox: neither affects the other."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.db.backends.signals import connection_created

import django_outbox as outbox
from django_outbox import doorbell, signals
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.sessions import terminate_other_sessions
from tests.surroundings import heard
from tests.table import listening
from tests.test_databases_apart import ALIASES, Witness, adds_effect, done, statuses, write
from tests.test_doorbell import rings_at
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=ALIASES)


# -- nothing crosses -------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_g13_two_workers_of_one_process_keep_apart(settings: Any, atomic: bool) -> None:
    settings.OUTBOX = {"WORKERS": 2}
    witness = Witness()
    with (
        heard(signals.event_settled) as settled,
        listening(witness, atomic=atomic),
        outbox.Worker(using="default"),
        outbox.Worker(using="other"),
    ):
        ids = {alias: [] for alias in ALIASES}  # type: dict[str, list[str]]
        for _ in range(10):
            for alias in ALIASES:
                ids[alias] += write(alias, 5)
        done(50)
    assert Counter(each[:2] for each in witness.seen) == Counter(
        (event_id, alias) for alias in ALIASES for event_id in ids[alias]
    )
    assert Counter(each["sender"] for each in settled) == {"default": 50, "other": 50}


@pytest.mark.parametrize("kind", ["local", "redis", "postgres"])
def test_49_the_doorbell_of_one_is_not_heard_by_the_other(settings: Any, kind: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bells") as directory:
        settings.OUTBOX = {"DOORBELL": rings_at(kind, Path(directory)), "DOORBELL_INTERVAL": 0}
        ears = {alias: doorbell.ear(alias) for alias in ALIASES}
        try:
            for ear in ears.values():
                assert ear is not None
                ear.listen()
            for alias in ALIASES:
                for ear in ears.values():  # a PostgreSQL listener connection first notifies itself
                    while ear.wait(0.05) or not (ear.sure or kind != "postgres"):  # type: ignore[union-attr]
                        """Until it is quiet."""
                doorbell.ring(connections[alias])
                heard = {each: ear.wait(1) for each, ear in ears.items()}  # type: ignore[union-attr]
                assert heard == {each: each == alias for each in ALIASES}
        finally:
            for ear in ears.values():
                ear.close()  # type: ignore[union-attr]


# -- using= ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["replay", "discard", "release", "purge"])
def test_74_the_verbs_of_a_queryset_act_on_its_database_alone(settings: Any, verb: str) -> None:
    settings.OUTBOX = {"RETENTION_DEAD": 0.001}
    for alias in ALIASES:
        write(alias, 3)
    changes: dict[str, Any] = {"status": Status.DEAD, "available_at": None}
    if verb == "release":
        changes = {"locked_by": "a lost worker"}
    for alias in ALIASES:
        rows = OutboxEvent.objects.using(alias)
        rows.update(done_at=rows.latest("created_at").created_at, **changes)
    before = [*OutboxEvent.objects.using("default").order_by("pk").values()]
    assert getattr(OutboxEvent.objects.using("other"), verb)() == 3
    assert [*OutboxEvent.objects.using("default").order_by("pk").values()] == before
    assert [*OutboxEvent.objects.using("other").order_by("pk").values()] != before


# -- read-only -------------------------------------------------------------------------------------


class ReadOnly:
    """Make this process's sessions read-only, like those of a standby.

    Each session is made read-only when it is opened, so sessions of other processes are not
    affected. It stays read-only until it is closed.
    """

    SAYS = {
        "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
        "sqlite": "PRAGMA query_only = ON",
    }

    def __init__(self) -> None:
        self.is_on = False
        self._known: list[Any] = []  # SQLite's connections, which no server can end

    def note(self, *, connection: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the test's own connection
        if connection.vendor == "sqlite":
            self._known.append(connection.connection)
        if self.is_on:
            with connection.cursor() as cursor:
                cursor.execute(self.SAYS[connection.vendor])

    def turn_on(self) -> None:
        self.is_on = True
        mine = connections["default"]
        if mine.vendor == "sqlite":
            for known in self._known:
                with suppress(sqlite3.ProgrammingError):  # closed in the meantime
                    known.execute(self.SAYS["sqlite"])
            return
        terminate_other_sessions()

    def turn_off(self) -> None:
        self.is_on = False


@pytest.fixture
def read_only() -> Iterator[ReadOnly]:
    found = ReadOnly()
    connection_created.connect(found.note)
    yield found
    connection_created.disconnect(found.note)


def test_x7_a_database_that_turns_read_only_is_waited_for(
    settings: Any, read_only: ReadOnly, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {"LEASE": 2, "DRAIN_TIMEOUT": 1, "POLL_INTERVAL": 0.2, "WORKERS": 2}
    runs: list[str] = []
    go_on = threading.Event()

    def listen(event: outbox.Event) -> None:
        runs.append(event.event_id)
        assert go_on.wait(30)

    def refused(machine: str) -> int:
        return sum(f"{machine} failed" in each.getMessage() for each in caplog.records)

    with listening(listen), outbox.Worker() as worker:
        try:
            ids = write("default", 10)
            wait_until(lambda: len(runs) == 2, what="two listeners inside")
            read_only.turn_on()
        finally:
            go_on.set()
        wait_until(lambda: refused("settler") >= 2, what="settles refused")
        wait_until(lambda: refused("heartbeat") >= 1, what="renewals refused")
        assert statuses("default") == {"NEW": 10}
        assert len(caplog.records) < 100
        assert worker._state == "running"
        read_only.turn_off()
        ids += write("default", 10)
        done(20, "default")
    assert Counter(runs) == Counter(ids)  # the one worker ran each event exactly once
    assert {*OutboxEvent.objects.values_list("attempts", flat=True)} == {0}


def test_x7_a_listener_whose_sessions_are_read_only_is_retried_on_others(
    settings: Any, read_only: ReadOnly
) -> None:
    """A connection opened while the database was read-only is closed after the failure."""
    settings.OUTBOX = {"WORKERS": 1, "RETRY": {"policy": "fixed", "delay": 0.05}}

    def listen(event: outbox.Event) -> None:
        if not event.attempts:
            connections["default"].close()
            read_only.is_on = True
            connections["default"].ensure_connection()
            read_only.is_on = False
        adds_effect(event)

    with listening(listen), outbox.Worker():
        (event_id,) = write("default")
        done(1, "default")
    assert OutboxEvent.objects.get(pk=event_id).attempts == 1
    assert Effect.objects.count() == 1
