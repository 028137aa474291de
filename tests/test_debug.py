"""Django's query log does not grow under DEBUG, in listeners and in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections

import django_outbox as outbox
from django_outbox.models import OutboxInbox
from tests.surroundings import by_whom, deliver
from tests.table import listening, write

TWICE = outbox.Fixed(delay=0, max_attempts=2)


outside = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2}


def failing_with(text: str) -> Callable[[Any], None]:
    """Return a listener that fails with a text for every third event, and plainly for others."""

    def fail(event: outbox.Event) -> None:
        raise ValueError(text if event.payload["n"] % 3 == 0 else "plain")

    return fail


@outside
@by_whom
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_query_log_grows_with_debug(is_async: bool, by_drain: bool, settings: Any) -> None:
    settings.DEBUG = True
    seen: list[int] = []

    def use(event: outbox.Event) -> None:
        seen.append(len(connection.queries_log))
        OutboxInbox.objects.filter(source="x" * 100).exists()

    async def ause(event: outbox.Event) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(use)(event)

    connection.queries_log.clear()
    with listening(ause if is_async else use):
        write(30)
        deliver(until={"DONE": 30}, by_drain=by_drain)
    assert max(seen[1:]) <= max(seen[0], 1)


@outside
def test_no_query_log_of_the_engine_grows_with_debug(settings: Any) -> None:
    from django.db.backends.signals import connection_created

    settings.DEBUG = True
    made: list[Any] = []

    def note(*, connection: Any, **kwargs: Any) -> None:
        made.append(connection)

    connection_created.connect(note)
    try:
        with listening(failing_with("boom"), retry=TWICE):
            write(10)
            deliver(until={"DEAD": 10}, by_drain=False)
            write(10)
            deliver(until={"DEAD": 20}, by_drain=True)
    finally:
        connection_created.disconnect(note)
    mine = [each for each in made if each is not connections["default"]]
    assert len(mine) > 3
    assert sum(len(each.queries_log) for each in mine) == 0
