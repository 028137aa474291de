"""What this process offered and could not claim: the claimer drops it, and polls the table."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from django.db import OperationalError

import django_outbox as outbox
from django_outbox.conf import Settings
from django_outbox.sql.values import EVENTS, LIGHT, Claimed
from django_outbox.worker.effects import perform
from django_outbox.worker.engine import Engine
from django_outbox.worker.ready import Offer
from tests.unit.scripted import SCRIPTED, Clock, connection, lease

EVENT = outbox.Event(event_type="order.placed", payload={}).as_delivered("{}", lambda text: {})
OFFER = Offer(EVENT.event_id, "order.placed", EVENT)


class Worker:
    """A claimer that has polled the table, found nothing, and waits for the next poll."""

    def __init__(self, dialect: Any) -> None:
        engine = Engine(SCRIPTED, "me", Settings(DOORBELL=None), queues={"default"})
        self._dialect, self.held, self._claimer = dialect, engine.held, engine.claimer
        (gate,) = engine.gates
        self.offers = gate.offers
        assert self.claims() == ["poll"]
        assert self.claims() == []

    def claims(self) -> list[str]:
        """Make steps until the claimer waits; return its claims."""
        self._dialect.claim.reset_mock()
        while perform(connection(), self._claimer.step()) == 0:
            pass
        given = [call.args[0] for call in self._dialect.claim.call_args_list]
        given = [each for each in given if each.table is EVENTS]
        return ["poll" if each.ids is None else "hot" for each in given]


@pytest.fixture(autouse=True)
def nothing_is_due(clock: Clock, dialect: Any, settings: Any) -> None:
    settings.OUTBOX = {"DOORBELL": None}
    dialect.claim.return_value = Claimed([])


def test_an_offer_is_claimed_without_a_poll(dialect: Any) -> None:
    worker = Worker(dialect)
    worker.offers.offer(OFFER)
    assert worker.claims() == ["hot"]
    assert worker.claims() == []


def test_a_poll_follows_a_claim_of_offers_that_failed(dialect: Any) -> None:
    worker = Worker(dialect)
    dialect.claim.side_effect = [OperationalError("the server is gone"), Claimed([]), Claimed([])]
    worker.offers.offer(OFFER)
    with pytest.raises(OperationalError):
        worker.claims()
    assert worker.claims() == ["poll"]


def test_an_offer_that_is_parked_is_not_given_back_there(dialect: Any) -> None:
    """The pause may have ended since, and what was parked for it was moved."""
    worker, now = Worker(dialect), datetime.now(timezone.utc)
    row = {"id": EVENT.event_id, "attempts": 0, "rescues": 0, "queue": "paused:1"}
    claimed = Claimed([(*map(row.get, LIGHT), now, None, now)])
    dialect.claim.side_effect = [claimed, Claimed([]), Claimed([])]
    dialect.unclaim.return_value = dialect.park.return_value = set()
    worker.offers.offer(OFFER)
    worker.claims()
    (given,) = dialect.unclaim.call_args.kwargs["due"]
    assert (given.id, given.queue) == (EVENT.event_id, "default")
    assert dialect.park.call_args.args == ({EVENT.event_id: 1},)


def test_a_poll_follows_offers_for_which_no_thread_was_free(dialect: Any) -> None:
    worker = Worker(dialect)
    (leased,) = worker.held.add_rows([lease()])
    worker.offers.offer(OFFER)
    assert worker.claims() == []
    worker.held.drop([leased])
    assert worker.claims() == ["poll"]
