"""The admin page of operations: what runs and how far it is, who may stop it, and the log."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause, OutboxWorker
from django_outbox.worker.housekeeper import work_off_all
from tests.cases import cases
from tests.table import now, undone
from tests.test_admin import body, make, visitor

pytestmark = pytest.mark.django_db

PAGE = "admin:django_outbox_outboxoperation_changelist"


def begin(kind: str = "replay", **given: Any) -> OutboxOperation:
    rows = OutboxEvent.objects.filter(event_type="order.placed")
    return OutboxOperation.objects.begin(kind, rows, by="ada", **given)


def page(*codenames: str) -> str:
    return body(visitor("view", *codenames), reverse(PAGE))


def stops(text: str) -> list[str]:
    return re.findall(r'formaction="([^"]+)"', text)


def stop(client: Client, operation: OutboxOperation) -> int:
    url = reverse("admin:django_outbox_outboxoperation_stop", args=[operation.pk])
    return int(client.post(url).status_code)


def test_what_runs_comes_first_with_its_progress_and_what_is_left() -> None:
    running = begin(rate="100/m", matched=1000, limit=600)
    OutboxOperation.objects.filter(pk=running.pk).update(done=290, skipped=10)
    OutboxPause.objects.pause("event_type", "order.paid", reason="stocktaking", by="ben")
    text = page()
    assert text.index("event_type: order.placed") < text.index("order.paid: stocktaking")
    assert '<progress max="600" value="300"' in text
    for part in ("290 of 600", "10 skipped", "100/m", "about 3 min left", "ada", "ben"):
        assert part in text
    assert stops(text) == []  # a user who may only look


def test_without_a_rate_the_rest_is_estimated_by_what_is_done() -> None:
    running = begin(matched=400)
    assert "left" not in page()
    begun = now() - timedelta(minutes=10)
    OutboxOperation.objects.filter(pk=running.pk).update(done=100, started_at=begun)
    assert "about 30 min left" in page()


@cases(
    ("kind", "codename", "may"),
    [
        ("replay", "replay", True),
        ("run_now", "replay", True),
        ("discard", "replay", False),
        ("discard", "discard", True),
        ("replay", "discard", False),
        ("replay", "pause_outboxpause", False),
    ],
)
@undone()
def test_a_user_who_may_begin_it_may_stop_it(kind: str, codename: str, may: bool) -> None:
    make()
    operation, client = begin(kind), visitor("view", codename)
    assert stops(body(client, reverse(PAGE))) == [f"{operation.pk}/stop/"] * may
    assert client.get(f"{reverse(PAGE)}{operation.pk}/stop/").status_code == 405
    assert stop(client, operation) == (302 if may else 403)
    found = OutboxOperation.objects.get()
    user = User.objects.get().username if may else ""
    assert (found.state, found.stopped_by) == ("stopped" if may else "open", user)
    if may:
        work_off_all(connection)
        assert OutboxEvent.objects.filter(done_at=None).count() == 0
        assert stops(body(client, reverse(PAGE))) == []


def test_what_has_ended_cannot_be_stopped() -> None:
    done = OutboxOperation.objects.note("replay", "x")
    client = visitor("view", "replay", "discard")
    assert stop(client, done) == 403
    assert OutboxOperation.objects.get().state == "done"


def test_it_says_so_if_something_waits_and_no_worker_is_alive() -> None:
    assert 'class="errornote"' not in page()
    begin()
    assert 'class="errornote"' in page()
    here = {"id": "w", "hostname": "h", "pid": 1, "info": "{}"}
    OutboxWorker.objects.create(**here, started_at=now(), heartbeat_at=now())
    assert 'class="errornote"' not in page()


def test_the_page_of_one_shows_all_of_it() -> None:
    operation = begin(rate="7/h", limit=77, matched=777)
    url = reverse("admin:django_outbox_outboxoperation_change", args=[operation.pk])
    text = body(visitor("view"), url)
    for part in ("7/h", "77", "777", "order.placed", "ada"):
        assert part in text
