"""Interceptors: entered in order around a call, left in reverse; its end is theirs to see only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .. import hooks
from ..events import Event

logger = logging.getLogger("django_outbox")

Escaping = tuple[type[BaseException], ...]


def intercept(event: Event, escaping: Escaping) -> ExitStack:
    """Enter every interceptor; leaving the stack leaves them.

    What one raises on the way in is raised, after those before it were left.
    """
    with ExitStack() as stack:
        for interceptor in hooks.interceptors():
            manager = interceptor(event)
            if not hasattr(manager, "__enter__") or not hasattr(manager, "__exit__"):
                raise TypeError(
                    f"The interceptor {interceptor!r} returned {manager!r}; expected a context "
                    "manager, as @contextmanager makes one."
                )
            manager.__enter__()
            stack.push(_leaving(manager, interceptor, escaping))
        return stack.pop_all()


def _leaving(manager: Any, interceptor: Any, escaping: Escaping) -> Callable[..., None]:
    def leave(*raised: Any) -> None:
        try:
            manager.__exit__(*raised)  # what it returns would only say that it swallows the error
        except escaping:
            raise
        except BaseException:
            logger.exception("interceptor failed at its end interceptor=%r", interceptor)

    return leave
