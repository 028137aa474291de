"""What is done to the workers; each scenario is a function that plays with a rig."""

from tests.faults.scenarios import business, crashes, endurance, hangs, outages, queues, stops
from tests.faults.scenarios.registry import SCENARIOS

__all__ = ["SCENARIOS", "business", "crashes", "endurance", "hangs", "outages", "queues", "stops"]
