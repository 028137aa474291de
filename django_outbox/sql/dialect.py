"""The operations on the outbox's tables. The class of each database defines or replaces some."""

from __future__ import annotations

from .inspection import Inspection
from .routes import Routing, Slots
from .streams import Parking, StreamLeases
from .upkeep import Upkeep


class Dialect(Routing, Slots, Parking, StreamLeases, Upkeep, Inspection):
    """Every operation on the tables, in the SQL of one database."""
