"""Check what a batch listener answered: ``None``, or one answer for each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..listeners.outcomes import Dead, Defer, Done

ANSWERS = (Done, Defer, Dead, BaseException)


class WrongAnswer(TypeError):
    """A batch listener's answer does not tell which events are done."""


def checked(answer: Any, count: int) -> list[Any] | None:
    """Return the answers to ``count`` events, None if all are done; or raise ``WrongAnswer``."""
    if answer is None:
        return None
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes, bytearray)):
        raise WrongAnswer(
            f"A batch listener answered {type(answer).__name__}; expected None, or a list with one "
            "answer for each event."
        )
    if len(answer) != count:
        raise WrongAnswer(
            f"A batch listener answered {len(answer)} values to {count} events; expected None, or "
            "one answer for each event in their order."
        )
    return [
        each if each is None or isinstance(each, ANSWERS) else _unknown(each) for each in answer
    ]


def _unknown(answer: Any) -> TypeError:
    return TypeError(
        f"A batch listener answered {type(answer).__name__} for this event; expected None, Done, "
        "Defer, Dead or an exception instance."
    )
