"""Slow replays: by the queryset, the command and the admin; due one after the other."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, replay
from tests.table import dead, histories, now, row
from tests.test_replay_slowly import steps, times

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = timedelta(seconds=1)


# -- the queryset ----------------------------------------------------------------------------------


def test_events_become_due_one_after_the_other_in_the_order_of_their_ids() -> None:
    ids = sorted(dead(5))
    before = now()
    assert OutboxEvent.objects.dead().replay(rate="10/m", by="ada") == 5
    found = times(ids)
    assert steps(found) == {6 * SECOND}
    assert before <= found[0] <= now()
    assert [row(each).first_due_at for each in ids] == found
    assert {row(each).status for each in ids} == {Status.NEW}
    assert {each.by for each in histories() if each.kind == "replayed"} == {"ada"}


def test_the_rate_holds_over_statements_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "EVENTS_PER_STATEMENT", 3)
    ids = sorted(dead(25))
    assert [*OutboxEvent.objects.dead().replay_batches(size=10, rate="5/s")] == [10, 10, 5]
    assert steps(times(ids)) == {SECOND / 5}
