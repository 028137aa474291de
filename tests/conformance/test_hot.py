"""The hot route, from the commit to a listener in the same process, and its safeguards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox import signals
from tests.surroundings import heard
from tests.table import PLACED, by_api, by_sql, listening, write
from tests.test_hot import Calls, quiet, resting, settled
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


# -- what was undone -------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", [by_api, by_sql])
def test_65_a_raw_savepoint_rollback_makes_no_ghost(
    settings: Any, undo: Callable[[str], None]
) -> None:
    """Django does not notice it, so the undone event is offered; its claim finds no row."""
    settings.OUTBOX = quiet()
    calls = Calls()
    with heard(signals.event_queued) as offered, listening(calls), resting():
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
