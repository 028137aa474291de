"""The test kit: see what was written, deliver it in the test's own thread, let time pass.

Plain functions and context managers, for unittest and pytest alike.
"""

from __future__ import annotations

from .clock import pass_time, wait_until
from .delivered import accept_test_transaction, drain, immediate_delivery, running_worker
from .written import Written, assert_event_written, capture_events, make_event

__all__ = [
    "Written",
    "accept_test_transaction",
    "assert_event_written",
    "capture_events",
    "drain",
    "immediate_delivery",
    "make_event",
    "pass_time",
    "running_worker",
    "wait_until",
]
