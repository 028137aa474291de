"""Retry arithmetic: pure, capped, jittered."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.test import override_settings

from django_outbox import Exponential, Fixed, Jittered, Linear, RetryPolicy, hooks
from django_outbox.conf import Settings
from django_outbox.listeners.retry import MAX_RETRY_DELAY, bounded, checked
from django_outbox.setting_rules import CENTURY
from tests import samples
from tests.cases import cases

STEADY = (1.0, 1.0)  # jitter that changes nothing


class Own:
    """A policy that an application wrote."""

    max_attempts = 3

    def __repr__(self) -> str:
        return "Own()"  # as a test's id, the same in every process

    def should_retry(self, exc: BaseException) -> bool:
        return not isinstance(exc, KeyError)

    def delay(self, attempt: int) -> float:
        return 7.0 * attempt


class Unfinished:
    max_attempts = 3


class Picky(Own):
    def __init__(self, needed: int) -> None: ...


OWN = Own()


class Refused(Exception):
    """An error of an application, which settings cannot import."""


@dataclasses.dataclass(frozen=True)
class Stepped(Own):
    seconds: float


# --- delays -------------------------------------------------------------------------------------


@cases(
    ("policy", "delays"),
    [
        (Exponential(base=100, jitter=STEADY), [100, 200, 400, 600, 600]),
        (Fixed(), [5] * 5),
        (Fixed(3), [3] * 5),
        (Linear(step=2, cap=5), [2, 4, 5, 5, 5]),
    ],
    ids=repr,
)
def test_delays_rise_up_to_the_cap(policy: RetryPolicy, delays: list[float]) -> None:
    """Attempt 1 is the first failure."""
    assert [policy.delay(attempt) for attempt in (1, 2, 3, 4, 100)] == delays


def test_the_default_policy_outlasts_an_outage() -> None:
    """Twenty executions take about an hour and a half."""
    policy = Exponential()
    assert (policy.base, policy.cap, policy.multiplier) == (0.2, 600, 2)
    assert (policy.jitter, policy.max_attempts) == ((0.5, 1.5), None)
    waits = [Exponential(jitter=STEADY).delay(n) for n in range(1, Settings().MAX_ATTEMPTS)]
    assert 80 < sum(waits) / 60 < 90  # minutes


def test_exponential_jitter_spreads_and_may_pass_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Exponential()
    drawn = [policy.delay(50) for _ in range(200)]
    assert 300 <= min(drawn) < max(drawn) <= 900
    assert max(drawn) > 600

    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    assert policy.delay(50) == 900
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    assert policy.delay(1) == 0.1


@cases("attempt", [0, 1, 2, 10, 1023, 1024, 1025, 2000, 10**6, 10**18])
@cases(
    "policy",
    [
        Exponential(),
        Exponential(base=1, cap=60, multiplier=3),
        Exponential(cap=CENTURY),
        Exponential(base=CENTURY, multiplier=CENTURY, cap=CENTURY),
        Fixed(),
        Linear(),
        Linear(step=CENTURY),
        Linear(cap=CENTURY),
        Jittered(Exponential()),
        Jittered(Linear(), CENTURY),
    ],
    ids=repr,
)
def test_no_attempt_number_overflows(policy: RetryPolicy, attempt: int) -> None:
    delay = policy.delay(attempt)
    assert math.isfinite(delay)
    assert 0 <= delay <= MAX_RETRY_DELAY


@cases(
    ("given", "delay"),
    [(-1, 0), (0, 0), (5, 5), (math.inf, MAX_RETRY_DELAY), (-math.inf, 0), (math.nan, 0)],
)
def test_what_a_policy_of_somebody_else_says_is_bounded(given: float, delay: float) -> None:
    assert bounded(given) == delay


# --- which errors -------------------------------------------------------------------------------


@cases("make", [Exponential, Fixed, Linear])
def test_give_up_on_wins_over_retry_on(make: Callable[..., RetryPolicy]) -> None:
    policy = make(retry_on=(LookupError,), give_up_on=(KeyError,))
    assert policy.should_retry(IndexError())
    assert not policy.should_retry(KeyError())
    assert not policy.should_retry(ValueError())


def caused_by(cause: BaseException, *, depth: int = 1) -> Exception:
    """Raise an error from ``cause``, through that many levels."""
    for _ in range(depth):
        try:
            raise RuntimeError("the service is down") from cause
        except RuntimeError as error:
            cause = error
    return cause  # type: ignore[return-value]


@cases("depth", [1, 5])
@cases("make", [Exponential, Fixed, Linear])
def test_causes_are_looked_at(make: Callable[..., RetryPolicy], depth: int) -> None:
    error = caused_by(ConnectionRefusedError(), depth=depth)
    assert make(retry_on=(ConnectionError,)).should_retry(error)
    assert not make(retry_on=(TimeoutError,)).should_retry(error)
    assert not make(give_up_on=(ConnectionError,)).should_retry(error)
    assert make(give_up_on=(TimeoutError,)).should_retry(error)
    assert not make(retry_on=(RuntimeError,), give_up_on=(ConnectionError,)).should_retry(error)


@cases("make", [Exponential, Fixed, Linear])
def test_what_was_merely_being_handled_is_no_cause(make: Callable[..., RetryPolicy]) -> None:
    with pytest.raises(TimeoutError) as caught:
        try:
            raise KeyError("a miss in a cache")
        except KeyError:
            raise TimeoutError("the service is down")  # noqa: B904 - that is the point
    error = caught.value
    assert isinstance(error.__context__, KeyError)
    assert make(give_up_on=(KeyError,)).should_retry(error)
    assert not make(retry_on=(KeyError,)).should_retry(error)


def test_causes_that_bite_their_tail_end() -> None:
    error, other = RuntimeError(), ValueError()
    error.__cause__, other.__cause__ = other, error
    assert Fixed(give_up_on=(KeyError,)).should_retry(error)
    assert not Fixed(give_up_on=(ValueError,)).should_retry(error)


def test_jittered_asks_the_policy_inside_and_adds_at_most_its_part() -> None:
    policy = Jittered(Own(), 0.5)
    assert policy.max_attempts == 3
    assert policy.should_retry(ValueError())
    assert not policy.should_retry(KeyError())
    drawn = [policy.delay(1) for _ in range(200)]
    assert 7 <= min(drawn) < max(drawn) <= 7.5


# --- bad arguments ------------------------------------------------------------------------------


@cases("make", [Exponential, Fixed, Linear])
@cases(
    "options",
    [
        *({"max_attempts": value} for value in (0, -1, 2.5, True, "3")),
        {"retry_on": ValueError},
        {"retry_on": ["x"]},
        {"give_up_on": (ValueError(),)},
        {"give_up_on": ("ValueError",)},
    ],
    ids=str,
)
def test_bad_arguments_of_every_policy_are_refused(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{make.__name__} got {next(iter(options))}="):
        make(**options)


@cases("value", [-1, math.nan, math.inf, "5", None, True], ids=repr)
@cases(
    ("make", "name"),
    [
        (Exponential, "base"),
        (Exponential, "cap"),
        (Exponential, "multiplier"),
        (Fixed, "delay"),
        (Linear, "step"),
        (Linear, "cap"),
    ],
)
def test_bad_numbers_are_refused(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 0, at most a century"):
        make(**{name: value})


@cases("value", [1, (1,), (1.5, 0.5), (-1, 1), (0, math.inf), ("a", "b"), None], ids=repr)
def test_bad_jitter_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="jitter"):
        Exponential(jitter=value)


@cases("arguments", [("fixed",), (Fixed,), (None,), (Fixed(), -1), (Fixed(), math.nan)], ids=str)
def test_jittered_needs_a_policy_and_a_part(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"not a retry policy|jitter"):
        Jittered(*arguments)


# --- from the setting -----------------------------------------------------------------------------


@cases(
    ("value", "policy"),
    [
        (None, Exponential()),
        ({}, Exponential()),
        (
            {"base": 1, "cap": 600, "max_attempts": 20},
            Exponential(base=1, cap=600, max_attempts=20),
        ),
        ({"policy": "exponential", "jitter": [1, 2]}, Exponential(jitter=[1, 2])),  # type: ignore[arg-type]
        ({"policy": "fixed", "delay": 3}, Fixed(3)),
        ({"policy": "linear", "step": 2}, Linear(step=2)),
        ({"policy": {"policy": "fixed", "delay": 3}, "jitter": 1}, Jittered(Fixed(3), 1)),
        ({"policy": {}}, Jittered(Exponential())),
        ({"policy": "tests.test_retry.Stepped", "seconds": 4}, Stepped(4)),
        (
            {"retry_on": ["tests.test_retry.Refused", TimeoutError]},
            Exponential(retry_on=(Refused, TimeoutError)),
        ),
        ({"policy": "linear", "give_up_on": [ValueError]}, Linear(give_up_on=(ValueError,))),
        (Fixed(3), Fixed(3)),
        ("tests.test_retry.OWN", OWN),
        (OWN, OWN),
    ],
    ids=str,
)
def test_the_setting_may_be_an_object_a_path_or_a_dict(value: Any, policy: RetryPolicy) -> None:
    with override_settings(OUTBOX={"RETRY": value}):
        assert hooks.retry_policy() == policy
        assert hooks.retry_policy() is hooks.retry_policy()


@cases(
    "value",
    [
        {"policy": "nonsense"},
        {"policy": None},
        {"policy": ["fixed"]},
        {"nonsense": 1},
        {"base": -1},
        {"policy": "fixed", "base": 1},
        {1: 2},
        "tests.test_retry.nonsense",
        "nonsense",
        5,
        {"policy": "tests.test_retry.nonsense"},
        {"policy": "tests.test_retry.Unfinished"},
        {"policy": {"policy": "nonsense"}},
        {"retry_on": ["tests.test_retry.nonsense"]},
        {"give_up_on": ["ValueError"]},
        {"policy": {}, "jitter": -1},
        "tests.test_retry.Unfinished",
        "tests.test_retry.Picky",
        "tests.test_retry.pytest",
    ],
    ids=repr,
)
def test_a_setting_that_gives_no_policy_is_improper(value: Any) -> None:
    with (
        override_settings(OUTBOX={"RETRY": value}),
        pytest.raises(ImproperlyConfigured, match=r'OUTBOX\["RETRY"\]'),
    ):
        hooks.retry_policy()


# --- the documentation ----------------------------------------------------------------------------


def test_323_the_table_of_the_how_to_is_what_the_code_does() -> None:
    page = (samples.DOCS / "how-to/retry.md").read_text()
    rows = re.findall(r"^\| `(\w+\(.*\))` \| ([\d. |]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for text, cells in rows:
        name, _, options = text.partition("(")
        policy = eval(f"{name}(jitter=(1, 1), {options}" if name == "Exponential" else text)
        delays = [policy.delay(attempt) for attempt in range(1, Settings().MAX_ATTEMPTS)]
        shown = [delays[attempt - 1] for attempt in (1, 2, 3, 5, 10, 19)]
        expected = [float(cell) for cell in cells.split("|")]
        assert [*shown, sum(delays)] == pytest.approx(expected)


@cases(
    ("page", "hours"),
    [("relay-to-webhooks", (17.5, 18.5)), ("listen", (17.5, 18.5)), ("retry", (23, 25))],
)
def test_the_patient_policies_of_the_how_tos_last_as_long_as_they_say(
    page: str, hours: tuple[float, float]
) -> None:
    text = (samples.DOCS / f"how-to/{page}.md").read_text()
    (options,) = re.findall(r"^PATIENT = Exponential\((.*)\)  # ", text, re.MULTILINE)
    policy = eval(f"Exponential({options}, jitter=(1, 1))")
    waits = sum(policy.delay(attempt) for attempt in range(1, policy.max_attempts)) / 3600
    assert hours[0] < waits < hours[1]


def test_the_samples_of_the_how_to() -> None:
    with samples.run("how-to/retry.md#..Fall back when a listener fails for good") as names:
        picky, stubborn, own = names["PICKY"], names["STUBBORN"], names["OfficeHours"]()
        assert checked(own) is own
        with override_settings(OUTBOX=names["OUTBOX"]):
            policy = hooks.retry_policy()
    assert picky.should_retry(caused_by(TimeoutError()))
    assert not picky.should_retry(ValueError())
    assert not stubborn.should_retry(KeyError())
    assert not own.should_retry(caused_by(PermissionError()))
    assert own.should_retry(TimeoutError())
    assert isinstance(policy, Exponential)
    assert (policy.base, policy.give_up_on) == (1, (ValidationError,))
