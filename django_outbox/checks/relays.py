"""System checks for relays: backends that cannot be used, and timeouts that the lease cuts short.

They construct each backend; none connects to its broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured

from .. import conf, hooks
from ..exceptions import did_you_mean
from ..queue_settings import RelaySettings
from ..relays.relay import Relay, missing_client
from .databases import Configs

# The package's own backends, and the extra that installs the client of each.
EXTRAS: Final = {
    "django_outbox.relays.kafka.Kafka": "kafka",
    "django_outbox.relays.rabbitmq.RabbitMQ": "rabbitmq",
    "django_outbox.relays.nats.JetStream": "nats",
    "django_outbox.relays.redis.Stream": "redis",
    "django_outbox.relays.aws.SQS": "aws",
    "django_outbox.relays.aws.SNS": "aws",
    "django_outbox.relays.http.Webhook": "webhooks",
}


@register("django_outbox")
def check_relays(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E019 unusable backends; E029 their options; E002 RETRY; W031 timeouts over a lease."""
    if conf.problems() or conf.current().MODE == "writer_only":  # E001, W006 report all of it
        return
    for each in conf.current().relays.values():
        yield from _of_relay(each)


def _of_relay(settings: RelaySettings) -> Iterator[CheckMessage]:
    if settings.RETRY is not None:
        try:
            hooks.retry_from(settings.RETRY, settings.where("RETRY"))
        except ImproperlyConfigured as error:
            yield Error(str(error), hint="Correct the retry policy.", id="django_outbox.E002")
    relay = Relay(settings)
    try:
        cls = relay.backend_class
    except ImproperlyConfigured as error:
        yield Error(str(error), hint=_hint(settings.BACKEND, error), id="django_outbox.E019")
        return
    try:
        timeout = relay.new_backend().timeout
    except Exception as error:  # noqa: BLE001 - whatever the backend or its client raises
        text = str(error)
        if not isinstance(error, ImproperlyConfigured):
            text = f"{settings.where('OPTIONS')}: {cls.__name__} raises {type(error).__name__}."
        hint = f"See the options of {cls.__name__}, and those of its client."
        yield Error(text, hint=hint, id="django_outbox.E029")
        return
    yield from _long_timeout(settings, timeout)


def _hint(path: str, error: ImproperlyConfigured) -> str:
    if path in EXTRAS and missing_client(path, error):
        return f'Run pip install "django-transactional-outbox[{EXTRAS[path]}]".'
    otherwise = "Correct the dotted path, or install what the module imports."
    return did_you_mean(path, EXTRAS, otherwise) if error.__cause__ else otherwise


def _long_timeout(settings: RelaySettings, timeout: float) -> Iterator[CheckMessage]:
    most = conf.current().LEASE / 2
    if timeout > most:
        yield Warning(
            f"The relay {settings.name!r} has a timeout of {timeout:g} s, but a call ends after "
            f'{most:g} s, half of OUTBOX["LEASE"], so that its events stay leased.',
            hint='Lower "timeout" in its OPTIONS, or raise OUTBOX["LEASE"].',
            id="django_outbox.W031",
        )
