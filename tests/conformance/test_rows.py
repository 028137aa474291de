"""Requirements that no other test module covers: claims, leases, threads, purges and logs."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from django_outbox.worker.heartbeat import Statistics
from tests.plans import sent
from tests.sessions import processes
from tests.surroundings import gated
from tests.table import (
    claim,
    in_thread,
    insert,
    lease_ends_in,
    leases,
    listening,
    now,
    row,
    statuses,
    write,
)
from tests.test_engine_threads import FAR, SOON, Engine, watched
from tests.testapp.models import Effect
from tests.waiting import Gate, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = SOON


def statements(work: Callable[[], object]) -> list[str]:
    return [sql for sql in sent(work) if "outbox_event" in sql]


def renew(ids: list[str], *, me: str = "me") -> tuple[set[str], set[str]]:
    return dialect_of(connection).renew(me=me, leases=leases(ids), lease=90)


# -- databases -------------------------------------------------------------------------------------


def test_190_skip_locked_only_where_the_features_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = insert(3)
    has = connection.features.has_select_for_update_skip_locked
    assert any("SKIP LOCKED" in sql for sql in statements(lambda: renew(ids))) is has
    # MySQL claims without locks, except where a wait would be too long: see test_claim.py.
    claims_with = connection.vendor == "postgresql"
    assert any("SKIP LOCKED" in sql for sql in statements(claim)) is claims_with
    if connection.vendor == "postgresql":  # every supported version has it
        return
    monkeypatch.setattr(connection.features, "has_select_for_update_skip_locked", False)
    insert(3)
    sent = [*statements(lambda: renew(ids)), *statements(claim)]
    assert sent
    assert not any("SKIP LOCKED" in sql for sql in sent)
    assert all(lease_ends_in(each) > 80 for each in ids)


def test_192_a_lost_race_is_logged_at_debug_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if connection.vendor == "postgresql":
        pytest.skip("rows that are locked are skipped: no race to lose")
    ids = insert(4, due=-1)

    def be_faster(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE"):  # between our SELECT and our UPDATE
            assert len(in_thread(lambda: claim("other", limit=3)).result(20)) == 3
        return execute(sql, params, many, context)

    with caplog.at_level(logging.DEBUG, "django_outbox"), connection.execute_wrapper(be_faster):
        mine = [each["event_id"] for each in claim("me")]
    assert len(mine) == 1
    owners = {event_id: row(event_id).locked_by for event_id in ids}
    assert sorted(owners.values(), key=str) == ["me", "other", "other", "other"]
    assert owners[mine[0]] == "me"
    assert [each.levelno for each in caplog.records] == [logging.DEBUG]


# -- leases ----------------------------------------------------------------------------------------


def break_session(engine: Engine, session: Any) -> None:
    if connection.vendor == "sqlite":  # closed by another thread in mid-statement it crashes Python
        engine.broken.append(session)
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s)", [session])
        else:
            cursor.execute(f"KILL {int(session)}")


def test_n7_a_failed_renewal_is_repeated_on_a_new_connection(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.OUTBOX = {**SOON, "LEASE": 2.4}
    # Statistics use the same connection: they would reconnect first, and no renewal would fail.
    monkeypatch.setattr(Statistics, "write_if_due", lambda statistics: iter(()))
    ids = insert(2, due=-1)
    with watched() as engine, gated() as gate, outbox.Worker(workers=2):
        wait_until(lambda: len(gate.entered) == 2)
        for times in (1, 2):
            session = wait_until(lambda: engine.made("heartbeat"))[-1]
            break_session(engine, session)
            wait_until(lambda: len(engine.made("heartbeat")) > times, what="a new connection")  # noqa: B023
            wait_until(lambda: caplog.text.count("heartbeat works again") >= times)  # noqa: B023
            anew = OutboxEvent.objects.filter(available_at__gt=now() + timedelta(seconds=2.4))
            wait_until(lambda: anew.count() == 2, what="all renewed")  # noqa: B023
        gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 2})
    assert caplog.text.count("heartbeat failed") >= 2
    assert sorted(gate.entered) == sorted(ids)
    assert not OutboxEvent.objects.exclude(rescues=0).exists()


# -- transactions ----------------------------------------------------------------------------------


def open_transactions() -> int:
    """Return how many other sessions of this database are in a transaction."""
    if connection.vendor == "sqlite":
        name = str(connection.settings_dict["NAME"])
        with closing(sqlite3.connect(name, timeout=0, isolation_level=None)) as own:
            try:
                own.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return 1
            own.execute("ROLLBACK")
        return 0
    asks = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
        "AND backend_type = 'client backend'",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx t "
        f"JOIN {processes()} p ON p.id = t.trx_mysql_thread_id "
        "WHERE p.db = database() AND p.id <> connection_id()",
    }
    if connection.vendor == "mysql":
        time.sleep(0.15)  # InnoDB caches this table until it has not been read for 0.1 s
    with connection.cursor() as cursor:
        cursor.execute(asks[connection.vendor])
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("own", [False, True], ids=["plain listener", "with its own transaction"])
def test_25_no_transaction_is_open_while_a_listener_runs(own: bool) -> None:
    gate = Gate()

    def listener(event: outbox.Event) -> None:
        if not own:
            gate(event)
            return
        with transaction.atomic():  # shows that the check would see an open transaction
            Effect.objects.create(event_id=event.event_id, pid=0, phase="open")
            gate(event)

    with listening(listener), outbox.Worker(workers=1):
        write()
        wait_until(lambda: gate.entered)
        try:
            if own:
                wait_until(lambda: open_transactions() == 1)
            else:  # the heartbeat's last a moment; a listener's would stay open
                wait_until(lambda: open_transactions() == 0)
        finally:
            gate.open.set()
        wait_until(lambda: statuses() == {"DONE": 1})


def test_187_decisions_are_settled_together_in_autocommit_by_the_settler() -> None:
    insert(400, due=-1)
    fails = outbox.Fixed(delay=FAR)

    def listener(event: outbox.Event) -> None:
        raise ValueError("not now")

    write(400, "order.failing")
    with (
        watched() as engine,
        listening(lambda event: None),
        listening(listener, "order.failing", retry=fails),
        outbox.Worker(),
    ):
        wait_until(lambda: statuses() == {"DONE": 400, "RETRY": 400}, within=30)
    settles = [each for each in engine.sent if "done_at = " in each[2]]
    assert {(thread, atomic) for thread, atomic, *_ in settles} == {
        ("outbox-default-settler", False)
    }
    assert 2 <= len(settles) <= 200  # of 800 decisions
