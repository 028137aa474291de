"""Retry policies: whether a failed event runs again, and after how many seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from django.utils.module_loading import import_string

from ..setting_rules import Rule, integer, number

ErrorTypes = tuple[type[BaseException], ...]
UNSET: Any = object()
MAX_RETRY_DELAY = 365 * 86400.0  # seconds; later due times overflow some database's calendar


@runtime_checkable
class RetryPolicy(Protocol):
    """The interface of a retry policy; write a class of your own with these three members.

    Example::

        class OfficeHours:
            max_attempts = 10

            def should_retry(self, exc):
                return not isinstance(exc, LookupError)

            def delay(self, attempt):
                return 3600.0  # seconds


        assert isinstance(OfficeHours(), outbox.RetryPolicy)
    """

    @property
    def max_attempts(self) -> int | None:
        """Most executions, the first one included; None: ``OUTBOX["MAX_ATTEMPTS"]``."""

    def should_retry(self, exc: BaseException) -> bool:
        """Return whether to execute again after this error."""

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after the ``attempt``-th execution failed (from 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BasePolicy:
    """Base of ``Exponential``, ``Fixed`` and ``Linear``: most executions, and errors to retry.

    An error matches if it or one of its causes (``raise … from cause``) does. An exception that
    was merely being handled when it was raised is ignored: it is often unrelated.
    """

    max_attempts: int | None = None
    retry_on: ErrorTypes = ()  # retry only these; empty: every error
    give_up_on: ErrorTypes = ()  # never retry these; wins over retry_on

    def __post_init__(self) -> None:
        """Raise for options that would otherwise fail only after an event has failed."""
        for each in fields(self):
            value = getattr(self, each.name)
            if expected := OPTION_RULES[each.name](value):
                raise ValueError(
                    f"{type(self).__name__} got {each.name}={value!r}; expected {expected}."
                )

    def should_retry(self, exc: BaseException) -> bool:
        errors = [*_with_causes(exc)]
        if any(isinstance(error, self.give_up_on) for error in errors):
            return False
        return not self.retry_on or any(isinstance(error, self.retry_on) for error in errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(_BasePolicy):
    """Wait min(cap, base × multiplier^(attempt − 1)), times a random factor; may exceed the cap.

    ``base`` and ``cap`` are seconds, ``jitter`` the range of the factor. ``max_attempts`` counts
    the first execution, too; None: ``OUTBOX["MAX_ATTEMPTS"]``. Errors in ``give_up_on`` are never
    retried. If ``retry_on`` is not empty, only errors in it are. An error matches if it or one of
    its causes (``raise … from cause``) does. All policies of the package take these three options.

    Raises ``ValueError`` for an option that it cannot use.

    Example::

        @outbox.listener("order.imported", retry=outbox.Exponential(base=60, cap=3600))
        def import_order(event): ...
    """

    base: float = 0.2  # seconds
    cap: float = 600.0  # seconds
    multiplier: float = 2.0
    jitter: tuple[float, float] = (0.5, 1.5)  # a random factor in this range

    def delay(self, attempt: int) -> float:
        if self.base <= 0:
            return 0.0
        try:
            raw = self.base * float(self.multiplier) ** max(attempt - 1, 0)
        except OverflowError:
            raw = self.cap
        return bounded(min(self.cap, raw) * random.uniform(*self.jitter))


@dataclass(frozen=True, slots=True, init=False)
class Fixed(_BasePolicy):
    """Wait the same time after every failure: ``delay`` seconds, 5 by default.

    The field is called ``wait``, because ``delay`` is a method; ``dataclasses.replace`` takes
    either. The other options are those of ``Exponential``.

    Raises ``ValueError`` for an option that it cannot use.

    Example::

        policy = outbox.Fixed(3, max_attempts=5, give_up_on=(LookupError,))
        assert policy.delay(attempt=4) == 3
    """

    wait: float  # seconds

    def __init__(
        self,
        delay: float = UNSET,
        *,
        max_attempts: int | None = None,
        retry_on: ErrorTypes = (),
        give_up_on: ErrorTypes = (),
        wait: float = 5.0,
    ) -> None:
        object.__setattr__(self, "wait", wait if delay is UNSET else delay)
        _BasePolicy.__init__(
            self, max_attempts=max_attempts, retry_on=retry_on, give_up_on=give_up_on
        )

    def delay(self, attempt: int) -> float:
        return bounded(self.wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_BasePolicy):
    """Wait ``step`` × attempt seconds, at most ``cap``.

    The other options are those of ``Exponential``.

    Raises ``ValueError`` for an option that it cannot use.

    Example::

        policy = outbox.Linear(step=10, cap=25)
        assert [policy.delay(attempt) for attempt in (1, 2, 3)] == [10, 20, 25]
    """

    step: float = 5.0  # seconds
    cap: float = 300.0  # seconds

    def delay(self, attempt: int) -> float:
        return bounded(min(self.cap, self.step * max(attempt, 1)))


@dataclass(frozen=True, slots=True)
class Jittered:
    """Wait as another policy does, plus a random number of seconds, at most ``jitter``.

    Raises ``ValueError`` for a policy or a jitter that it cannot use.

    Example::

        policy = outbox.Jittered(outbox.Fixed(30), jitter=5)
        assert 30 <= policy.delay(attempt=1) <= 35
    """

    policy: RetryPolicy
    jitter: float = 0.5  # seconds

    def __post_init__(self) -> None:
        checked(self.policy)
        if expected := _SECONDS(self.jitter):
            raise ValueError(f"Jittered got jitter={self.jitter!r}; expected {expected}.")

    @property
    def max_attempts(self) -> int | None:
        return self.policy.max_attempts

    def should_retry(self, exc: BaseException) -> bool:
        return self.policy.should_retry(exc)

    def delay(self, attempt: int) -> float:
        return bounded(self.policy.delay(attempt) + random.uniform(0, self.jitter))


POLICIES: Mapping[str, type[Any]] = {"exponential": Exponential, "fixed": Fixed, "linear": Linear}


def from_setting(value: Any) -> RetryPolicy:
    """Return a policy, given as such, as its class, as the dotted path of one, or as a dict.

    In ``{"policy": "exponential", "base": 0.2, …}`` the policy is a name, a dotted path, or the
    dict of another policy, to whose delay up to ``jitter`` seconds are added. Error classes may be
    dotted paths, too.

    Raises ``ValueError`` for a policy or an option that is unknown or invalid.
    """
    if not isinstance(value := _imported(value), Mapping):
        return checked(value() if isinstance(value, type) else value)
    options = {**value}
    name = options.pop("policy", "exponential")
    for errors in ("retry_on", "give_up_on"):
        if isinstance(options.get(errors), (list, tuple)):
            options[errors] = tuple(map(_imported, options[errors]))
    make: Any = _imported(name)
    if isinstance(name, Mapping):
        make, options["policy"] = Jittered, from_setting(name)
    elif make is name:
        make = POLICIES.get(str(name))
    if make is None:
        raise ValueError(f"the retry policy {name!r} is unknown; expected one of {[*POLICIES]}.")
    try:
        return checked(make(**options))
    except TypeError as error:
        raise ValueError(f"the retry policy {name!r} cannot take {options}: {error}") from error


def _imported(value: Any) -> Any:
    """Return what a dotted path names, and anything else as it is."""
    try:
        return import_string(value) if isinstance(value, str) and "." in value else value
    except ImportError as error:
        raise ValueError(f"{value!r} cannot be imported: {error}") from error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, which may be circular."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__


def bounded(delay: float) -> float:
    """Limit a delay to the seconds, zero or more, that every database can add to its clock."""
    return min(delay, MAX_RETRY_DELAY) if delay > 0 else 0.0  # 0 for NaN too


def checked(value: Any) -> RetryPolicy:
    """Return ``value`` if it is a policy; raise ``ValueError`` otherwise, also for a class."""
    if isinstance(value, type) or not isinstance(value, RetryPolicy):
        raise ValueError(
            f"{value!r} is not a retry policy; expected an object with max_attempts, should_retry "
            "and delay, such as Exponential()."
        )
    return value


def _range(value: Any) -> str | None:
    good = isinstance(value, (tuple, list)) and len(value) == 2 and not any(map(_SECONDS, value))
    good = good and value[0] <= value[1]
    return None if good else "two numbers of at least 0, the smaller one first"


def _error_types(value: Any) -> str | None:
    good = isinstance(value, tuple) and all(
        isinstance(each, type) and issubclass(each, BaseException) for each in value
    )
    return None if good else "a tuple of exception classes"


_SECONDS = number(0)
OPTION_RULES: Mapping[str, Rule] = {
    "max_attempts": integer(1, optional=True),
    "retry_on": _error_types,
    "give_up_on": _error_types,
    **dict.fromkeys(("base", "cap", "multiplier", "wait", "step"), _SECONDS),
    "jitter": _range,
}
