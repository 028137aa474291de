"""What is asked of a callable: its name and place, whether it is async, what it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def qualified_name(call: Callable[..., Any]) -> str:
    """Return module and qualified name of a callable."""
    call = _unwrap_partial(call)
    named = call if hasattr(call, "__qualname__") else type(call)
    return f"{named.__module__}.{named.__qualname__}"


def location(call: Callable[..., Any]) -> str:
    """Return name and source location of a callable."""
    call = inspect.unwrap(_unwrap_partial(call))
    of_object = getattr(type(call), "__call__", None)  # noqa: B004 - as in is_async
    code = getattr(call, "__code__", None) or getattr(of_object, "__code__", None)
    return f"{qualified_name(call)}{f' ({code.co_filename}:{code.co_firstlineno})' if code else ''}"


def redefines(new: Callable[..., Any], old: Callable[..., Any]) -> bool:
    """Return whether a shell or a reload has defined the same function again."""
    name, places = qualified_name(new), (location(new), location(old))
    if not (inspect.isfunction(new) and inspect.isfunction(old)) or new is old or "<" in name:
        return False  # lambdas and what a function makes may be several
    return places[0] == places[1] or all(each.startswith(f"{name} (<") for each in places)


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether a callable has to be awaited."""
    of_object = getattr(call, "__call__", None)  # noqa: B004 - an object's own call, not the test for one
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(of_object)


def fault(call: Callable[..., Any], expected: str, *arguments: object) -> str | None:
    """Return why a call with these arguments would fail or do nothing; None if it would not."""
    calls = (call, getattr(call, "__call__", None))  # noqa: B004 - as in is_async
    if any(inspect.isgeneratorfunction(c) or inspect.isasyncgenfunction(c) for c in calls):
        return f"{location(call)} is a generator function: a call would run nothing of it."
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        return f"{location(call)} does not take {expected}."
    except ValueError:  # a builtin without a signature
        return None
    return None


def _unwrap_partial(call: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(call, functools.partial):
        call = call.func
    return call
