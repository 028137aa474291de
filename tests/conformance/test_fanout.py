"""Events of several listeners on each database: what each one undoes."""

from __future__ import annotations

import pytest
from django.db import connection

import django_outbox as outbox
from tests.surroundings import both
from tests.table import PLACED, statuses, write
from tests.test_fanout import ONCE, Listener, drain, effect, leaves_open, registered
from tests.testapp.models import Effect


@both
def test_a_statement_that_one_breaks_undoes_nothing_of_another(outside: bool) -> None:
    write()

    def breaks(event: outbox.Event) -> None:
        effect(event)
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")

    bad = Listener("m", breaks, retry=ONCE)
    with registered(Listener("a", effect), bad, Listener("z", effect)):
        drain()
    kept = {*Effect.objects.values_list("phase", flat=True)}
    assert kept >= {f"{PLACED} a", f"{PLACED} z"}
    assert statuses() == {"DONE": 2, "DEAD": 1}


@both
def test_a_transaction_that_one_leaves_open_undoes_nothing_of_another(
    outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write()
    careless = Listener("m", leaves_open)
    with registered(Listener("a", effect), careless, Listener("z", effect)):
        drain()
    kept = {*Effect.objects.values_list("phase", flat=True)}
    assert kept >= {f"{PLACED} a", f"{PLACED} z"}
    assert not connection.in_atomic_block or not outside
    assert statuses() == {"DONE": 3}
