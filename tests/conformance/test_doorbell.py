"""Doorbells between processes, and what only PostgreSQL's NOTIFY can do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox import doorbell
from django_outbox.sql import engine_connection
from django_outbox.sql.postgresql_server import listen
from tests.reach.children import Site, workers_show
from tests.table import PLACED, insert, listening, write
from tests.test_doorbell import FAR, bells, ears, listeners, needs_postgres, rings_at
from tests.test_doorbell_own import forget, found
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["bells", "forget"]  # fixtures


def delivered(ids: list[str]) -> Callable[[], bool]:
    return lambda: {*Effect.objects.values_list("event_id", flat=True)} >= {*ids}


@pytest.mark.parametrize("kind", ["local", "redis", "postgres"])
def test_484_a_commit_is_heard_by_the_workers_of_other_processes(
    settings: Any, database_env: dict[str, str], tmp_path: Path, bells: Path, kind: str
) -> None:
    bell = rings_at(kind, bells)
    settings.OUTBOX = {"DOORBELL": bell}
    site = Site(database_env, tmp_path)
    with site.worker(DOORBELL=bell, **FAR) as child:
        workers_show(1)
        wait_until(lambda: ears(kind, bells) == 1, what="an ear")
        for _ in range(5):
            wait_until(delivered(write(event_type="reach.noted")), what="a delivery")
        assert child.stop() == 0
        assert ears(kind, bells) == 0
    assert {*Effect.objects.values_list("pid", "phase")} == {(child.pid, "cold")}


@pytest.mark.parametrize("kind", ["local", "redis", "postgres"])
def test_488_the_last_of_a_burst_is_not_missed(
    settings: Any, database_env: dict[str, str], tmp_path: Path, bells: Path, kind: str
) -> None:
    """Most of these commits send no notification, because one was sent just before."""
    bell = rings_at(kind, bells)
    settings.OUTBOX = {"DOORBELL": bell, "DOORBELL_INTERVAL": 0.05}
    site = Site(database_env, tmp_path)
    with site.worker(DOORBELL=bell, DOORBELL_INTERVAL=0.05, **FAR) as child:
        workers_show(1)
        wait_until(lambda: ears(kind, bells) == 1, what="an ear")
        for _ in range(3):
            burst = [each for _ in range(15) for each in write(event_type="reach.noted")]
            wait_until(delivered(burst), what="the whole burst")
        assert child.stop() == 0


def test_notify_comes_from_the_writer_after_its_commit(settings: Any) -> None:
    needs_postgres()
    settings.OUTBOX = {"DOORBELL": "postgres", "DOORBELL_INTERVAL": 0}
    me = connection.connection.info.backend_pid if connection.connection else None
    with closing(engine_connection("default", lock_wait=1)) as own:
        bell = doorbell._notifier("default").doorbell  # type: ignore[union-attr]
        listen(own, bell.channel)  # type: ignore[attr-defined]
        with transaction.atomic():
            outbox.write(PLACED)
            me = connection.connection.info.backend_pid
            assert not [*own.connection.notifies(timeout=0.05)]
        (heard,) = own.connection.notifies(timeout=10, stop_after=1)
        assert (heard.pid, heard.payload) == (me, "")
        with connection.cursor() as cursor:  # changed for the notification only
            cursor.execute("SHOW synchronous_commit")
            assert cursor.fetchone() == ("on",)


def test_18_a_lost_listen_session_is_made_again(settings: Any) -> None:
    """The probe delivers meanwhile; afterwards notifications do."""
    needs_postgres()
    settings.OUTBOX = {"DOORBELL": "postgres", "POLL_INTERVAL": 60, "PROBE_INTERVAL": 0.2}
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id)), outbox.Worker():
        (first,) = wait_until(listeners, what="LISTEN")
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [first])
        (event_id,) = insert()
        wait_until(lambda: seen == [event_id], what="a delivery without the ear")
        (second,) = wait_until(lambda: [each for each in listeners() if each != first])
        (event_id,) = insert()
        doorbell.ring(connection)
        wait_until(lambda: seen[1:] == [event_id], what="a delivery by the new ear")
    assert second != first


def test_18_what_was_written_while_nobody_listened_is_caught_up(settings: Any) -> None:
    needs_postgres()
    settings.OUTBOX = {"DOORBELL": "postgres", **FAR}
    seen: list[str] = []
    with listening(lambda event: seen.append(event.event_id)), outbox.Worker():
        wait_until(listeners, what="LISTEN")
        for _ in range(3):
            with connection.cursor() as cursor:
                for pid in listeners():
                    cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            (event_id,) = insert()  # without a notification
            wait_until(lambda event_id=event_id: event_id in seen, within=20, what="caught up")


def test_e002_a_database_for_listen_that_is_not_configured() -> None:
    needs_postgres()
    with override_settings(OUTBOX={"DOORBELL": {"kind": "postgres", "database": "othr"}}):
        [error] = found()
    assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
    assert "'othr', which DATABASES has" in error.msg
    assert 'Did you mean "other"?' in error.hint


@pytest.mark.parametrize("value", ["postgres", {"kind": "postgres"}], ids=str)
def test_e002_postgres_on_another_database(value: Any) -> None:
    with override_settings(OUTBOX={"DOORBELL": value}):
        errors = found()
    if connection.vendor == "postgresql":
        assert errors == []
        return
    [error] = errors
    assert error.id == "django_outbox.E002"
    assert "'default' is not a PostgreSQL database" in error.msg
