"""What an event stores of its task: the call in its payload, the runs in its ``result``."""

from __future__ import annotations

import json
from datetime import datetime
from traceback import format_exception
from typing import Any

import msgspec

from ...delivery.decide import clean
from ...listeners.callables import qualified_name
from ...listeners.outcomes import COALESCED

MAX_ERRORS = 20  # failed runs whose tracebacks are kept
MAX_TRACEBACK = 4000  # characters of a traceback that are kept, from its end


class Call(msgspec.Struct):
    """The payload of an enqueued task."""

    args: list[Any]
    kwargs: dict[str, Any]
    backend: str
    queue: str
    run_after: datetime | None = None


class Error(msgspec.Struct):
    exception_class_path: str
    traceback: str


class Runs(msgspec.Struct):
    """The finished runs of a task, with the fields of Django's ``TaskResult``."""

    worker_ids: list[str] = []
    errors: list[Error] = []
    started_at: datetime | None = None  # of the first run
    last_attempted_at: datetime | None = None
    return_value: Any = None

    @property
    def text(self) -> str:
        """Return JSON in ASCII, which every database takes; ``ValueError`` for NaN and Infinity."""
        return json.dumps(msgspec.to_builtins(self), allow_nan=False)

    def start(self, worker: str, at: datetime | None) -> None:
        self.worker_ids.append(worker)
        self.started_at, self.last_attempted_at = self.started_at or at, at

    def add_error(self, error: BaseException) -> None:
        trace = clean("".join(format_exception(error))[-MAX_TRACEBACK:])
        self.errors.append(Error(qualified_name(type(error)), trace))
        del self.errors[:-MAX_ERRORS]


def runs_of(text: str | None) -> Runs:
    return msgspec.json.decode("{}" if text in (None, COALESCED) else text, type=Runs)
