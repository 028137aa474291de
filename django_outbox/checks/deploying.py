"""What only matters where it runs: for ``manage.py check --deploy``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Info, Warning, register
from django.db import connections

from .. import conf, registry
from .databases import Configs, aliases

# Modules whose calls leave the host; a listener is known by their names in its own code.
NETWORK = (
    "aiohttp", "boto3", "botocore", "django.core.mail", "ftplib", "google.cloud", "grpc",
    "http.client", "httpx", "kafka", "kombu", "nats", "paramiko", "pika", "requests", "smtplib",
    "stripe", "twilio", "urllib.request", "urllib3",
)  # fmt: skip


@register("django_outbox", deploy=True)
def check_deployment(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W007 naive times; W014 long timeouts; I015 the network and default retries; W050 stale."""
    if conf.problems():
        return []
    return [*_times(), *_timeouts(), *_retries(), *_ages()]


def _times() -> Iterator[CheckMessage]:
    if not django_settings.USE_TZ:
        yield Warning(
            "USE_TZ is False: a naive occurred_at or available_at is read as local time, and one "
            "hour each autumn is there twice.",
            hint="Set USE_TZ = True, or pass aware datetimes or deliver_after= and silence this.",
            id="django_outbox.W007",
        )


def _timeouts() -> Iterator[CheckMessage]:
    drain = conf.current().DRAIN_TIMEOUT
    long = [each.where for each in registry.listeners() if each.timeout and each.timeout > drain]
    if long:
        yield Warning(
            f'A stop waits {drain:g} s (OUTBOX["DRAIN_TIMEOUT"]) for the listeners that run, but '
            f"these may take longer by their own timeout: {', '.join(long)}. What a deploy "
            "interrupts runs again.",
            hint='Raise OUTBOX["DRAIN_TIMEOUT"] (below OUTBOX["LEASE"]), or make sure that they '
            "may be repeated, and silence this.",
            id="django_outbox.W014",
        )


def _retries() -> Iterator[CheckMessage]:
    if conf.current().RETRY is not None:
        return
    for each in registry.listeners():
        if each.retry is None and (module := _network(each.call)):
            yield Info(
                f"{each.where} calls {module} with the default retries, which are spent after "
                "about 100 seconds. An outage that lasts longer leaves dead events.",
                hint='Give it retry=, or set OUTBOX["RETRY"]: for example '
                '{"policy": "exponential", "cap": 3600, "max_attempts": 20}.',
                id="django_outbox.I015",
            )


def _ages() -> Iterator[CheckMessage]:
    for alias in aliases():
        settings = connections.settings[alias]
        is_kept = settings.get("CONN_MAX_AGE", 0) is None and connections[alias].vendor != "sqlite"
        if is_kept and not settings.get("CONN_HEALTH_CHECKS"):
            yield Warning(
                f"The connections of {alias!r} are kept for ever (CONN_MAX_AGE is None) and never "
                "checked: after a restart of the database each of them fails once.",
                hint="Set CONN_HEALTH_CHECKS = True beside it.",
                id="django_outbox.W050",
            )


def _network(call: Callable[..., Any]) -> str | None:
    """Return the module by which a callable's own code leaves the host; None: none, or unknown."""
    function = inspect.unwrap(call)
    function = getattr(function, "__func__", function)
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in code.co_names if code else ():
        value = known.get(name)
        home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        for module in NETWORK:
            if home == module or str(home).startswith(f"{module}."):
                return module
    return None
