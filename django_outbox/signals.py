"""Signals for what the outbox has done; sent with ``send_robust``, skipped without receivers.

``sender`` is always the database alias. Logging and metrics are receivers of these signals.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger("django_outbox")

event_written = Signal()  # event
event_queued = Signal()  # event: accepted by the hot queue of this process
event_dropped = Signal()  # event: the hot queue was full; the row stays due
events_claimed = Signal()  # count, source: a claim has run; count may be 0
event_started = Signal()  # event, listener
event_decided = Signal()  # event, listener, outcome, duration (seconds in it); not settled yet
batch_called = Signal()  # listener, size (events), duration (seconds): a call has ended
# relay (its name), published, refused and deferred (messages), duration (seconds): a batch was sent
relay_published = Signal()
event_settled = Signal()  # event, outcome, duration (seconds in listeners), lag (due → started)
event_rescued = Signal()  # event, rescues
event_dead = Signal()  # event, cause
events_replayed = Signal()  # count
events_discarded = Signal()  # count
events_purged = Signal()  # count
delivery_paused = Signal()  # kind, name, reason, by, until
delivery_resumed = Signal()  # kind, name, count (events and streams made due)
breaker_opened = Signal()  # queue, pause (seconds), reason: nothing is claimed from the queue
breaker_closed = Signal()  # queue
listener_overdue = Signal()  # event, listener, seconds: it ran longer than its timeout
lease_lost = Signal()  # count: settles or renewals refused because another worker owns the row
worker_started = Signal()  # worker_id, worker
worker_stopped = Signal()  # worker_id


def announce(signal: Signal, *, sender: str, **facts: Any) -> None:
    """Send a signal robustly and log receivers' errors; do nothing if there is no receiver."""
    if not signal.receivers:
        return
    try:
        answers = signal.send_robust(sender=sender, **facts)
    except Exception as error:
        logger.error("receiver failed receiver=%r", signal, exc_info=error)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            logger.error("receiver failed receiver=%r", receiver, exc_info=answer)
