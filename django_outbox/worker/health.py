"""The health of a worker process, as its threads report it: the database is not queried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def reasons(found: Iterable[str | None]) -> tuple[str, ...]:
    """Return the reasons that parts of a worker have given, without those that are well."""
    return tuple(filter(None, found))


def combine(parts: Iterable[Health]) -> Health:
    """Return the health of a whole, with the reasons of all its parts."""
    all_ = [*parts]
    return Health(
        dead=tuple(reason for each in all_ for reason in each.dead),
        unready=tuple(reason for each in all_ for reason in each.unready),
    )
