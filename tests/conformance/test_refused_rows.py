"""A settle that is repeated because its answer was lost counts once."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from django_outbox.conf import current
from django_outbox.delivery.lease import lease_from_row
from django_outbox.listeners.outcomes import Decision, Status
from django_outbox.sql import dialect_of
from django_outbox.sql.values import FULL
from django_outbox.worker import settler
from tests.table import claim, claimed, ids_of, insert, row

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2, "LEASE": 6}


# -- an answer that is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.RETRY, Status.DEAD])
def test_a_settle_of_an_earlier_attempt_changes_nothing(status: Status) -> None:
    """It was committed, its answer was lost, and the same worker has leased the event again."""
    [event_id] = insert(1, attempts=1)
    claim("me")
    delay = 60.0 if status is Status.RETRY else None
    decision = Decision(status=status, delay=delay, spent=1, error="x", attempts=0)
    settle = dialect_of(connection).settle_all
    assert settle(connection, me="me", decisions=[(event_id, decision)]) == 0
    found = row(event_id)
    assert (found.attempts, found.status, found.locked_by) == (1, Status.NEW, "me")


@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite loses no answers, and its rows have no such fence"
)
def test_a_repeated_settle_leaves_a_newer_lease_of_its_own_worker() -> None:
    [event_id] = insert()
    [lease] = [lease_from_row(each, FULL, deadline=1e12, me="me") for each in claimed().rows]
    decision = Decision(status=Status.RETRY, delay=0.0, spent=1, error="x", outcome="retry")
    written = {"connection": connection, "me": "me", "settings": current()}
    assert settler.write([(lease, decision)], **written) == 0
    assert ids_of(claim("me")) == [event_id]
    assert settler.write([(lease, decision)], **written) == 1
    assert (row(event_id).attempts, row(event_id).locked_by) == (1, "me")
