"""Interceptors: context managers around a call, which see its error but cannot swallow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

from ..events import Event

logger = logging.getLogger("django_outbox")

# Exceptions that end drain().
drain_ending_errors: ContextVar[tuple[type[BaseException], ...]] = ContextVar(
    "drain_ending_errors", default=()
)


def ends_drain(error: BaseException) -> bool:
    """Return whether a listener's exception ends ``drain()`` instead of counting as a failure."""
    return isinstance(error, drain_ending_errors.get())


def intercept(
    subject: Event | list[Event], interceptors: Iterable[Callable[[Any], Any]]
) -> ExitStack:
    """Enter every interceptor with an event, or the events of a batch, in order.

    Leaving the stack leaves them in reverse.

    An error on entering one is raised after the ones before it were left.
    """
    with ExitStack() as stack:
        for interceptor in interceptors:
            manager = interceptor(subject)
            if not hasattr(manager, "__enter__") or not hasattr(manager, "__exit__"):
                raise TypeError(
                    f"The interceptor {interceptor!r} returned {manager!r}; expected a context "
                    "manager, as @contextmanager makes one."
                )
            manager.__enter__()
            stack.push(_leaving(manager, interceptor))
        return stack.pop_all()


def _leaving(manager: Any, interceptor: Any) -> Callable[..., None]:
    def leave(*raised: Any) -> None:
        try:
            manager.__exit__(*raised)  # its result is ignored: it cannot swallow the error
        except BaseException as error:
            if ends_drain(error):
                raise
            logger.exception("interceptor failed at its end interceptor=%r", interceptor)

    return leave
