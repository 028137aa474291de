"""Fallbacks of atomic listeners: what a failure and a lost lease undo on each database."""

from __future__ import annotations

from django.db import connection

import django_outbox as outbox
from tests.surroundings import both, outside_alone
from tests.table import in_thread, row, statuses, steal, write
from tests.test_fallback import ONCE, Fallback, drain, effect, guarded, raising
from tests.testapp.models import Effect


@both
def test_of_an_atomic_listener_its_failure_leaves_nothing(outside: bool) -> None:
    (event_id,) = write()

    def fails(event: outbox.Event, failure: outbox.Failure) -> None:
        effect(event, "fallback")
        raise RuntimeError("nobody answers")

    with guarded(raising(LookupError("sold out")), Fallback(fails), atomic=True, retry=ONCE):
        drain()
    assert not Effect.objects.exists()
    assert statuses() == {"DEAD": 1}
    assert "nobody answers" in str(row(event_id).last_error)


@outside_alone
def test_of_an_atomic_listener_a_lost_lease_undoes_it() -> None:
    (event_id,) = write()

    def loses_it(event: outbox.Event, failure: outbox.Failure) -> None:
        effect(event, "fallback")
        if connection.vendor == "sqlite":  # one writer at a time: no other could steal it now
            steal(event.event_id)
        else:
            in_thread(lambda: steal(event.event_id)).result(15)

    with guarded(raising(LookupError()), Fallback(loses_it), atomic=True, retry=ONCE):
        drain()
    assert not Effect.objects.exists()
    assert statuses() == {"NEW": 1}
    assert row(event_id).attempts == 0
