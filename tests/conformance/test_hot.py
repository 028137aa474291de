"""The hot route, from the commit to a listener in the same process, and its safeguards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox import signals
from tests.reach.children import Site, workers_show
from tests.table import PLACED, listening, row, write
from tests.test_hot import Calls, hearing, quiet, resting, settled
from tests.testapp.models import Effect
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# -- what was undone -------------------------------------------------------------------------------


def by_api(sid: str) -> None:
    connection.savepoint_rollback(sid)


def by_sql(sid: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(connection.ops.savepoint_rollback_sql(sid))


@pytest.mark.parametrize("undo", [by_api, by_sql])
def test_65_a_raw_savepoint_rollback_makes_no_ghost(
    settings: Any, undo: Callable[[str], None]
) -> None:
    """Django does not notice it, so the undone event is offered; its claim finds no row."""
    settings.OUTBOX = quiet()
    calls = Calls()
    with hearing(signals.event_queued) as offered, listening(calls), resting():
        with transaction.atomic():
            sid = connection.savepoint()
            ghost = outbox.write(PLACED)
            undo(sid)
            real = outbox.write(PLACED)
        wait_until(settled(1), what="DONE")
        last = write()[0]  # a claimed ghost would have run before this one
        wait_until(settled(2), what="DONE")
    assert ghost in [each["event"].event_id for each in offered]
    assert calls.ids == [real, last]


def test_x5_a_savepoint_takes_only_its_own_events_along(settings: Any) -> None:
    settings.OUTBOX = quiet()
    calls = Calls()
    with hearing(signals.event_queued) as offered, listening(calls), resting():
        with transaction.atomic():
            before = outbox.write(PLACED)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                outbox.write(PLACED)
                raise ZeroDivisionError
            with transaction.atomic():
                kept = outbox.write(PLACED)
            after = outbox.write(PLACED)
        wait_until(settled(3), what="DONE")
    expected = [str(before), str(kept), str(after)]
    assert sorted(each["event"].event_id for each in offered) == sorted(expected)
    assert calls.once_each(expected)
    assert {*calls.sources} == {"hot"}


# -- sharing ---------------------------------------------------------------------------------------


def test_j8_two_worker_processes_share_a_table(database_env: dict[str, str], tmp_path: Any) -> None:
    site = Site(database_env, tmp_path)
    small = {"POLL_BATCH_SIZE": 5, "COLD_QUEUE_CAPACITY": 5, "WORKERS": 2}
    with site.worker(**small) as one, site.worker(**small) as two:
        workers_show(2)
        with transaction.atomic():
            ids = outbox.write_many(
                outbox.Event(event_type="reach.slow", payload={"seconds": 0.01}) for _ in range(150)
            )
        wait_until(settled(150), within=40, what="DONE")
        assert [one.stop(), two.stop()] == [0, 0]
    ends = Effect.objects.filter(phase="end")
    assert Counter(ends.values_list("event_id", flat=True)) == Counter(ids)
    assert {*ends.values_list("pid", flat=True)} == {one.pid, two.pid}
    assert not any(row(each).locked_by for each in ids)
