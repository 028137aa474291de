"""Who listens: listeners by aggregate type, event type and name, and the route of an event."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeVar

from .events import LENGTHS, type_name
from .exceptions import ListenerAlreadyRegistered, seconds
from .retry import RetryPolicy, checked

F = TypeVar("F", bound=Callable[..., Any])


class _Any(Enum):
    ANY = "*"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any.ANY  # listen to every aggregate type


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One registered callable and what was said about it."""

    call: Callable[..., Any]
    event_type: str  # a type, or a pattern with *
    aggregate_type: str | _Any
    name: str  # empty: the one listener of its pair
    retry: RetryPolicy | None  # None: OUTBOX["RETRY"]
    timeout: float | None  # seconds
    atomic: bool
    is_async: bool = field(init=False)

    @property
    def key(self) -> tuple[str | _Any, str, str]:
        return self.aggregate_type, self.event_type, self.name

    @property
    def title(self) -> str:
        """Name the listener within an event's progress: it must outlive a deploy."""
        kind = "" if self.aggregate_type is ANY else f"[{self.aggregate_type}]"
        return f"{self.event_type}{kind} {self.name}".rstrip()

    def __post_init__(self) -> None:
        call = self.call
        awaited = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            getattr(call, "__call__", None)  # noqa: B004 - an object's own call, not the test for one
        )
        object.__setattr__(self, "is_async", awaited)

    @property
    def where(self) -> str:
        """Name the callable and its place: ``shop.listeners.reserve_stock (…/listeners.py:12)``."""
        call = inspect.unwrap(_whole(self.call))
        of_object = getattr(type(call), "__call__", None)  # noqa: B004 - as in is_async
        code = getattr(call, "__code__", None) or getattr(of_object, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"{label(call)}{place}"

    @property
    def fault(self) -> str | None:
        """Say why calling it with an event, its one argument, would fail or do nothing."""
        if _makes_generator(self.call):
            return f"{self.where} is a generator function: a call would run nothing of it."
        try:
            inspect.signature(self.call).bind(object())
        except TypeError:
            return f"{self.where} does not take exactly one argument, the event."
        except ValueError:  # a builtin without a signature
            return None
        return None


_listeners: dict[tuple[str | _Any, str, str], Listener] = {}
conflicts: list[str] = []  # places taken twice, as found while apps loaded; for the checks


def listener(
    event_type: Any,
    *,
    aggregate_type: Any = ANY,
    name: str = "",
    retry: RetryPolicy | None = None,
    timeout: float | None = None,
    atomic: bool = False,
) -> Callable[[F], F]:
    """Register a function, method, callable object or ``async def`` for an event type.

    ``event_type`` may be a pattern (``"order.*"``, ``"*"``). One listener per (aggregate type,
    event type, name): give each further one a ``name``, and it gets the event too.

    Raises ``ListenerAlreadyRegistered`` for a second one and ``ValueError`` for a type that no
    event can have, and for options that would fail with the first event.
    """
    if retry is not None:
        checked(retry)
    if not isinstance(name, str):
        raise ValueError(f"name is {name!r}; expected a str.")
    if timeout is not None and seconds(timeout, of="timeout") == 0:
        raise ValueError("timeout is 0; expected seconds above zero, or None.")
    kind = aggregate_type if aggregate_type is ANY else _checked(aggregate_type, "aggregate_type")
    pattern = _checked(event_type, "event_type")

    def register(call: F) -> F:
        add(
            Listener(
                call=call,
                event_type=pattern,
                aggregate_type=kind,
                name=name,
                retry=retry,
                timeout=timeout,
                atomic=atomic,
            )
        )
        return call

    return register


def add(new: Listener) -> None:
    """Register; ``ListenerAlreadyRegistered`` names both if the place is taken."""
    if old := _listeners.get(new.key):
        raise ListenerAlreadyRegistered(
            f"{new.where} and {old.where} both listen to {new.event_type!r} of aggregate type "
            f"{new.aggregate_type!r} under the name {new.name!r}. Expected one; give the second a "
            "name= of its own to have both called."
        )
    _listeners[new.key] = new
    route.cache_clear()


def remove(call: Callable[..., Any]) -> None:
    """Forget every registration of a callable; for tests."""
    for key in [key for key, each in _listeners.items() if each.call == call]:
        del _listeners[key]
    route.cache_clear()


def listeners() -> tuple[Listener, ...]:
    """Return all listeners in the order of their registration."""
    return tuple(_listeners.values())


@lru_cache(maxsize=4096)
def route(aggregate_type: str, event_type: str) -> tuple[Listener, ...]:
    """Return who gets this event, most specific first: one unnamed listener and all named ones."""
    matches = sorted(
        (each for each in listeners() if _matches(each, aggregate_type, event_type)),
        key=_generality,
    )
    unnamed = [each for each in matches if not each.name]
    return tuple(each for each in matches if each.name or each is unnamed[0])


def nearby(event_type: str) -> list[str]:
    """Return the registered event types, nearest first, for an error message."""
    known = sorted({each.event_type for each in listeners()})
    return difflib.get_close_matches(event_type, known, n=3, cutoff=0) or known[:3]


def label(call: Callable[..., Any]) -> str:
    """Name a callable by module and qualified name."""
    call = _whole(call)
    named = call if hasattr(call, "__qualname__") else type(call)
    return f"{named.__module__}.{named.__qualname__}"


def _makes_generator(call: Callable[..., Any]) -> bool:
    return any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
        for each in (call, getattr(call, "__call__", None))  # noqa: B004 - as in is_async
    )


def _whole(call: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(call, functools.partial):
        call = call.func
    return call


def _checked(value: Any, column: str) -> str:
    name = type_name(value, column)
    if not name or len(name) > LENGTHS[column]:
        raise ValueError(f"{column} is {name!r}; expected 1 to {LENGTHS[column]} characters.")
    return name


def _matches(each: Listener, aggregate_type: str, event_type: str) -> bool:
    if each.aggregate_type is not ANY and each.aggregate_type != aggregate_type:
        return False
    return each.event_type == event_type or (
        "*" in each.event_type and bool(_pattern(each.event_type).fullmatch(event_type))
    )


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    """Only ``*`` is special; brackets and question marks stand for themselves."""
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def _generality(each: Listener) -> tuple[int, int, int]:
    """Exact pair, then the type with any aggregate, then patterns with the most literal text."""
    is_pattern = "*" in each.event_type
    literal = len(each.event_type) - each.event_type.count("*") if is_pattern else 0
    return int(is_pattern), -literal, int(each.aggregate_type is ANY)
