"""The health of a worker process, as its threads report it: the database is not queried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The reasons why a process is dead or unready; without any it is well."""

    dead: tuple[str, ...] = ()  # why it should be restarted
    unready: tuple[str, ...] = ()  # why it delivers nothing now

    @property
    def is_live(self) -> bool:
        return not self.dead

    @property
    def is_ready(self) -> bool:
        return not (self.dead or self.unready)

    def prefixed(self, name: str) -> Health:
        """Return the same health with ``name`` in front of each reason."""
        return Health(
            dead=tuple(f"{name}: {each}" for each in self.dead),
            unready=tuple(f"{name}: {each}" for each in self.unready),
        )


class Part(Protocol):
    """A part of a worker that has threads of its own."""

    def dead_reason(self, longest: float) -> str | None:
        """Return why only a new process helps, or None; a step may last ``longest`` seconds."""


class StartedPart(Part, Protocol):
    """A part whose threads start with the worker."""

    def start(self) -> None:
        """Start the threads."""


class DeliveringPart(Protocol):
    """A part of a worker without whose progress no event is delivered."""

    def unready_reason(self, longest: float) -> str | None:
        """Return why it makes no progress, or None; a step may last ``longest`` seconds."""


def health_of_parts(
    parts: Iterable[Part],
    delivering: Iterable[DeliveringPart],
    *,
    dead_after: float,
    unready_after: float,
) -> Health:
    """Return the health of a worker's threads, without a database query.

    A step longer than ``dead_after`` seconds makes the worker dead; one longer than
    ``unready_after`` seconds makes it unready.
    """
    return Health(
        dead=tuple(filter(None, (each.dead_reason(dead_after) for each in parts))),
        unready=tuple(filter(None, (each.unready_reason(unready_after) for each in delivering))),
    )


def combine(parts: Iterable[Health]) -> Health:
    """Return the health of a whole, with the reasons of all its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )
