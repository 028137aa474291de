"""Relays: send events to a message broker or a webhook, by ``OUTBOX["RELAYS"]`` alone.

``Backend`` is the base class of what talks to a broker; those of the package are in ``kafka``,
``rabbitmq``, ``nats``, ``redis``, ``aws`` and ``http``, each with an extra of its own.
"""

from __future__ import annotations

from ..exceptions import BrokerUnavailable
from .backend import Backend, Message, Outcome, Unconfirmed

__all__ = ["Backend", "BrokerUnavailable", "Message", "Outcome", "Unconfirmed"]
