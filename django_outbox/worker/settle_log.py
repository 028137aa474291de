"""Logs what was settled, refused or failed, and sends the signals of what was settled."""

from __future__ import annotations

import logging

from ..delivery.lease import Lease
from ..listeners.outcomes import Decision, Status
from ..log import first_line
from ..signals import announce, event_dead, event_settled

logger = logging.getLogger("django_outbox")

Settled = list[tuple[Lease, Decision]]


def log_failed(lease: Lease, error: BaseException | None = None) -> None:
    """Log an error of the worker itself; without ``error``, the one that is being handled."""
    logger.error(
        "delivery failed event_id=%s listener=%r",
        lease.event_id,
        lease.listener,
        exc_info=error or True,
    )


def log_refused(refused: Settled, error: Exception) -> None:
    """Log decisions that the database refuses; an error of one."""
    logger.error(
        "settle refused by the database, event stays leased "
        "count=%d event_id=%s listener=%r error=%s",
        len(refused),
        refused[0][0].event_id,
        refused[0][0].listener,
        first_line(error),
    )


def report_settled(settled: Settled, *, alias: str) -> None:
    """Log what was settled, and send the signals."""
    has_receivers = bool(event_settled.receivers)
    for lease, decision in settled:
        if decision.status is not Status.DONE or decision.outcome == "discarded":
            _log(lease, decision)
        if decision.status is Status.DEAD:
            announce(event_dead, sender=alias, event=lease.event, cause=decision.error)
        if has_receivers:
            announce(
                event_settled,
                sender=alias,
                event=lease.event,
                outcome=decision.outcome,
                duration=lease.duration,
                lag=lease.lag + lease.waited,
            )


def _log(lease: Lease, decision: Decision) -> None:
    """Log the outcome of a delivery; the text of a listener's error only at level DEBUG."""
    levels = {"dead": logging.ERROR, "retry": logging.WARNING, "discarded": logging.WARNING}
    level = levels.get(decision.outcome, logging.INFO)
    if decision.unavailable:  # the circuit breaker's line tells it, for all events
        level = logging.DEBUG
    logger.log(
        level,
        "%s event_id=%s event_type=%s listener=%r attempt=%d error=%s",
        decision.outcome,
        *lease.named,
        lease.event.attempts + decision.spent,
        decision.kind,
    )
    if decision.error:
        logger.debug(
            "error text event_id=%s listener=%r text=%s",
            lease.event_id,
            lease.listener,
            decision.error,
        )
