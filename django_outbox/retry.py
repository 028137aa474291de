"""When to try again: policies are pure arithmetic over the number of executions so far."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

ErrorTypes = tuple[type[BaseException], ...]
MAX_DELAY = 365 * 86400.0  # seconds; a due time beyond it overflows some database's calendar


@runtime_checkable
class RetryPolicy(Protocol):
    """What the engine asks of a policy."""

    max_attempts: int | None  # executions, the first one included; None: OUTBOX["MAX_ATTEMPTS"]

    def should_retry(self, exc: BaseException) -> bool:
        """Say whether this error is worth another execution."""

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after the ``attempt``-th execution failed (from 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selective:
    """The part all shipped policies share: how often, and for which errors."""

    max_attempts: int | None = None
    retry_on: ErrorTypes = ()  # only these (empty: every Exception)
    give_up_on: ErrorTypes = ()  # never these; wins over retry_on

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; expected at least 1 execution.")

    def should_retry(self, exc: BaseException) -> bool:
        if isinstance(exc, self.give_up_on):
            return False
        return not self.retry_on or isinstance(exc, self.retry_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(_Selective):
    """min(cap, base × multiplier^(attempt − 1)), then spread by ``jitter`` (may pass the cap)."""

    base: float = 0.2  # seconds
    cap: float = 60.0  # seconds
    multiplier: float = 2.0
    jitter: tuple[float, float] = (0.5, 1.5)  # the delay is multiplied by a number in between

    def delay(self, attempt: int) -> float:
        if self.base <= 0:
            return 0.0
        try:
            raw = self.base * self.multiplier ** max(attempt - 1, 0)
        except OverflowError:
            raw = self.cap
        return bounded(min(self.cap, raw) * random.uniform(*self.jitter))


@dataclass(frozen=True, slots=True, init=False)
class Fixed(_Selective):
    """The same delay every time."""

    wait: float  # seconds

    def __init__(
        self,
        delay: float = 5.0,
        *,
        max_attempts: int | None = None,
        retry_on: ErrorTypes = (),
        give_up_on: ErrorTypes = (),
    ) -> None:
        _Selective.__init__(
            self, max_attempts=max_attempts, retry_on=retry_on, give_up_on=give_up_on
        )
        object.__setattr__(self, "wait", delay)

    def delay(self, attempt: int) -> float:
        return bounded(self.wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_Selective):
    """step × attempt, at most ``cap``."""

    step: float = 5.0  # seconds
    cap: float = 300.0  # seconds

    def delay(self, attempt: int) -> float:
        return bounded(min(self.cap, self.step * max(attempt, 1)))


@dataclass(frozen=True, slots=True)
class Jittered:
    """Another policy's delay plus a random part between zero and ``jitter`` seconds."""

    policy: RetryPolicy
    jitter: float = 0.5  # seconds

    @property
    def max_attempts(self) -> int | None:
        return self.policy.max_attempts

    def should_retry(self, exc: BaseException) -> bool:
        return self.policy.should_retry(exc)

    def delay(self, attempt: int) -> float:
        return bounded(self.policy.delay(attempt) + random.uniform(0, self.jitter))


POLICIES: Mapping[str, type[Any]] = {
    "exponential": Exponential,
    "fixed": Fixed,
    "linear": Linear,
}


def from_setting(value: Mapping[str, Any]) -> RetryPolicy:
    """Build a policy from ``{"policy": "exponential", "base": 0.2, …}``; ``ValueError`` if unknown."""
    options = dict(value)
    name = options.pop("policy", "exponential")
    if name not in POLICIES:
        raise ValueError(f"the retry policy {name!r} is unknown; expected one of {[*POLICIES]}.")
    try:
        policy: RetryPolicy = POLICIES[name](**options)
    except TypeError as error:
        raise ValueError(f"the retry policy {name!r} cannot take {options}: {error}") from error
    return policy


def bounded(delay: float) -> float:
    """Clamp a delay to what every database can add to its clock."""
    return min(max(delay, 0.0), MAX_DELAY)
