"""``ENABLED=False``: events are written, and nothing of this process delivers them."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxWorker
from django_outbox.writing.on_commit import hot_queues
from tests.table import PLACED, insert, listening, row, statuses, write
from tests.test_embedded import serving, stop
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

SAID = 'OUTBOX["ENABLED"] is False: nothing is delivered alias=default'


@pytest.fixture(autouse=True)
def switched_off(settings: Any) -> None:
    settings.OUTBOX = {"ENABLED": False, "POLL_INTERVAL": 0.05, "PROBE_INTERVAL": 0.05}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "django_outbox"]


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("outbox-")]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a transaction"])
def test_drain_delivers_0_and_says_so(caplog: pytest.LogCaptureFixture, inside: bool) -> None:
    ids = [*write(3), *write(2, key="k")]
    calls: list[str] = []
    with listening(lambda event: calls.append(event.event_id)):
        if inside:
            with transaction.atomic():
                assert outbox.drain() == 0
        else:
            assert outbox.drain() == 0
    assert calls == []
    assert said(caplog) == [SAID]
    assert statuses() == {"NEW": 5}
    assert {row(each).locked_by for each in ids} == {None}


def test_drain_delivers_again_once_it_is_switched_on(settings: Any) -> None:
    write(3)
    with listening(lambda event: None):
        assert outbox.drain() == 0
        settings.OUTBOX = {}
        assert outbox.drain() == 3


def test_a_worker_starts_nothing_says_so_and_stops(caplog: pytest.LogCaptureFixture) -> None:
    insert(due=-5)
    with listening(lambda event: None):
        worker = outbox.Worker()
        worker.start()
        assert said(caplog) == [SAID]
        assert engine_threads() == []
        assert hot_queues.by_alias == {}
        assert not OutboxWorker.objects.exists()
        write()
        assert worker.stop() is True
        assert worker.stop() is True
        with pytest.raises(RuntimeError, match="was stopped"):
            worker.start()
    assert statuses() == {"NEW": 2}


def test_a_worker_as_a_context_manager_too() -> None:
    with outbox.Worker(), outbox.Worker():  # the second is not refused: there is no first
        write()
        assert engine_threads() == []
    assert statuses() == {"NEW": 1}


def test_an_embedded_one_starts_nothing(database_env: dict[str, str], tmp_path: Path) -> None:
    with serving("gunicorn", database_env, tmp_path, ENABLED=False) as server:
        answers = [server.write() for _ in range(4)]
        names = {name for _ in range(4) for name in server.get("threads")["names"]}
        assert not [name for name in names if name.startswith("outbox-")]
        server.child.says("nothing is delivered alias=default")
        stop(server)
    assert statuses() == {"NEW": len(answers)}
    assert not Effect.objects.exists()
    assert not OutboxEvent.objects.exclude(locked_by=None).exists()


@pytest.mark.parametrize("options", [[], ["--once"]], ids=str)
def test_the_command_says_so_and_ends(options: list[str]) -> None:
    write()
    answer = io.StringIO()
    with listening(lambda event: None, PLACED):
        call_command("outbox_worker", *options, stdout=answer)
    assert 'OUTBOX["ENABLED"] is False' in answer.getvalue()
    assert statuses() == {"NEW": 1}
