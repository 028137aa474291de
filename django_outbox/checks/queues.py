"""System checks of queues, of interceptors of batches, and of relays.

Those of relays construct each backend; none connects to its broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured

from .. import conf, hooks
from ..conf import Settings
from ..exceptions import did_you_mean
from ..listeners import registry
from ..queue_settings import DEFAULT_QUEUE, RelaySettings
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
def check_queues(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E015 a queue that is not configured; W016 one without listeners; W017 one stream."""
    if conf.problems() or (settings := conf.current()).MODE == "writer_only":  # W006 reports it
        return
    yield from (*_unknown(settings), *_unused(settings), *_pointless(settings))


def _unknown(settings: Settings) -> Iterator[CheckMessage]:
    known = [*settings.queues]
    for each in registry.listeners():
        if each.queue not in known:
            yield Error(
                f"{each.where} listens to {each.event_type!r} in the queue {each.queue!r}, which "
                f'OUTBOX["QUEUES"] does not have; expected one of {", ".join(known)}.',
                hint=did_you_mean(each.queue, known, "Correct queue= of the listener.")
                + f' Or add it: OUTBOX["QUEUES"] = {{{each.queue!r}: {{}}}}.',
                id="django_outbox.E015",
            )


def _unused(settings: Settings) -> Iterator[CheckMessage]:
    used = {DEFAULT_QUEUE, *(each.queue for each in registry.listeners())}
    unused = [each for each in settings.queues if each not in used]
    if unused:
        yield Warning(
            f'No listener has one of these queues of OUTBOX["QUEUES"]: {", ".join(unused)}. '
            "Workers start threads for them all the same.",
            hint="Give a listener queue=, or remove the queue.",
            id="django_outbox.W016",
        )


def _pointless(settings: Settings) -> Iterator[CheckMessage]:
    if settings.MODE == "ordered" and settings.ORDERING == "global" and len(settings.queues) > 1:
        what = (
            "a slow queue, or a relay whose broker is away," if settings.RELAYS else "a slow queue"
        )
        yield Warning(
            f'OUTBOX["ORDERING"] is "global": all events are one stream, so {what} holds up every '
            "other queue.",
            hint='Set OUTBOX["ORDERING"] = "aggregate", or leave queues and relays out.',
            id="django_outbox.W017",
        )


@register("django_outbox")
def check_batch_interceptors(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W018 interceptors without ``batch = True``, if there are batch listeners."""
    if conf.problems() or conf.current().MODE == "writer_only":
        return
    # A relay runs nothing of the project that would need an interceptor.
    bulk = [each for each in registry.listeners() if each.batching and each.check is None]
    try:
        interceptors = hooks.interceptors()
    except Exception:  # noqa: BLE001 - E002 reports whatever importing one raises
        return
    pairs = zip(conf.current().INTERCEPTORS, interceptors, strict=True)
    left_out = [path for path, each in pairs if not getattr(each, "batch", False)]
    if bulk and left_out:
        yield Warning(
            f'OUTBOX["INTERCEPTORS"] has {", ".join(left_out)}, which batch listeners such as '
            f"{bulk[0].where} are called without; expected the attribute batch = True.",
            hint="Have each take a list of events, too, and set batch = True on it; or silence "
            "this if batches need none of what it does.",
            id="django_outbox.W018",
        )


# -- relays ----------------------------------------------------------------------------------------


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
