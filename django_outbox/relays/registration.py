"""Registers a batch listener for each relay in ``OUTBOX["RELAYS"]``, and finds them again."""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .. import conf, hooks
from ..listeners import registry
from ..listeners.options import Batching
from ..listeners.registry import ANY, Listener
from .relay import Relay


def register() -> None:
    """Register the relays that the settings name, in place of those registered before."""
    for each in relays():
        registry.remove(each)
        each.close()
    for settings in conf.current().relays.values():
        registry.add(_listener(Relay(settings)))


def relays() -> list[Relay]:
    """Return the registered relays in the order of the settings."""
    return [each.call for each in registry.listeners() if isinstance(each.call, Relay)]


@atexit.register
def _close() -> None:
    for each in relays():
        each.close()


def _listener(relay: Relay) -> Listener:
    settings, per_key, retry = relay.settings, 1, None
    with suppress(ImproperlyConfigured):  # a check reports it; events wait, or are written anyway
        per_key = relay.backend_class.per_key
    with suppress(ImproperlyConfigured):
        where = f'OUTBOX["RELAYS"][{settings.name!r}]["RETRY"]'
        retry = None if settings.RETRY is None else hooks.retry_from(settings.RETRY, where)
    return Listener(
        call=relay,
        event_type=", ".join(settings.EVENTS),
        patterns=settings.EVENTS,
        aggregate_type=ANY,
        name=settings.title,
        retry=retry,
        timeout=None,
        atomic=False,
        queue=settings.title,
        batching=Batching(settings.BATCH, settings.WITHIN, min(per_key, settings.BATCH)),
        check=relay.check,
    )


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX" and not conf.problems():
        register()


# After conf's own receiver, which was connected before it, has forgotten the former settings.
setting_changed.connect(_reset, dispatch_uid="django_outbox.relays")
