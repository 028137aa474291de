"""The scenarios by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.rig import Rig

SERVERS = ("postgres", "mariadb", "mysql")
ALL = (*SERVERS, "sqlite")

# A business like any other: shares of what its events are and do (``writer.Plan``).
MIX = {"keyed": 0.3, "booked": 0.2, "follow": 0.05, "fail": 0.05, "defer": 0.02, "slow": 0.05}


@dataclass(frozen=True)
class Scenario:
    name: str
    play: Callable[[Rig], None]
    databases: tuple[str, ...]
    sizes: tuple[str, ...]
    small: tuple[str, ...]  # the databases of the size "ci"

    def is_for(self, database: str, size: str) -> bool:
        databases = self.small if size == "ci" else self.databases
        return database in databases and size in self.sizes

    @property
    def title(self) -> str:
        return (self.play.__doc__ or "").partition("\n")[0].rstrip(".")


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *databases: str, sizes: tuple[str, ...] = ("ci", "full"), small: tuple[str, ...] = ()
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    def note(play: Callable[[Rig], None]) -> Callable[[Rig], None]:
        SCENARIOS[play.__name__] = Scenario(
            play.__name__, play, databases, sizes, small or databases
        )
        return play

    return note
