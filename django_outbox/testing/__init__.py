"""Test kit: inspect written events, deliver them in the test's own thread, let time pass.

Plain functions and context managers, for unittest and pytest alike.
"""

from __future__ import annotations

from .capture import Written, assert_event_written, capture_events, make_event
from .delivery import (
    accept_test_transaction,
    drain,
    immediate_delivery,
    pass_time,
    running_worker,
    wait_until,
)
from .relayed import Relayed, capture_relayed, send_relayed

__all__ = [
    "Relayed",
    "Written",
    "accept_test_transaction",
    "assert_event_written",
    "capture_events",
    "capture_relayed",
    "drain",
    "immediate_delivery",
    "make_event",
    "pass_time",
    "running_worker",
    "send_relayed",
    "wait_until",
]
