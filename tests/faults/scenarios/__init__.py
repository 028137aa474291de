"""What is done to the workers; each scenario is a function that plays with a rig."""

from tests.faults.scenarios import (
    batches,
    business,
    clusters,
    crashes,
    endurance,
    hangs,
    outages,
    queues,
    relays,
    relays_away,
    reminders,
    rolling,
    siblings,
    stops,
)
from tests.faults.scenarios.registry import SCENARIOS

__all__ = [
    "SCENARIOS",
    "batches",
    "business",
    "clusters",
    "crashes",
    "endurance",
    "hangs",
    "outages",
    "queues",
    "relays",
    "relays_away",
    "reminders",
    "rolling",
    "siblings",
    "stops",
]
