"""Answers and exceptions become decisions, in a pure step."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from django_outbox import (
    Dead,
    Defer,
    Done,
    Exponential,
    Fixed,
    PayloadError,
    RetryAfter,
    RetryPolicy,
    Unrecoverable,
)
from django_outbox.delivery.decide import ERROR_LENGTH, clean, decide, describe
from django_outbox.listeners.outcomes import Decision, Status
from tests.cases import cases

STEADY = Exponential(jitter=(1, 1))
NEW, DONE, RETRY, DEAD = Status.NEW, Status.DONE, Status.RETRY, Status.DEAD


def decision(
    answer: Any, *, attempts: int = 0, policy: RetryPolicy = STEADY, **more: Any
) -> Decision:
    options = {"max_attempts": 10, "age": 0.0, **more}
    return decide(answer, attempts=attempts, policy=policy, **options)


def summary(made: Decision) -> tuple[Status, float | None, int, str]:
    return made.status, made.delay, made.spent, made.outcome


class Own(Exception):
    """An error raised by the listener."""


@cases(
    ("answer", "expected"),
    [
        (None, (DONE, None, 0, "done")),
        (Done(), (DONE, None, 0, "done")),
        ("anything", (DONE, None, 0, "done")),
        (0, (DONE, None, 0, "done")),
        (False, (DONE, None, 0, "done")),
        (Dead, (DONE, None, 0, "done")),  # a class is not an answer
        (Defer(0), (NEW, 0.0, 0, "deferred")),
        (Defer(90), (NEW, 90.0, 0, "deferred")),
        (Defer(90, "the host is down"), (NEW, 90.0, 0, "deferred")),
        (Defer(timedelta(minutes=1)), (NEW, 60.0, 0, "deferred")),
        (Dead(), (DEAD, None, 0, "dead")),
        (Dead("sold out"), (DEAD, None, 0, "dead")),
        (RetryAfter(0), (RETRY, 0.0, 1, "retry")),
        (RetryAfter(90), (RETRY, 90.0, 1, "retry")),
        (Unrecoverable("never"), (DEAD, None, 0, "dead")),
        (PayloadError("unfit"), (DEAD, None, 0, "dead")),
        (ValueError("no"), (RETRY, 0.2, 1, "retry")),
        (Own(), (RETRY, 0.2, 1, "retry")),
        (SystemExit(1), (RETRY, 0.2, 1, "retry")),  # a failure like any other
        (KeyboardInterrupt(), (RETRY, 0.2, 1, "retry")),
        (GeneratorExit(), (RETRY, 0.2, 1, "retry")),
    ],
    ids=repr,
)
def test_j14_215_216_217_219_every_answer_and_exception(
    answer: Any, expected: tuple[Any, ...]
) -> None:
    assert summary(decision(answer)) == expected


LOOKUPS = Fixed(retry_on=(LookupError,), give_up_on=(KeyError,))
FAILURE, SPENT = (RETRY, 5.0, 1, "retry"), (DEAD, None, 1, "dead")  # the last one counts, too


@cases(
    ("answer", "attempts", "more", "expected"),
    [
        (ValueError("no"), 1, {}, (RETRY, 0.4, 1, "retry")),
        (ValueError("no"), 8, {}, (RETRY, 51.2, 1, "retry")),
        *((ValueError("no"), attempts, {}, SPENT) for attempts in (9, 10, 10**6)),
        (RetryAfter(5), 8, {}, FAILURE),
        (RetryAfter(5), 9, {}, SPENT),
        # MAX_ATTEMPTS applies only to policies that set no limit themselves.
        (ValueError(), 0, {"policy": Fixed(max_attempts=2)}, FAILURE),
        (ValueError(), 1, {"policy": Fixed(max_attempts=2)}, SPENT),
        (ValueError(), 1, {"policy": Fixed(), "max_attempts": 3}, FAILURE),
        (ValueError(), 2, {"policy": Fixed(), "max_attempts": 3}, SPENT),
        (ValueError(), 3, {"policy": Fixed(max_attempts=5), "max_attempts": 1}, FAILURE),
        (ValueError(), 0, {"policy": Fixed(max_attempts=1)}, SPENT),
        (KeyError(), 0, {"policy": LOOKUPS}, SPENT),
        (IndexError(), 0, {"policy": LOOKUPS}, FAILURE),
        (ValueError(), 0, {"policy": LOOKUPS}, SPENT),
        (RetryAfter(7), 0, {"policy": LOOKUPS}, (RETRY, 7.0, 1, "retry")),  # it asks no policy
    ],
    ids=repr,
)
def test_j4_348_attempts_end_in_dead(
    answer: Any, attempts: int, more: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    made = decision(answer, attempts=attempts, **more)
    assert summary(made) == (expected[0], pytest.approx(expected[1]), *expected[2:])


@cases(
    ("age", "limit", "status"), [(10, None, NEW), (10, 10, NEW), (10.1, 10, DEAD), (1e9, None, NEW)]
)
def test_endless_deferral_ends(age: float, limit: float | None, status: Status) -> None:
    """DEFER_LIMIT bounds the age up to which an event may be deferred."""
    made = decision(Defer(5), age=age, defer_limit=limit)
    assert made.status is status
    assert made.spent == 0
    assert ("DEFER_LIMIT" in (made.error or "")) is (status is DEAD)


class Broken:
    """A policy with a bug."""

    max_attempts = None

    def should_retry(self, exc: BaseException) -> bool:
        raise ZeroDivisionError

    def delay(self, attempt: int) -> float:
        raise ZeroDivisionError


class Odd(Broken):
    def __init__(self, delay: Any) -> None:
        self._delay = delay

    def should_retry(self, exc: BaseException) -> bool:
        return True

    def delay(self, attempt: int) -> float:
        return self._delay  # type: ignore[no-any-return]


def test_a_policy_that_fails_costs_no_event(caplog: pytest.LogCaptureFixture) -> None:
    """A policy that raises is logged, and the event is retried with the default delay."""
    made = decision(ValueError(), policy=Broken())
    assert made.status is RETRY
    assert made.delay is not None
    assert 0.1 <= made.delay <= 0.3
    assert "retry policy failed" in caplog.text


class Boundless(Odd):
    """A policy whose limit cannot be read, or is not a number."""

    def __init__(self, limit: Any) -> None:
        super().__init__(3)
        self._limit = limit

    @property
    def max_attempts(self) -> Any:  # type: ignore[override]
        if isinstance(self._limit, Exception):
            raise self._limit
        return self._limit


@pytest.mark.parametrize(
    "limit", [ValueError("no limit"), "3", object], ids=["error", "str", "class"]
)
def test_a_limit_that_cannot_be_read_is_that_of_the_settings(
    limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is logged and the setting applies, so that the event does not come back forever."""
    assert decision(ValueError(), policy=Boundless(limit), attempts=8).status is RETRY
    assert decision(ValueError(), policy=Boundless(limit), attempts=9).status is DEAD
    assert "retry policy failed" in caplog.text


