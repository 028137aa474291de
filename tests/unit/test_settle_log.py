"""What is logged of deliveries: how often, and never an empty error."""

import logging
from typing import Any

import pytest

from django_outbox import BrokerUnavailable, Dead, Defer, Fixed, Unrecoverable
from django_outbox.delivery.decide import decide
from django_outbox.listeners.outcomes import DONE, LOST, Decision
from django_outbox.log import first_line
from django_outbox.worker.settler import SettleLog
from tests.unit.scripted import Clock, lease


def decision(answer: Any, *, max_attempts: int = 20) -> Decision:
    return decide(answer, attempts=0, policy=Fixed(0), max_attempts=max_attempts, age=0.0)


def test_retries_of_a_listener_are_one_warning_a_minute(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    log, retry = SettleLog("default"), decision(LookupError())
    caplog.set_level(logging.INFO, "django_outbox")

    def fail(*listeners: str) -> list[str]:
        caplog.clear()
        leases = [lease() for _ in listeners]
        for each, title in zip(leases, listeners, strict=True):
            each.listener = title
        log.report([(each, retry) for each in leases])
        return [each.getMessage() for each in caplog.records]

    first = fail("a", *["b"] * 1000)
    assert ["listener='a'" in each for each in first] == [True, False]
    assert [each.split()[-1] for each in first] == ["unlogged=0", "unlogged=0"]
    clock.advance(59)
    assert fail("b") == []
    clock.advance(1)
    assert [each.split()[-1] for each in fail("a", "b")] == ["unlogged=0", "unlogged=1000"]


@pytest.mark.parametrize(
    ("outcome", "answer", "error"),
    [
        ("done", DONE, "none"),
        ("lost", LOST, "none"),
        ("deferred", decision(Defer(1)), "none"),
        ("deferred", decision(Defer(1, "not packed")), "Defer"),
        ("deferred", decision(BrokerUnavailable()), "django_outbox.exceptions.BrokerUnavailable"),
        ("retry", decision(LookupError()), "LookupError"),
        ("dead", decision(Dead()), "Dead"),
        ("dead", decision(Unrecoverable()), "django_outbox.exceptions.Unrecoverable"),
    ],
)
def test_no_error_is_empty(
    outcome: str, answer: Decision, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_outbox")
    SettleLog("default").report([(lease(), answer)])
    line = caplog.records[0].getMessage()
    assert line.startswith(f"{outcome} event_id=a ")
    assert f" error={error} " in f"{line} "


@pytest.mark.parametrize(("text", "shown"), [("no\nmore", "no"), (" \n", "BrokerUnavailable")])
def test_an_error_is_shown_by_its_first_line_or_else_its_class(text: str, shown: str) -> None:
    error = BrokerUnavailable(text)
    assert first_line(error) == decision(error).unavailable == shown


def test_an_error_has_its_traceback_at_debug_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError) as raised:
        raise LookupError
    for level, tracebacks in ((logging.INFO, 0), (logging.DEBUG, 2)):
        caplog.set_level(level, "django_outbox")
        for limit in (1, 20):  # it is dead, or retried
            SettleLog("default").report([(lease(), decision(raised.value, max_attempts=limit))])
        assert sum("Traceback" in each for each in caplog.messages) == tracebacks
