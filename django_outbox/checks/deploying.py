"""System checks that matter only in production: for ``manage.py check --deploy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Warning, register
from django.db import connections

from .. import conf
from ..listeners import registry
from .databases import Configs, aliases


@register("django_outbox", deploy=True)
def check_deployment(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """Report W007 naive times; W014 long timeouts; W050 stale connections."""
    if conf.problems():
        return []
    return [*_naive_times(), *_long_timeouts(), *_stale_connections()]


def _naive_times() -> Iterator[CheckMessage]:
    if not django_settings.USE_TZ:
        yield Warning(
            "USE_TZ is False: a naive occurred_at or available_at is read as local time, and one "
            "hour each autumn occurs twice.",
            hint="Set USE_TZ = True, or pass aware datetimes or deliver_after= and silence this.",
            id="django_outbox.W007",
        )


def _long_timeouts() -> Iterator[CheckMessage]:
    drain = conf.current().DRAIN_TIMEOUT
    long = [each.where for each in registry.listeners() if each.timeout and each.timeout > drain]
    if long:
        yield Warning(
            f'A stop waits {drain:g} s (OUTBOX["DRAIN_TIMEOUT"]) for running listeners, but '
            f"these may take longer by their own timeout: {', '.join(long)}. A deploy hands "
            "their events back, and they run again from the start.",
            hint='Raise OUTBOX["DRAIN_TIMEOUT"], or make sure that they can be repeated and '
            "silence this.",
            id="django_outbox.W014",
        )


def _stale_connections() -> Iterator[CheckMessage]:
    for alias in aliases():
        settings = connections.settings[alias]
        is_kept = settings.get("CONN_MAX_AGE", 0) is None and connections[alias].vendor != "sqlite"
        if is_kept and not settings.get("CONN_HEALTH_CHECKS"):
            yield Warning(
                f"The connections of {alias!r} are kept for ever (CONN_MAX_AGE is None) and never "
                "checked: after a restart of the database each of them fails once.",
                hint="Set CONN_HEALTH_CHECKS = True as well.",
                id="django_outbox.W050",
            )