@cases("delay", [math.inf, math.nan, -5, 1e300, "5", None, timedelta(1)], ids=repr)
def test_a_policy_that_answers_nonsense_gives_a_due_time_all_the_same(delay: Any) -> None:
    made = decision(ValueError(), policy=Odd(delay))
    assert made.status is RETRY
    assert made.delay is not None
    assert 0 <= made.delay <= 365 * 86400


# --- last_error -----------------------------------------------------------------------------------


def raised(error: Exception, *, causes: int = 0) -> Exception:
    """Raise the error, so that it has a traceback, with a chain of that many causes."""
    try:
        raise error from (raised(KeyError(causes), causes=causes - 1) if causes else None)
    except Exception as caught:  # noqa: BLE001
        return caught


@cases(
    ("answer", "begins"),
    [
        *((answer, None) for answer in (None, Done(), Defer(5))),  # the row keeps its error
        (Dead(), "the listener answered Dead"),
        (Dead("sold out"), "sold out"),
        (Unrecoverable("never"), "django_outbox.exceptions.Unrecoverable: never"),
        (RetryAfter(5), "django_outbox.exceptions.RetryAfter: retry after 5 s"),
        (ValueError("no"), "ValueError: no"),
        (Own("mine"), "tests.test_decide.Own: mine"),
    ],
    ids=repr,
)
def test_the_error_names_class_and_message(answer: Any, begins: str | None) -> None:
    error = decision(answer).error
    assert error is None if begins is None else (error or "").startswith(begins)


def test_the_end_of_the_traceback_is_kept() -> None:
    """At most 4000 characters are stored."""
    text = describe(raised(ValueError("the cause"), causes=100))
    assert len(text) == ERROR_LENGTH == 4000
    assert text.startswith("ValueError: the cause\n")
    assert text.endswith("ValueError: the cause\n")
    assert "raise error from" in text
    assert "KeyError: 1\n" not in text  # far from the end


def test_a_long_message_leaves_room_for_the_traceback() -> None:
    text = describe(raised(ValueError("x" * 100_000 + "end")))
    assert len(text) == 4000
    assert text.startswith("ValueError: xxx")
    assert text.rstrip().endswith("end")


def test_nul_and_lone_surrogates_are_stripped() -> None:
    """A NUL in a message would make the settle itself fail on PostgreSQL."""
    assert clean("a\0b\ud800c") == "ab?c"
    text = decision(raised(ValueError("a\0b\ud800c"))).error or ""
    assert text.startswith("ValueError: ab?c")
    assert "\0" not in text
    text.encode()
    assert clean(decision(Dead("a\0b")).error or "") == decision(Dead("a\0b")).error == "ab"


def test_an_error_that_cannot_be_printed_is_settled_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "Mute: (its message could not be read)" in describe(raised(Mute()))


def test_the_reason_of_a_deferral_is_its_error_and_is_told_when_it_dies() -> None:
    assert (decision(Defer(5)).error, decision(Defer(5)).kind) == (None, "")
    assert decision(Defer(5, "the host\0 is down")).error == "the host is down"
    made = decision(Defer(5, "the host is down"), age=61.0, defer_limit=60.0)
    assert made.status is DEAD
    assert "the host is down" in (made.error or "")
