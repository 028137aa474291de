"""Which outcomes of calls a circuit breaker counts, and which close it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from django_outbox.conf import Settings
from django_outbox.delivery.decide import for_breaker
from django_outbox.listeners.outcomes import DONE, LOST, Decision, Status
from django_outbox.listeners.registry import ANY, Listener
from django_outbox.queue_settings import BreakerSettings
from django_outbox.sql.values import PauseTimes
from django_outbox.worker.effects import perform
from django_outbox.worker.held import Held
from django_outbox.worker.pauses import Breaker, KnownPauses
from django_outbox.worker.polling import Wakeup
from tests.unit.scripted import SCRIPTED, Clock, connection, lease

FAILED = Decision(status=Status.RETRY, delay=1.0, spent=1, error="E", kind="E", outcome="retry")
DEAD = Decision(status=Status.DEAD, spent=1, error="E", kind="E", outcome="dead")
DEFERRED = Decision(status=Status.NEW, delay=1.0, outcome="deferred")
AWAY = Decision(status=Status.NEW, delay=1.0, outcome="deferred", unavailable="refused")
OUTCOMES = {
    "done": DONE,
    "failed": FAILED,
    "dead": DEAD,
    "deferred": DEFERRED,
    "away": AWAY,
    "lost": LOST,
}

LISTENER = Listener(
    call=print,
    event_type="hook.sent",
    aggregate_type=ANY,
    name="",
    retry=None,
    timeout=None,
    atomic=False,
)


@pytest.fixture
def held(clock: Clock) -> Held:
    return Held(30)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of the operations that a breaker notes."""
    kinds: list[str] = []

    def noted(change: Any, kind: str, about: str) -> Any:
        def make(connection: Any) -> Any:
            if made := change(connection):
                kinds.append(kind)
            return made

        return make

    monkeypatch.setattr("django_outbox.worker.pauses.noted", noted)
    return kinds


@pytest.fixture
def breaker(held: Held, dialect: Any, log: list[str]) -> Breaker:
    settings = BreakerSettings(failures=3, within=60, pause=60)
    queue = replace(Settings().queues["default"], name="hooks", BREAKER=settings)
    dialect.pauses.return_value = {("breaker", "hooks"): PauseTimes(1, 0.0, 60.0)}
    (known := KnownPauses()).read(connection())
    return Breaker(queue, alias=SCRIPTED, held=held, known_pauses=known, wakeup=Wakeup())


@pytest.mark.parametrize(
    ("outcomes", "trips"),
    [
        ("failed failed failed", True),
        ("failed dead failed", True),
        ("failed failed done failed", False),
        ("failed failed deferred failed", False),
        ("failed failed lost failed", True),
        ("failed failed later failed", False),
        ("lost lost lost", False),
        ("away", True),
    ],
)
def test_failures_in_a_row_trip_it_and_what_was_lost_is_neither(
    outcomes: str, trips: bool, breaker: Breaker, clock: Clock
) -> None:
    for each in outcomes.split():
        if each == "later":
            clock.advance(61)
        else:
            breaker.record(LISTENER, OUTCOMES[each])
    assert bool(breaker.trip_reason) is trips


@pytest.mark.parametrize(
    ("outcome", "statement"),
    [
        ("done", "close_breaker"),
        ("deferred", "close_breaker"),
        ("failed", "extend_breaker"),
        ("away", "extend_breaker"),
        ("lost", "extend_breaker"),
    ],
)
def test_only_a_success_of_the_probe_closes_it(
    outcome: str, statement: str, breaker: Breaker, held: Held, dialect: Any, log: list[str]
) -> None:
    probe = lease()
    held.add_rows([probe])
    assert perform(connection(), breaker.follow(is_idle=True))
    assert breaker.is_probe(probe)
    breaker.record(LISTENER, OUTCOMES[outcome])
    held.drop([probe])
    dialect.reset_mock()
    assert not perform(connection(), breaker.follow(is_idle=True))
    assert [name for name, _, _ in dialect.method_calls] == [statement, "pauses"]
    assert not breaker.is_probing
    assert log == ["breaker_closed"] * (statement == "close_breaker")


@pytest.mark.parametrize(
    ("outcomes", "counted"),
    [
        ("", "lost"),
        ("failed failed", "failed"),
        ("failed dead", "failed"),
        ("failed done", "done"),
        ("failed deferred", "deferred"),
        ("failed away", "away"),
    ],
)
def test_a_batch_has_failed_if_all_that_it_called_has(outcomes: str, counted: str) -> None:
    assert for_breaker([OUTCOMES[each] for each in outcomes.split()]) is OUTCOMES[counted]
